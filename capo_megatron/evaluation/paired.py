"""Two models on the same questions, with p-values; and one model beside another that was stopped at its accuracy.

AUC-mean skips questions whose samples are all right or all wrong. Two models that differ in accuracy are thus judged on
different questions, and AUC-mean falls as accuracy rises even for a policy whose confidence is exactly calibrated.
What can be compared:

    paired AUC              on the questions that are mixed under both
    accuracy-matched AUC    with the step at which the other model first had that accuracy: stopped early
    fixed-sample AUC        on one set of responses, whose log-probs each model gave: the same questions, the same pairs
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation import calibration
from capo_megatron.evaluation.metrics import (
    Confidence,
    bootstrap_questions,
    sizes_and_right,
    values_per_question,
    votes_per_question,
)
from capo_megatron.evaluation.records import standard_error
from capo_megatron.evaluation.table import Table

Floats = NDArray[np.float64]

_FLIPS = 9_999  # random sign patterns of a permutation test
_MANY = 1_000  # questions from which on the normal limit of that test is as good


@dataclass(frozen=True)
class Difference:
    """One number of two models on common questions."""

    name: str
    questions: int  # where both have it
    first: float
    second: float
    low: float = math.nan  # 95 % bootstrap interval, over questions, of second - first
    high: float = math.nan
    p: float = math.nan  # two-sided: of a difference as large, were the models' values exchangeable in each question

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class Pairing:
    """What two models have in common, and how they differ there."""

    group: dict[str, str | int]
    first: str
    second: str
    questions: int  # that both answered
    mixed_first: int
    mixed_second: int
    mixed_both: int
    same_responses: bool  # the two rated the same responses: paired AUC is fixed-sample AUC
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Match:
    """A model at a step, and another at the first step that was evaluated at which it was at least as accurate."""

    group: dict[str, str | int]
    model: str
    step: int
    accuracy: float
    auc_mean: float
    other: str
    other_step: int | None  # None: it never was; all that follows is then NaN
    other_accuracy: float
    other_auc_mean: float
    paired: float  # paired AUC of model - other
    paired_se: float
    mixed_both: int


@dataclass
class _Entrant:
    """The rated records of one model at one step."""

    model: str
    step: int
    table: Table
    score: Floats  # [rows of table]

    @staticmethod
    def of(model: str, step: int, table: Table, confidence: Confidence) -> _Entrant:
        rated = table.graded
        return _Entrant(model, step, rated, confidence.of(rated))

    @cached_property
    def questions(self) -> list[tuple[int, int]]:
        """(benchmark, question) of each, ascending."""
        starts = self.table.starts
        return list(zip(self.table.benchmark[starts].tolist(), self.table.question[starts].tolist(), strict=True))

    @property
    def samples(self) -> int:
        return int(sizes_and_right(self.table)[0].min())

    @cached_property
    def accuracy(self) -> float:
        return float(self._values["accuracy"].mean())

    @cached_property
    def auc(self) -> Floats:
        """[questions] NaN where not mixed."""
        return self._values["auc_mean"]

    @property
    def auc_mean(self) -> float:
        return float(np.nanmean(self.auc)) if not np.isnan(self.auc).all() else math.nan

    @cached_property
    def _values(self) -> dict[str, Floats]:
        return values_per_question(self.table, self.score, 1)

    def on(self, questions: Sequence[tuple[int, int]]) -> _Entrant:
        """The same with these questions alone, in the table's order."""
        wanted = set(questions)
        keep = np.array([question in wanted for question in self.questions], dtype=bool)
        rows = np.repeat(keep, sizes_and_right(self.table)[0])
        return _Entrant(self.model, self.step, self.table.take(rows), self.score[rows])

    def values(self, samples: int) -> dict[str, Floats]:
        """Name -> [questions], comparable with those of another that has as many samples."""
        return values_per_question(self.table, self.score, samples) | votes_per_question(self.table, samples)


