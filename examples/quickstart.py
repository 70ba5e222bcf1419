"""Train a small model by GRPO and by CAPO, and see what each does to its accuracy and its calibration.

    python examples/quickstart.py [--seed 0] [--ranks 2] [--output runs/quickstart] [--questions 2048]

Runs the commands that you would type, on `examples/quickstart.yaml`: a supervised warm-up that makes the base model,
two trainings from it, three evaluations on questions that neither training nor validation has seen; then one table and
one figure. A run that was interrupted continues where it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from capo_megatron.evaluation.plots import training_figure
from capo_megatron.evaluation.run import compare, read_records
from capo_megatron.runlog import read_rows

CONFIG = Path(__file__).with_name("quickstart.yaml")
# GRPO keeps what it shares with the file's CAPO: both average their losses over tokens.
METHODS = {"grpo": ["algorithm.kind=grpo"], "capo": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--questions", type=int, default=2048, help="evaluation questions (default 2048)")
    options = parser.parse_args()
    began = time.monotonic()
    records = run_all(options.output, options.seed, options.ranks, options.questions)
    print(compare(records["base"], {name: records[name] for name in METHODS}))
    metrics = {name: read_rows(options.output / name / "metrics.jsonl") for name in METHODS}
    for path in training_figure(metrics, records, options.output / "quickstart"):
        print(f"figure: {path}")
    print(f"done in {(time.monotonic() - began) / 60:.1f} minutes")


def run_all(output: Path, seed: int, ranks: int, questions: int) -> dict[str, list]:
    """Train both methods and evaluate all three models; the records of each."""
    common = [f"seed={seed}"]
    for name, options in METHODS.items():
        command("train", str(CONFIG), f"output={output / name}", *common, *options, "--nproc", str(ranks))
    records = {}
    for name, run, flags in [("base", "grpo", ["--base"]), ("grpo", "grpo", []), ("capo", "capo", [])]:
        path = output / f"{name}.jsonl"
        target = str(output / run)
        command("eval", target, "--problems", str(questions), "--output", str(path), "--nproc", str(ranks), *flags)
        records[name] = list(read_records(path))
    return records


def command(*arguments: str) -> None:
    print(f"\n$ capo-megatron {' '.join(arguments)}", flush=True)
    finished = subprocess.run([sys.executable, "-m", "capo_megatron", *arguments], check=False)
    if finished.returncode:
        sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
