"""Make the training and validation files of CAPO's experiments from DeepScaleR's public file.

    hf download agentica-org/DeepScaleR-Preview-Dataset deepscaler.json --repo-type dataset --local-dir data
    python examples/prepare_deepscaler.py data/deepscaler.json data/deepscaler

Writes train.jsonl (20,000 problems) and validation.jsonl (240) with the columns `problem` and `answer`. A problem that
occurs twice is kept once, or not at all if its answers differ. A reference answer that the grader cannot read, or does
not find equal to itself, could never reward a response: its problem is left out. Both are counted. The paper does not
say which problems it took; here they are the first of a seeded shuffle, so the same call gives the same files.

The grader compares every answer with itself in `--workers` killable processes; an answer that takes longer than
`--timeout` seconds counts as unreadable.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from capo_megatron.answers import unboxed
from capo_megatron.config import DataConfig, RewardConfig
from capo_megatron.data.problems import Row, read_files
from capo_megatron.errors import CapoError, DataError
from capo_megatron.rewards import build_reward
from capo_megatron.types import Problem, Verdict

_AT_A_TIME = 1000  # answers given to the grader together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="deepscaler.json, or the same as .jsonl or .parquet")
    parser.add_argument("destination", type=Path, help="folder for train.jsonl and validation.jsonl")
    parser.add_argument("--train", type=int, default=20_000, help="training problems (default 20000)")
    parser.add_argument("--validation", type=int, default=240, help="validation problems (default 240)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="grading processes (default 2)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one answer (default 10)")
    options = parser.parse_args()
    grading = RewardConfig(workers=options.workers, timeout_s=options.timeout)
    try:
        for line in prepare(
            options.source, options.destination, options.train, options.validation, options.seed, grading
        ):
            print(line)
    except CapoError as error:
        print(f"prepare_deepscaler: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(
    source: Path, destination: Path, train: int, validation: int, seed: int, grading: RewardConfig
) -> list[str]:
    """Write both files; what was done, as lines for a person. Raises DataError before anything is written."""
    if train < 1 or validation < 0:
        raise DataError(f"--train {train}, --validation {validation}: must be at least 1 and 0. Give other numbers.")
    files = {destination / "validation.jsonl": validation, destination / "train.jsonl": train}
    for path in files:
        if path.exists():
            raise DataError(f"{path}: is already there. Use it, delete it, or name another folder.")
    rows, left_out = read_files((str(source),), DataConfig())
    unique = without_twins(rows, left_out)
    random.Random(seed).shuffle(unique)
    chosen = list(islice(readable(unique, grading, left_out), train + validation))
    if len(chosen) < train + validation:
        raise DataError(
            f"{source}: has {len(chosen)} usable problems of {len(rows)}, {train} + {validation} were asked for. "
            "Lower --train or --validation."
        )
    destination.mkdir(parents=True, exist_ok=True)
    for path, count in files.items():
        write(path, chosen[:count])
        chosen = chosen[count:]
    named = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()) if count)
    read = f"{len(rows):,} problems read; left out before there were enough: {named or 'none'}"
    return [read, *(f"{count:,} in {path}" for path, count in files.items())]


def without_twins(rows: Sequence[Row], left_out: Counter[str]) -> list[Row]:
    """One row per problem, in order; none of a problem that has two different answers."""
    answers: dict[str, list[Row]] = {}
    for row in rows:
        answers.setdefault(" ".join(unicodedata.normalize("NFC", row.problem).split()), []).append(row)
    kept = [twins[0] for twins in answers.values() if len({row.answer for row in twins}) == 1]
    conflicting = sum(len(twins) for twins in answers.values() if len({row.answer for row in twins}) > 1)
    left_out["conflicting_duplicate"] += conflicting
    left_out["duplicate"] += len(rows) - conflicting - len(kept)
    return kept


def readable(rows: Sequence[Row], grading: RewardConfig, left_out: Counter[str]) -> Iterator[Row]:
    """The rows whose answer the grader finds equal to itself, as they are asked for."""
    with closing(build_reward(grading)) as reward:
        for start in range(0, len(rows), _AT_A_TIME):
            part = rows[start : start + _AT_A_TIME]
            problems = [Problem(row.place, "", (), row.answer) for row in part]
            grades = reward.grade(problems, [rf"\boxed{{{unboxed(row.answer)}}}" for row in part])
            for row, grade in zip(part, grades, strict=True):
                if grade.verdict is Verdict.CORRECT:
                    yield row
                else:
                    left_out["unreadable_answer"] += 1


def write(path: Path, rows: Sequence[Row]) -> None:
    """The rows as JSON lines; the file appears when it is complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"problem": row.problem, "answer": row.answer}, ensure_ascii=False) + "\n")
    unfinished.rename(path)


if __name__ == "__main__":  # the grader starts processes
    sys.exit(main())