def pair(
    table: Table,
    by_benchmark: bool = True,
    base: str | None = None,
    confidence: Confidence | None = None,
    bootstrap: int = 0,
    fixed_sample: bool = False,
) -> list[Pairing]:
    """The base beside every other model and step, per benchmark or over all.

    `base`: "model" or "model@step"; the first that there is without. `fixed_sample`: raise DataError unless all rated
    the same responses. Raises ConfigError if there is no such base.
    """
    if base is None and _alone(table):
        return []
    pairings = []
    for group, entrants in _entrants(table, by_benchmark, confidence or Confidence()):
        first = _named(base, entrants) if base else next(iter(entrants))
        for name in (name for name in entrants if name != first):
            pairings.append(_pair(group, (first, entrants[first]), (name, entrants[name]), bootstrap, fixed_sample))
    return pairings


def match_accuracy(table: Table, by_benchmark: bool = True, confidence: Confidence | None = None) -> list[Match]:
    """Every step of every model beside the other models that were evaluated at several steps."""
    if _alone(table):
        return []
    matches = []
    for group, entrants in _entrants(table, by_benchmark, confidence or Confidence()):
        runs: dict[str, list[_Entrant]] = {}
        for entrant in entrants.values():
            runs.setdefault(entrant.model, []).append(entrant)
        for model, own in runs.items():
            for other, theirs in runs.items():
                if other != model and len(theirs) > 1:
                    matches += [_match(group, entrant, other, theirs) for entrant in own]
    return matches


def _alone(table: Table) -> bool:
    """True if all records are of one model at one step."""
    return all((column == column[0]).all() for column in (table.model, table.step))


def _entrants(
    table: Table, by_benchmark: bool, confidence: Confidence
) -> list[tuple[dict[str, str | int], dict[str, _Entrant]]]:
    found = []
    for group, part in table.split(["benchmark"] if by_benchmark else []):
        entrants = [
            _Entrant.of(str(key["model"]), int(key["step"]), rows, confidence)
            for key, rows in part.split(["model", "step"])
        ]
        models = [entrant.model for entrant in entrants]
        named = {
            entrant.model if models.count(entrant.model) == 1 else f"{entrant.model}@{entrant.step}": entrant
            for entrant in entrants
            if entrant.questions
        }
        if named:
            found.append((group, named))
    return found


def _named(base: str, entrants: dict[str, _Entrant]) -> str:
    for name, entrant in entrants.items():
        if base in (name, f"{entrant.model}@{entrant.step}"):
            return name
    raise ConfigError(f"base {base!r}: no such model. There are: {', '.join(entrants)}.")


# --- two models -----------------------------------------------------------------------------------------------------


def _pair(
    group: dict[str, str | int],
    first: tuple[str, _Entrant],
    second: tuple[str, _Entrant],
    bootstrap: int,
    fixed_sample: bool,
) -> Pairing:
    shared = sorted(set(first[1].questions) & set(second[1].questions))
    if not shared:
        raise DataError(f"{first[0]} and {second[0]}: no question in common. Evaluate both on the same benchmark.")
    a, b = first[1].on(shared), second[1].on(shared)
    same = _same_responses(a.table, b.table)
    if fixed_sample and not same:
        raise DataError(
            f"fixed-sample AUC: {first[0]} and {second[0]} did not rate the same responses. "
            "Rescore one set of responses with both models, see examples/metrics.md."
        )
    mixed_a, mixed_b = ~np.isnan(a.auc), ~np.isnan(b.auc)
    samples = min(a.samples, b.samples)
    of_a, of_b = a.values(samples), b.values(samples)
    differences = [_difference(name, of_a[name], of_b[name], bootstrap) for name in of_a if name in of_b]
    return Pairing(
        group,
        first[0],
        second[0],
        len(shared),
        int(mixed_a.sum()),
        int(mixed_b.sum()),
        int((mixed_a & mixed_b).sum()),
        same,
        (*differences, _pooled(a, b, bootstrap)),
    )


def _same_responses(a: Table, b: Table) -> bool:
    columns = ("question", "benchmark", "sample", "completion", "correct")
    return len(a) == len(b) and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


