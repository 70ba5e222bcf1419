"""Peak memory and time of `target_outputs` beside the naive log-softmax, for scoring and for training.

    python tests/bench/logprob_memory.py [--dtype bfloat16] [--hidden 896] [--tokens 4096] [--vocab 151936]

Every figure comes from fresh processes, naive and ours in turn, `repeats` of each. A process makes the inputs (hidden,
weight, targets) in place, notes its resident memory, runs the computation once and reports

    peak     highest resident memory of the process (getrusage's ru_maxrss) minus the memory noted before; the largest
             of the repeats. The inputs do not count; logits, temporaries, outputs and, in training, the gradients of
             hidden and weight do.
    seconds  wall-clock, median of the repeats; cpu: processor time, which other programs disturb less.

`naive` is the product, cast to float32, `log_softmax`, `gather`. In training both sides run forward and backward with
the same random upstream gradient. With OMP_NUM_THREADS unset, everything runs with one thread and then with two.

The naive bfloat16 product is very slow on CPUs without bfloat16 instructions: use a smaller --hidden there, which
hardly changes the memory of either side. The naive training run takes about 9 GB; where they are not free, it is
refused.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
PEAK_TARGETS = {"score": 1 / 8, "train": 1 / 3}  # of the naive peak, at most
TIME_TARGET = 1.2  # of the naive time, at most


def main() -> None:
    options = _options()
    if options.measure is not None:
        print(json.dumps(measure(options)))
        return
    chosen = os.environ.get("OMP_NUM_THREADS")
    for threads in [int(chosen)] if chosen else [1, 2]:
        print(f"\n{options.tokens} tokens x {options.vocab} ids, hidden {options.hidden}, {options.dtype},", end=" ")
        print(f"chunk_tokens {options.chunk_tokens}, {threads} thread(s), {options.repeats} repeats", flush=True)
        for phase in options.phases:
            compare(phase, options, threads)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--phases", nargs="+", choices=tuple(PEAK_TARGETS), default=list(PEAK_TARGETS))
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "PHASE"), help="one measurement, in this process")
    return parser.parse_args()


def compare(phase: str, options: argparse.Namespace, threads: int) -> None:
    """Measure both sides of a phase and print their figures, ratios and targets."""
    runs: dict[str, list[dict[str, float]]] = {"naive": [], "ours": []}
    for _ in range(options.repeats):
        for side in runs:
            runs[side].append(_measure_apart(side, phase, threads))
    found = {side: _summary(results) for side, results in runs.items()}
    for side, (peak, seconds, cpu) in found.items():
        print(f"  {phase:5} {side:5}  peak {peak:>13,.0f} bytes  {seconds:8.2f} s  cpu {cpu:8.2f} s", flush=True)
    peak, seconds, cpu = (ours / naive for ours, naive in zip(found["ours"], found["naive"], strict=True))
    limit = PEAK_TARGETS[phase]
    print(f"  {phase:5} ratio  peak {peak:.4f} (at most {limit:.4f}: {_verdict(peak <= limit)})", end="  ")
    print(f"time {seconds:.2f} (at most {TIME_TARGET}: {_verdict(seconds <= TIME_TARGET)})  cpu {cpu:.2f}", flush=True)


def _summary(results: list[dict[str, float]]) -> tuple[float, float, float]:
    median = {key: statistics.median(result[key] for result in results) for key in ("seconds", "cpu")}
    return max(result["peak"] for result in results), median["seconds"], median["cpu"]


def _verdict(reached: bool) -> str:
    return "ok" if reached else "MISSED"


def _measure_apart(side: str, phase: str, threads: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", side, phase]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Peak bytes beyond the inputs and seconds of one side and phase, in this process."""
    import psutil
    import torch

    side, phase = options.measure
    needed = options.vocab * (
        8 * options.hidden + 12 * options.tokens
    )  # weight and gradient, three copies of the logits
    if side == "naive" and psutil.virtual_memory().available < 1.2 * needed:
        sys.exit(f"The naive run takes about {needed / 1e9:.1f} GB, which are not free now. Use fewer --tokens.")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.empty(options.tokens, options.hidden, dtype=dtype).normal_()
    weight = torch.empty(options.vocab, options.hidden, dtype=dtype).normal_(std=0.02)
    targets = torch.randint(0, options.vocab, (options.tokens,))
    upstream = torch.randn(options.tokens)
    hidden.requires_grad_(phase == "train")
    weight.requires_grad_(phase == "train")
    run = {"naive": _naive, "ours": _ours}[side]
    run(hidden[:1].detach(), weight[:1].detach(), torch.zeros(1, dtype=torch.int64), 1)  # imports are not measured
    before = psutil.Process().memory_info().rss
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs = run(hidden, weight, targets, options.chunk_tokens)
    if phase == "train":
        logprobs.backward(upstream)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    return {"peak": peak, "seconds": wall, "cpu": cpu}


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    import torch

    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    from capo_megatron.mcore.logprobs import target_outputs

    return target_outputs(hidden, weight, targets, vocab_size=weight.shape[0], chunk_tokens=chunk_tokens).logprobs


if __name__ == "__main__":
    main()
