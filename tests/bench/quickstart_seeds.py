"""The quickstart at several seeds: the claim, its spread, and the numbers that keep it honest.

    python tests/bench/quickstart_seeds.py [--seeds 0 1 2] [--output runs/quickstart-seeds] [--questions 2048]

Every seed has its own base model. Prints the comparison of each seed, means and standard deviations over seeds, and for
each line of the claim whether it holds. Continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from capo_megatron.evaluation.comparison import Comparison
from capo_megatron.evaluation.run import compare, read_records

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
MODELS = ("base", "grpo", "capo")
COLUMNS = {"accuracy": "mean@16", "auc_mean": "AUC-mean", "auc_questions": "mixed", "auc_pooled": "pooled AUC"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--questions", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    found = []
    for seed in options.seeds:
        folder = options.output / f"seed_{seed}"
        arguments = ["--seed", seed, "--output", folder, "--questions", options.questions, "--ranks", options.ranks]
        subprocess.run([sys.executable, str(QUICKSTART), *map(str, arguments)], check=True)
        records = {name: read_records(folder / f"{name}.jsonl") for name in MODELS}
        found.append(compare(records["base"], {name: records[name] for name in MODELS[1:]}))
    print(f"\n## {len(found)} seeds, {options.questions} questions x 16 samples\n")
    print(_table(found))
    return _verdicts(found)


def _table(found: list[Comparison]) -> str:
    lines = ["| model | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in MODELS:
        cells = [_spread([comparison.models[name][column] for comparison in found]) for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for first, second in (("base", "grpo"), ("base", "capo"), ("grpo", "capo")):
        pairs = [pair for c in found for pair in c.pairs if (pair.first, pair.second) == (first, second)]
        difference = _spread([pair.difference for pair in pairs])
        lines.append(
            f"\npaired AUC-mean, {second} - {first}: {difference} on {_spread([p.questions for p in pairs])} questions"
        )
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    digits = 0 if max(values) > 10 else 3
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def _verdicts(found: list[Comparison]) -> int:
    """Print whether each claim holds; 1 if one does not."""

    def per_seed(name: str, column: str) -> list[float]:
        return [comparison.models[name][column] for comparison in found]

    base, grpo, capo = (per_seed(name, "accuracy") for name in MODELS)
    gap = [c - g for c, g in zip(per_seed("capo", "auc_mean"), per_seed("grpo", "auc_mean"), strict=True)]
    claims = {
        "GRPO gains at least 12 points of accuracy on every seed": min(g - b for g, b in zip(grpo, base, strict=True))
        >= 0.12,
        "CAPO gains at least 8 points of accuracy on every seed": min(c - b for c, b in zip(capo, base, strict=True))
        >= 0.08,
        "CAPO's AUC-mean is above GRPO's on every seed": min(gap) > 0,
        "and by at least 0.03 in the mean": mean(gap) >= 0.03,
    }
    print()
    for claim, holds in claims.items():
        print(f"{'holds ' if holds else 'FAILS '} {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