def _difference(name: str, first: Floats, second: Floats, bootstrap: int) -> Difference:
    both = ~(np.isnan(first) | np.isnan(second))
    first, second = first[both], second[both]
    if not len(first):
        return Difference(name, 0, math.nan, math.nan)
    gain = second - first
    interval = (math.nan, math.nan)
    if bootstrap and len(gain) > 1:
        interval = calibration.bootstrap_interval(gain, resamples=bootstrap)
    return Difference(name, len(gain), float(first.mean()), float(second.mean()), *interval, sign_flip_p(gain))


def _pooled(a: _Entrant, b: _Entrant, bootstrap: int) -> Difference:
    """Pooled AUC of both, over all responses to the common questions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
        values = [calibration.pooled_auc(entrant.score, entrant.table.correct) for entrant in (a, b)]
        interval = (math.nan, math.nan)
        if bootstrap and not np.isnan(values).any():
            interval = _pooled_interval(a, b, bootstrap)
    return Difference("auc_pooled", len(a.questions), values[0], values[1], *interval)


def _pooled_interval(a: _Entrant, b: _Entrant, bootstrap: int) -> tuple[float, float]:
    """Of the difference when questions are drawn again, the same for both: they stand side by side in each draw."""
    position = {question: index for index, question in enumerate(a.questions)}
    unit_a = np.repeat(np.arange(len(a.questions)), sizes_and_right(a.table)[0])
    unit_b = np.repeat([position[question] for question in b.questions], sizes_and_right(b.table)[0])
    order = np.argsort(np.concatenate([unit_a, unit_b]), kind="stable")
    unit = np.concatenate([unit_a, unit_b])[order]
    score = np.concatenate([a.score, b.score])[order]
    correct = np.concatenate([a.table.correct, b.table.correct])[order]
    second = order >= len(a.table)
    starts = np.flatnonzero(np.diff(unit, prepend=-1))

    def gain(rows: NDArray[np.int64]) -> dict[str, float]:
        aucs = [
            calibration.pooled_auc(score[part], correct[part]) for part in (rows[~second[rows]], rows[second[rows]])
        ]
        return {"gain": aucs[1] - aucs[0]}

    return bootstrap_questions(gain, starts, len(order), bootstrap, 0).get("gain", (math.nan, math.nan))


def sign_flip_p(gain: Floats, seed: int = 0) -> float:
    """Two-sided p-value of a mean that differs from 0, were the sign of every entry a fair coin's.

    Exact up to 13 entries, by random signs above, by their normal limit above 1,000. NaN without entries.
    """
    if not len(gain):
        return math.nan
    if not gain.any():
        return 1.0
    if len(gain) > _MANY:
        return math.erfc(abs(gain.sum()) / math.sqrt(2 * (gain**2).sum()))
    exact = 2 ** len(gain) <= _FLIPS
    if exact:
        flipped = np.arange(2 ** len(gain))[:, None] >> np.arange(len(gain)) & 1
    else:
        flipped = np.random.default_rng(seed).integers(2, size=(_FLIPS, len(gain)), dtype=np.int8)
    totals = gain.sum() - 2 * (flipped @ gain)
    as_large = int((np.abs(totals) >= abs(gain.sum()) * (1 - 1e-12)).sum())
    return as_large / len(totals) if exact else (as_large + 1) / (len(totals) + 1)


def _match(group: dict[str, str | int], entrant: _Entrant, other: str, theirs: list[_Entrant]) -> Match:
    reached = next((one for one in theirs if one.accuracy >= entrant.accuracy), None)
    own = (group, entrant.model, entrant.step, entrant.accuracy, entrant.auc_mean, other)
    if reached is None:
        return Match(*own, None, *(math.nan,) * 4, 0)
    shared = sorted(set(entrant.questions) & set(reached.questions))
    gain = entrant.on(shared).auc - reached.on(shared).auc
    mixed = int((~np.isnan(gain)).sum())
    paired = float(np.nanmean(gain)) if mixed else math.nan
    return Match(*own, reached.step, reached.accuracy, reached.auc_mean, paired, standard_error(gain), mixed)
