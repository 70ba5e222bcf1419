"""How often the grader agrees with published labels, and how fast it grades.

    python tests/bench/grading.py math_cot_100.jsonl gsm8k_example_model_solutions.jsonl

The files are public: QwenLM/Qwen2.5-Math, evaluation/data/eval_rm_maj_example/ (100 problems x 8 responses, labels in
`score`), and openai/grade-school-math (1,319 problems x 4 responses, `is_correct`; their answers follow "A:", and are
put into a box here). Both are told apart by their columns. Every disagreement is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from capo_megatron.config import RewardConfig
from capo_megatron.rewards import build_reward
from capo_megatron.types import Problem, Verdict

GSM8K_MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


class Labelled(NamedTuple):
    problem: Problem
    response: str
    correct: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    reward = build_reward(RewardConfig(workers=options.workers))
    try:
        for path in options.files:
            rows = list(labelled(path))
            began = time.monotonic()
            grades = reward.grade([row.problem for row in rows], [row.response for row in rows])
            seconds = time.monotonic() - began
            pairs = list(zip(rows, grades, strict=True))
            other = [(row, grade) for row, grade in pairs if (grade.verdict is Verdict.CORRECT) is not row.correct]
            print(
                f"{path.name}: {len(rows) - len(other)} of {len(rows)} verdicts are the labels, in {seconds:.1f} s "
                f"({seconds / len(rows) * 6000:.0f} s for 6,000; at most 60)"
            )
            for row, grade in other:
                print(
                    f"  {row.problem.id}: label {row.correct}, {grade.verdict.value}: {grade.extracted!r} for "
                    f"{row.problem.answer!r}"
                )
    finally:
        reward.close()


def labelled(path: Path) -> Iterator[Labelled]:
    """The responses of a file, with what their publishers say of them."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        yield from _math(row, number) if "score" in row else _gsm8k(row, number)


def _math(row: dict[str, Any], number: int) -> Iterator[Labelled]:
    problem = Problem(str(number), row["question"], (), row["answer"])
    for response, correct in zip(row["response"], row["score"], strict=True):
        yield Labelled(problem, response, correct)


def _gsm8k(row: dict[str, Any], number: int) -> Iterator[Labelled]:
    problem = Problem(str(number), row["question"], (), row["ground_truth"].rpartition("A:")[2].strip())
    for model in GSM8K_MODELS:
        solution, _, answer = row[model]["solution"].rpartition("A:")
        yield Labelled(problem, f"{solution}\\boxed{{{answer.strip()}}}", row[model]["is_correct"])


if __name__ == "__main__":
    main()
