"""The laptop task with rollouts of this step's weights and of the last step's: accuracy, and what the overlap saves.

    python tests/bench/one_step_off.py [--seeds 0 1 2] [--steps 120] [--ranks 2] [--output runs/one-step-off]

Both trainings of a seed start from the same base model and correct for the engine's log-probs in the same way. Prints
accuracy on questions that neither training nor validation has seen, and the median seconds of a step's phases. 1 if
the mean accuracies are more than two points apart. Continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

from capo_megatron.evaluation.run import read_records
from capo_megatron.runlog import read_rows

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
POINTS = 0.02  # of accuracy, by which the two may differ
CORRECTION = ["algorithm.importance_cap=2"]
# "rollout" is what the loop waited for; "generate" and "reward" ran in it, or in the thread, where "ahead" holds both
# and "overlapped" is the part of it that nobody waited for.
PHASES = ("step", "rollout", "generate", "reward", "ahead", "overlapped", "score", "train", "refit")
SIGNS = ("rollout/lag", "train/importance_weight", "train/importance_clip_share", "train/clip_share", "engine/gap_p99")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--questions", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=Path("runs/one-step-off"))
    options = parser.parse_args()
    accuracy: dict[int, list[float]] = {0: [], 1: []}
    rows: dict[int, list[dict]] = {0: [], 1: []}
    for seed in options.seeds:
        for ahead in accuracy:
            run = options.output / f"seed_{seed}" / f"async_{ahead}"
            _train(run, seed, ahead, options)
            accuracy[ahead].append(mean(record.correct for record in read_records(run.with_suffix(".jsonl"))))
            rows[ahead] += read_rows(run / "metrics.jsonl")[1:]  # the first step starts up
    return _report(accuracy, rows, options.steps)


def _train(run: Path, seed: int, ahead: int, options: argparse.Namespace) -> None:
    """Train and evaluate one run. Validation is left out: it would be most of a short run's time."""
    changes = [f"output={run}", f"seed={seed}", f"rollout.async_steps={ahead}", f"train.steps={options.steps}"]
    changes += ["eval.every=0", "data.validation_size=0", *CORRECTION]
    ranks = ["--nproc", str(options.ranks)]
    _command("train", str(CONFIG), *changes, *ranks)
    records = run.with_suffix(".jsonl")
    if not records.exists():
        _command("eval", str(run), "--problems", str(options.questions), "--output", str(records), *ranks)


def _command(*arguments: str) -> None:
    print(f"\n$ capo-megatron {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "capo_megatron", *arguments], check=True)


def _report(accuracy: dict[int, list[float]], rows: dict[int, list[dict]], steps: int) -> int:
    print(f"\n## {len(accuracy[0])} seeds, {steps} steps\n")
    print("| async_steps | mean@16 | of each seed |\n|---|---|---|")
    for ahead, values in accuracy.items():
        print(f"| {ahead} | {mean(values):.3f} | {', '.join(f'{value:.3f}' for value in values)} |")
    print("\n| median of the steps after the first | 0 | 1 |\n|---|---|---|")
    for name in [f"seconds/{phase}" for phase in PHASES] + list(SIGNS):
        cells = [[row[name] for row in found if row.get(name) is not None] for found in rows.values()]
        print(f"| {name} | " + " | ".join(f"{median(cell):.4g}" if cell else "" for cell in cells) + " |")
    ran, saved = (sum(row.get(f"seconds/{name}", 0.0) for row in rows[1]) for name in ("ahead", "overlapped"))
    whole = [median(row["seconds/step"] for row in found) for found in rows.values()]
    print(f"\noverlapped: {saved / max(ran, 1e-9):.0%} of the sampling. Step, 1 to 0: {whole[1] / whole[0]:.2f}")
    gap = mean(accuracy[1]) - mean(accuracy[0])
    print(f"{'holds ' if abs(gap) <= POINTS else 'FAILS '} accuracy within {POINTS:.0%}: {gap:+.3f}")
    return 0 if abs(gap) <= POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
