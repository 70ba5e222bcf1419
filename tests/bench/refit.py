"""What it costs to give vLLM the policy's weights: seconds and extra memory, from several layouts.

    make .venv-vllm/.installed
    .venv-vllm/bin/python tests/bench/refit.py [--layouts TP1 TP2 PP2] [--bucket 128] [--rounds 5] [--layers 24]

A policy of Qwen2.5-0.5B's shape (tied, bfloat16, random weights) and a vLLM engine in each rank. Every round refits all
of them. Printed per layout, the largest of all ranks:

    seconds   of a refit, median; and relative to a copy of as many bytes in memory, by each rank alone at that moment
    extra     highest resident memory during a refit minus that before it, largest of the rounds but the first, in which
              vLLM's allocator grows; the target is two buckets plus the largest tensor
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import torch

from capo_megatron.config import ParallelConfig, TrainConfig, VllmConfig
from capo_megatron.mcore import runtime
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import RandomSource
from capo_megatron.weights.table import hf_shapes

LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "PP2": (1, 2)}
MIB = 2**20


class NoText:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--bucket", type=int, default=128, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--measure", choices=list(LAYOUTS), help="in this rank")
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    for name in options.layouts:
        ranks = LAYOUTS[name][0] * LAYOUTS[name][1]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = ["--measure", name, "--bucket", options.bucket, "--rounds", options.rounds, "--layers", options.layers]
        words += ["--vocabulary", options.vocabulary]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, *launch, str(Path(__file__)), *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith("  ")), flush=True)


def measure(options: argparse.Namespace) -> None:
    tensor, pipeline = LAYOUTS[options.measure]
    shape = ModelShape(options.vocabulary, 896, options.layers, 14, 2, 4864, 4096, tie_word_embeddings=True)
    team = runtime.start(ParallelConfig(tensor=tensor, pipeline=pipeline), seed=0)
    policy = MegatronPolicy(shape, team, TrainConfig(), dtype=torch.bfloat16, total_steps=1)
    policy.load(RandomSource(shape, 0))
    engine = VllmEngine(
        shape, NoText(), "bfloat16", VllmConfig(bucket_mib=options.bucket, batch_size=8), team.rank, team.size
    )
    seconds, copies, extra = [], [], []
    for version in range(options.rounds):
        team.barrier()
        copies.append(seconds_of_a_copy(shape))
        team.barrier()
        with Peak() as peak:
            began = time.perf_counter()
            engine.load_weights(policy.hf_weights(), version)
            seconds.append(time.perf_counter() - began)
        extra.append(peak.extra)
    found = team.gather((median(seconds), median(copies), max(extra[1:])))
    if team.rank == 0:
        slowest, copy, most = (max(column) for column in zip(*found, strict=True))
        sizes = [torch.Size(size).numel() * 2 for size in hf_shapes(shape).values()]
        allowed = 2 * options.bucket * MIB + max(sizes)
        print(
            f"  {options.measure}  {sum(sizes) / 1e9:.2f} GB  refit {slowest:6.2f} s, {slowest / copy:5.1f} x a copy "
            f"of {copy:.2f} s   extra {most / MIB:6.0f} MiB (at most {allowed / MIB:.0f}: "
            f"{'ok' if most <= allowed else 'missed'})"
        )
    team.stop()


def seconds_of_a_copy(shape: ModelShape) -> float:
    """Of as many bytes as the model has, tensor by tensor into memory that is there."""
    total = 0.0
    target = torch.zeros(max(torch.Size(size).numel() for size in hf_shapes(shape).values()), dtype=torch.bfloat16)
    source = torch.ones_like(target)
    for size in hf_shapes(shape).values():
        count = torch.Size(size).numel()
        began = time.perf_counter()
        target[:count].copy_(source[:count])
        total += time.perf_counter() - began
    return total


class Peak:
    """The highest resident memory within a block, minus that before it, sampled every millisecond."""

    def __enter__(self) -> Peak:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self._highest = self._process.memory_info().rss
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self._highest = max(self._highest, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        self.extra = self._highest - self._before


if __name__ == "__main__":
    main()
