"""Whether a Hugging Face directory survives the way to Megatron and back, bit for bit, with equal logits.

    python checkpoint_tools/verify_roundtrip.py SRC [--logits] [--work FOLDER]

Both conversions are written to a temporary folder (in FOLDER, default: beside SRC), compared, and removed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from capo_megatron.cli import main


def roundtrip(source: Path, work: Path, logits: list[str]) -> int:
    """0 if nothing changed, else the exit code of the first command that failed."""
    with tempfile.TemporaryDirectory(dir=work, prefix="roundtrip-") as folder:
        there, back = Path(folder) / "megatron", Path(folder) / "huggingface"
        return (
            main(["convert", "hf-to-megatron", str(source), str(there)])
            or main(["convert", "megatron-to-hf", str(there), str(back)])
            or main(["convert", "verify", str(source), str(there), *logits])
            or main(["convert", "verify", str(source), str(back), *logits])
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("--logits", action="store_const", const=["--logits"], default=[])
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work is not None and not options.work.is_dir():
        parser.error(f"--work {options.work}: no such folder")
    sys.exit(roundtrip(options.source, options.work or options.source.resolve().parent, options.logits))
