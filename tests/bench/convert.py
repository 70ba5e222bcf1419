"""What converting costs against copying the files, in time and memory.

    python tests/bench/convert.py [--models 1.5B 7B] [--rounds 3] [--folder FOLDER] [--bridge PYTHON]

Makes a random bfloat16 checkpoint of Qwen2.5-Math's shape in FOLDER (default: a temporary one; three times its size is
needed), and removes everything again. Each round copies the source with `cp -r`, converts it, copies the result, and
converts it back, so that a disk that slows down slows both; medians are printed. Every one of them starts after `sync`,
with the source read once before, and its output is removed after it.

"whole" is the wall time of the command, with Python's start and the imports; "itself" is the conversion alone, which is
what is compared with `cp -r`. "synced" lets both end with `sync`, when the bytes are on the disk. Memory is the peak of
the process's resident set.

--bridge PYTHON also lets Megatron-Bridge do the same, which builds the model; PYTHON is the interpreter of the
environment that `convert_bridge.py` describes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from capo_megatron.weights.huggingface import save_hf
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes

MODELS = {
    "1.5B": ModelShape(151_936, 1536, 28, 12, 2, 8960, 4096, tie_word_embeddings=True),
    "7B": ModelShape(152_064, 3584, 28, 28, 4, 18_944, 4096),
}
MEMORY_TARGETS = {"1.5B": 1.5e9, "7B": 3e9}
TIME_TARGET = 1.2

OURS = """
import sys
from capo_megatron.weights import convert
found = convert.{verb}(sys.argv[1], sys.argv[2])
print(found.seconds, found.peak_bytes)
"""
# The same start-up before it: memory that a machine has had free for a second may cost it more than what is just freed.
COPY = """
import subprocess, sys, time
from capo_megatron.weights import convert
began = time.monotonic()
subprocess.run(["cp", "-r", *sys.argv[1:3]], check=True)
print(time.monotonic() - began, 0)
"""
BRIDGE = Path(__file__).with_name("convert_bridge.py")


class Cost(NamedTuple):
    """What one run took: seconds of the process, of its work, with a final sync; bytes of memory."""

    whole: float
    itself: float
    synced: float
    peak: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--bridge", type=Path, metavar="PYTHON")
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="convert-") as folder:
            measure(name, Path(folder), options.rounds, options.bridge)


def measure(name: str, folder: Path, rounds: int, bridge: Path | None) -> None:
    """Print the table of one model."""
    source, there = folder / "hf", folder / "megatron"
    save_hf(source, MODELS[name], random_weights(MODELS[name]))
    print(f"\n{name}: {size(source) / 1e9:.1f} GB", flush=True)
    subprocess.run([*command("ours", "hf_to_megatron", source, None), str(source), str(there)], check=True)
    found: dict[tuple[str, str], list[Cost]] = {}
    for number in range(rounds):
        for verb, origin in (("hf_to_megatron", source), ("megatron_to_hf", there)):
            sides = ["cp -r", "ours", *(["Megatron-Bridge"] if bridge else [])]
            for side in sides[:: 1 if number % 2 == 0 else -1]:
                found.setdefault((verb, side), []).append(
                    run(command(side, verb, source, bridge), origin, folder / "out")
                )
    for verb in ("hf_to_megatron", "megatron_to_hf"):
        copy = typical(found[verb, "cp -r"])
        print(f"  {verb:<15} cp -r             {copy.itself:7.2f} s, synced {copy.synced:7.2f} s")
        for side in [side for way, side in found if way == verb and side != "cp -r"]:
            cost = typical(found[verb, side])
            limits = ""
            if side == "ours":
                good = cost.itself / copy.itself <= TIME_TARGET, cost.peak <= MEMORY_TARGETS[name]
                limits = f"  (at most {TIME_TARGET}: {_ok(good[0])}; {MEMORY_TARGETS[name] / 1e9} GB: {_ok(good[1])})"
            print(
                f"  {'':<15} {side:<16}  {cost.itself:7.2f} s, synced {cost.synced:7.2f} s, whole {cost.whole:7.2f} s"
                f"   / cp -r: {cost.itself / copy.itself:.2f}, synced {cost.synced / copy.synced:.2f}, "
                f"whole {cost.whole / copy.itself:.2f}   peak {cost.peak / 1e9:.2f} GB{limits}",
                flush=True,
            )


def _ok(good: bool) -> str:
    return "ok" if good else "missed"


def command(side: str, verb: str, model: Path, bridge: Path | None) -> list[str]:
    """The command that takes a source and a target behind it, and prints its seconds and its peak memory."""
    if side == "Megatron-Bridge":
        return ["sh", "-c", f'exec {bridge} {BRIDGE} {verb} "$0" "$1" {model}']
    return [sys.executable, "-c", COPY if side == "cp -r" else OURS.format(verb=verb)]


def run(words: list[str], origin: Path, target: Path) -> Cost:
    """Copy or convert `origin` to `target`, with `origin` read before, and remove the result."""
    subprocess.run(["sh", "-c", 'cat "$0"/* "$0"/.m* >/dev/null 2>&1; sync', str(origin)], check=True)
    began = time.monotonic()
    done = subprocess.run([*words, str(origin), str(target)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{words}\n{done.stderr}")
    itself, peak = map(float, done.stdout.split()[-2:])
    whole = time.monotonic() - began
    os.sync()
    synced = time.monotonic() - began - (whole - itself)
    shutil.rmtree(target)
    os.sync()
    return Cost(whole, itself, synced, int(peak))


def typical(costs: list[Cost]) -> Cost:
    return Cost(*(median(values) for values in zip(*costs, strict=True)))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def random_weights(shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every tensor's values are cut from one block of random ones, at another place each."""
    block = torch.randn(2**25, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number, (name, wanted) in enumerate(hf_shapes(shape).items()):
        count = torch.Size(wanted).numel()
        rolled = block.roll(-number * 9973)
        yield name, rolled.repeat(-(-count // len(block)))[:count].view(wanted)


if __name__ == "__main__":
    main()
