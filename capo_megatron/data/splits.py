"""What procedural tasks share: which question may be used for what, seeds, and the checking of task options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from capo_megatron.data.problems import did_you_mean, digest
from capo_megatron.data.tokenizer import encode
from capo_megatron.errors import DataError
from capo_megatron.types import Problem

_Options = TypeVar("_Options")

# Rejected questions in a row after which a split counts as used up.
_PATIENCE = 20_000


class Split(Enum):
    """What a question may be used for."""

    TRAIN = "train"
    VALIDATION = "validation"
    EVALUATION = "evaluation"


class Demonstration(NamedTuple):
    """A prompt and the response that a teacher gives to it, up to and including what ends it."""

    prompt: str
    response: str


class Draft(NamedTuple):
    """A generated question, before it is known whether its split wants it."""

    question: str  # decides the split
    prompt: str
    answer: str
    extra: Mapping[str, Any]


def split_of(question: str) -> Split:
    """The only split that may hold `question`: 6/8 train, 1/8 validation, 1/8 evaluation, by a hash of the text."""
    return {0: Split.VALIDATION, 1: Split.EVALUATION}.get(int(digest(question), 16) % 8, Split.TRAIN)


def split_seed(split: Split, seed: int) -> int:
    """The seed of a split's generator: the run's for training, one fixed seed each for validation and evaluation."""
    return int(digest("split", split.value, seed if split is Split.TRAIN else 0), 16) % 2**32


def collect(
    drafts: Iterator[Draft], split: Split, count: int, task: str, tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """The first `count` drafts that belong to `split` and whose prompts differ, as problems.

    Raises DataError if the drafts end, or repeat themselves, before there are so many.
    """
    chosen: dict[str, Draft] = {}
    rejected = 0
    while len(chosen) < count:
        draft = next(drafts, None)
        if draft is None or rejected > _PATIENCE:
            raise DataError(
                f"data.task={task}: only {len(chosen)} distinct {split.value} problems exist with these task_options, "
                f"and {count} are wanted. Ask for fewer, or widen the options."
            )
        if split_of(draft.question) is split and draft.prompt not in chosen:
            chosen[draft.prompt], rejected = draft, 0
        else:
            rejected += 1
    return _problems(list(chosen.values()), task, tokenizer)


def _problems(drafts: Sequence[Draft], task: str, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    ids = encode(tokenizer, [draft.prompt for draft in drafts])
    return [
        Problem(f"{task}/{digest(draft.prompt)}", draft.prompt, tuple(prompt_ids), draft.answer, task, draft.extra)
        for draft, prompt_ids in zip(drafts, ids, strict=True)
    ]


def read_options(task: str, kind: type[_Options], options: Mapping[str, Any]) -> _Options:
    """`kind(**options)`, with every unknown name and wrong type reported under its dotted path.

    An int passes for a float. `kind` raises ValueError from its own __post_init__ for values out of range.
    """
    known: dict[str, Callable[[Any], Any]] = {spec.name: type(spec.default) for spec in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise DataError(f"data.task_options.{name}: no such option of {task}.{hint} Known: {', '.join(known)}.")
        wanted = known[name]
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise DataError(f"data.task_options.{name}: got {value!r}, expected {wanted.__name__}.")
        values[name] = wanted(value)
    try:
        return kind(**values)
    except ValueError as error:
        raise DataError(f"data.task_options.{error}") from error
