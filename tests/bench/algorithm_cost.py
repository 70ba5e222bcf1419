"""What a step of each algorithm costs on the laptop task, relative to GRPO's, and where its time goes.

    OMP_NUM_THREADS=1 python tests/bench/algorithm_cost.py [--rounds 3] [--steps 20] [--kinds capo grpo ...]

All train from one base model, in one process on one rank, in turn: a round runs every algorithm once, the next round in
the opposite order, so that a machine that slows down slows all of them. Printed are medians over all measured steps:
seconds of a step, of its phases, and ratios to GRPO's.

The last line compares what CAPO takes more than GRPO with one scoring pass, since a reference pass is all that it may
add. In the table the policies differ, and CAPO's responses grow longer: all of its phases have more to do. So this
pair is run once more with a learning rate of 1e-12, at which both policies stay the base model and sample the same
responses.

SCAPO is measured while its correction is on, with three perturbed prompts; CoDaPO with its repeated problems; DAPO with
the rounds of sampling that its filter needs here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from capo_megatron import assemble
from capo_megatron.algorithms import ALGORITHMS
from capo_megatron.config import load
from capo_megatron.mcore import runtime
from capo_megatron.rewards import build_reward

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
PHASES = ("rollout", "score", "train", "refit")
# The file's own options go with every algorithm: the mean over tokens, too, unless it has another default of its own.
OPTIONS = {
    "dr_grpo": ["algorithm.length=8"],
    "gspo": ["algorithm.reduction=seq-mean-token-mean"],
    "scapo": ["data.perturbations=[typo, typo, typo]", "algorithm.credit_steps=100000"],
}
STILL = ["train.lr=1e-12", "train.min_lr=1e-12"]  # far below the resolution of float32 weights
SKIP = 3  # first steps of a run, which allocate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured in each run")
    parser.add_argument("--kinds", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--warmup-steps", type=int, default=600, help="of the base model")
    options = parser.parse_args()
    kinds = list(dict.fromkeys(["grpo", *options.kinds]))
    runs = [(kind, []) for kind in kinds] + ([("grpo", STILL), ("capo", STILL)] if "capo" in kinds else [])
    found: dict[str, list[dict[str, float]]] = {name_of(*run): [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        ranks = runtime.start(load(CONFIG).parallel, seed=0)
        for number in range(options.rounds):
            for kind, more in runs[:: 1 if number % 2 == 0 else -1]:
                found[name_of(kind, more)] += measure(ranks, Path(folder), kind, more, number, options)
        ranks.stop()
    report({kind: found[kind] for kind in kinds})
    if "capo" in kinds:
        report_pair(found[name_of("grpo", STILL)], found[name_of("capo", STILL)])


def name_of(kind: str, more: Sequence[str]) -> str:
    return f"{kind}-still" if more else kind


def measure(
    ranks: runtime.Runtime, folder: Path, kind: str, more: Sequence[str], number: int, options: argparse.Namespace
) -> list[dict[str, float]]:
    """The logged rows of a run's measured steps."""
    output = folder / f"{name_of(kind, more)}-{number}"
    config = load(
        CONFIG,
        [
            f"output={output}",
            f"warmup.path={folder / 'base'}",
            f"warmup.steps={options.warmup_steps}",
            f"algorithm.kind={kind}",
            *OPTIONS.get(kind, []),
            *more,
            f"train.steps={SKIP + options.steps}",
            "checkpoint.every=0",
            "eval.every=0",
            "log.console=off",
            "log.samples=0",
        ],
    )
    assemble.train_on(ranks, config, assemble.accept(config, 1), build_reward(config.reward), lambda _: None)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][SKIP:]


def report(found: dict[str, list[dict[str, float]]]) -> None:
    """Print the table."""
    grpo = typical(found["grpo"], "step")
    print("\n| algorithm | s/step | x GRPO | " + " | ".join(f"{phase} s (x)" for phase in PHASES) + " |")
    print("|---" * (3 + len(PHASES)) + "|")
    for kind, rows in found.items():
        step = typical(rows, "step")
        cells = [
            f"{typical(rows, phase):.3f} ({typical(rows, phase) / typical(found['grpo'], phase):.2f})"
            for phase in PHASES
        ]
        print(f"| {kind} | {step:.3f} | {step / grpo:.2f} | " + " | ".join(cells) + " |")


def report_pair(grpo: Sequence[dict[str, float]], capo: Sequence[dict[str, float]]) -> None:
    """Print what CAPO adds to GRPO on the same responses."""
    lengths = [[row["response/length"] for row in rows] for rows in (grpo, capo)]
    assert lengths[0] == lengths[1], "the policies have moved: they sampled other responses"
    more, forward = typical(capo, "step") - typical(grpo, "step"), typical(grpo, "score")
    print(f"\nCAPO - GRPO: {more:.3f} s a step, {more / forward:.2f} of one scoring pass ({forward:.3f} s)")


def typical(rows: Sequence[dict[str, float]], phase: str) -> float:
    return median(row[f"seconds/{phase}"] for row in rows)


if __name__ == "__main__":
    main()
