"""One-digit arithmetic as plain few-shot completion, for small pretrained models.

    3 + 4 = 7
    2 + 5 = 7
    1 + 8 = 9
    6 + 2 =

The response is ` 8` and a newline, on which sampling stops. A 135M-parameter language model solves such prompts often
enough, but not always, so that most groups hold right and wrong answers and there is something to learn from.

The split goes by the fact asked for (`6 + 2`), not by the whole prompt, and shots show training facts only: no answer
to a validation or evaluation question is ever shown. There are 100 facts per operation; more problems than facts
differ in their shots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from transformers import PreTrainedTokenizerBase

from capo_megatron.data.splits import Demonstration, Draft, Split, collect, split_of, split_seed
from capo_megatron.types import Problem

_SYMBOLS = {"add": "+", "multiply": "*"}


@dataclass(frozen=True, kw_only=True)
class OneDigitOptions:
    """The `data.task_options` of the one-digit task."""

    operation: str = "add"  # add | multiply
    shots: int = 3

    def __post_init__(self) -> None:
        if self.operation not in _SYMBOLS:
            raise ValueError(f"operation: got {self.operation!r}, expected one of {', '.join(_SYMBOLS)}.")
        if not 0 <= self.shots <= 16:
            raise ValueError(f"shots: got {self.shots}, expected 0 to 16.")


class OneDigitTask:
    """One-digit sums or products. `Problem.extra`: x, y. `Problem.answer`: the integer as text."""

    name = "one_digit"
    reward = "task"
    stop: tuple[str, ...] = ("\n",)

    def __init__(self, options: OneDigitOptions, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._shots = options.shots
        self._symbol = _SYMBOLS[options.operation]
        self._tokenizer = tokenizer
        self._seed = seed
        self._facts = {split: self._facts_of(split) for split in Split}

    def train_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.TRAIN, count)

    def validation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.VALIDATION, count)

    def evaluation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.EVALUATION, count)

    def template(self, question: str) -> str:
        return question

    def question(self, problem: Problem) -> str:
        return problem.prompt

    def demonstrations(self, count: int, step: int) -> list[Demonstration]:
        """`count` training questions with right answers."""
        rng = np.random.default_rng([self._seed, step])
        drafts = [self._draft(rng, Split.TRAIN) for _ in range(count)]
        return [Demonstration(draft.prompt, f" {draft.answer}\n") for draft in drafts]

    def _collect(self, split: Split, count: int) -> list[Problem]:
        return collect(self._drafts(split), split, count, self.name, self._tokenizer)

    def _drafts(self, split: Split) -> Iterator[Draft]:
        rng = np.random.default_rng(split_seed(split, self._seed))
        while True:
            yield self._draft(rng, split)

    def _draft(self, rng: np.random.Generator, split: Split) -> Draft:
        asked = self._facts[split]
        x, y = asked[rng.integers(len(asked))]
        question = self._question(x, y)
        known = self._facts[Split.TRAIN]
        shots = [known[index] for index in rng.permutation(len(known))[: self._shots + 1]]
        shots = [fact for fact in shots if fact != (x, y)][: self._shots]
        lines = [f"{self._question(*fact)} {self._answer(*fact)}\n" for fact in shots]
        return Draft(question, "".join(lines) + question, str(self._answer(x, y)), {"x": x, "y": y})

    def _facts_of(self, split: Split) -> list[tuple[int, int]]:
        return [(x, y) for x, y in product(range(10), repeat=2) if split_of(self._question(x, y)) is split]

    def _question(self, x: int, y: int) -> str:
        return f"{x} {self._symbol} {y} ="

    def _answer(self, x: int, y: int) -> int:
        return x + y if self._symbol == "+" else x * y
