"""Tasks of the reasoning-gym package, as problems that its own scorers grade."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from capo_megatron.data.problems import did_you_mean
from capo_megatron.data.splits import Demonstration, Draft, Split, collect, split_seed
from capo_megatron.data.templates import Template
from capo_megatron.errors import DataError
from capo_megatron.types import Problem


class GymTask:
    """One reasoning-gym task.

    `Problem.extra` has what its scorer needs: rg_task (name), rg_config (options) and rg_entry (entry as JSON values).
    `Problem.answer` is the entry's own answer, "" where the task has many right answers and only its scorer knows.
    Raises DataError for an unknown task or option, and for a task whose scorer does not survive entries made of JSON
    values.
    """

    reward = "reasoning_gym"
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        template: Template,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> None:
        self.name = f"reasoning_gym/{name}"
        self._task = name
        self._options = dict(options)
        self.template = template
        self._tokenizer = tokenizer
        self._seed = seed
        self._check_options()
        self._check_scorer()

    def train_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.TRAIN, count)

    def validation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.VALIDATION, count)

    def evaluation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.EVALUATION, count)

    def question(self, problem: Problem) -> str:
        return str(problem.extra["rg_entry"]["question"])

    def demonstrations(self, count: int, step: int) -> list[Demonstration]:
        """Never: entries come with answers, not with worked responses."""
        raise DataError(f"warmup: {self.name} has no demonstrations. Use data.task=chain or one_digit, or drop warmup.")

    def _collect(self, split: Split, count: int) -> list[Problem]:
        # 6/8 or 1/8 of the questions belong to the split: room for these and for questions that repeat themselves.
        size = (2 if split is Split.TRAIN else 16) * count + 1000
        return collect(self._drafts(split, size), split, count, self.name, self._tokenizer)

    def _drafts(self, split: Split, size: int) -> Iterator[Draft]:
        dataset = self._dataset(split_seed(split, self._seed), size)
        for index in range(size):
            entry = dataset[index]
            answer = "" if entry["answer"] is None else str(entry["answer"])
            extra = {"rg_task": self._task, "rg_config": self._options, "rg_entry": _json_values(entry)}
            yield Draft(entry["question"], self.template(entry["question"]), answer, extra)

    def _dataset(self, seed: int, size: int) -> Any:
        import reasoning_gym  # only here: three seconds that other tasks need not pay

        try:
            return reasoning_gym.create_dataset(self._task, seed=seed, size=size, **self._options)
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"data.task_options: {self.name} refuses {self._options} ({error}).") from error

    def _check_options(self) -> None:
        from reasoning_gym.factory import DATASETS

        if self._task not in DATASETS:
            hint = did_you_mean(self._task, sorted(DATASETS))
            raise DataError(f"data.task: reasoning-gym has no task {self._task!r}.{hint}")
        known = sorted({spec.name for spec in fields(DATASETS[self._task][1])} - {"seed", "size"})
        for name in self._options:
            if name not in known:
                hint = did_you_mean(name, known)
                raise DataError(
                    f"data.task_options.{name}: no such option of {self.name}.{hint} Known: {', '.join(known)}."
                )

    def _check_scorer(self) -> None:
        """Some scorers compare tuples with tuples: fed with JSON values they would call every right answer wrong."""
        dataset = self._dataset(0, 1)
        entry = dataset[0]
        if dataset.score_answer(entry["answer"], entry) != dataset.score_answer(entry["answer"], _json_values(entry)):
            raise DataError(f"data.task: {self.name} cannot be graded from stored entries. Choose another task.")


def _json_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry as it comes back from JSON: tuples become lists, keys become text, exotic objects their text."""
    return json.loads(json.dumps(entry, default=str))
