"""Models side by side, on the same questions, with the numbers that keep a comparison of AUC-means honest.

AUC-mean skips questions whose samples are all right or all wrong, so a model that no longer makes its easy mistakes is
judged on the hard questions that are left. Beside it therefore always stand the number of mixed questions, the AUC-mean
of two models on the questions that are mixed under both ("paired"), and the AUC over all responses pooled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from capo_megatron.errors import DataError
from capo_megatron.evaluation.calibration import bootstrap_interval, paired_auc
from capo_megatron.evaluation.records import Columns, summarise
from capo_megatron.types import EvalRecord


@dataclass(frozen=True)
class Pair:
    """AUC-mean of two models on the questions that are mixed under both."""

    first: str
    second: str
    questions: int
    auc_first: float
    auc_second: float
    low: float  # 95 % bootstrap interval, over questions, of second - first
    high: float

    @property
    def difference(self) -> float:
        return self.auc_second - self.auc_first


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; `str` of it is two Markdown tables."""

    models: Mapping[str, Mapping[str, float]]  # name -> `records.summarise`, the base first
    pairs: tuple[Pair, ...]

    def __str__(self) -> str:
        base = next(iter(self.models))
        samples = {int(found["samples"]) for found in self.models.values()}
        n = str(samples.pop()) if len(samples) == 1 else "n"
        header = [
            "model",
            f"mean@{n}",
            f"pass@{n}",
            "AUC-mean",
            "mixed",
            f"paired AUC vs {base}",
            "pooled AUC",
            "log-prob",
        ]
        rows = [_row(name, found, self._pair(base, name)) for name, found in self.models.items()]
        legend = (
            "mean@n: accuracy. AUC-mean: over the mixed questions, those with right and wrong answers. paired AUC: on\n"
            f"questions mixed under both, {base} -> model (how many). log-prob: mean over responses, nats per token.\n"
            "±: standard error over questions."
        )
        pair_header = ["paired AUC-mean", "questions", "AUC of both", "difference (95 % bootstrap interval)"]
        pairs = markdown(pair_header, [_pair_row(pair) for pair in self.pairs])
        return f"{markdown(header, rows)}\n\n{legend}\n\n{pairs}"

    def _pair(self, first: str, second: str) -> Pair | None:
        return next((pair for pair in self.pairs if (pair.first, pair.second) == (first, second)), None)


def compare(
    base: Sequence[EvalRecord], others: Mapping[str, Sequence[EvalRecord]], base_name: str = "base"
) -> Comparison:
    """Accuracy and calibration of each model beside the base's, and AUC-mean of every two on common ground.

    Raises DataError if a model has no records, or two models answered different questions.
    """
    models = {base_name: base, **others}
    columns = {name: Columns.of(records) for name, records in models.items()}
    for first, second in combinations(columns, 2):
        _same_questions(first, models[first], second, models[second])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
        pairs = tuple(_compare(a, columns[a], b, columns[b]) for a, b in combinations(columns, 2))
    return Comparison({name: summarise(records) for name, records in models.items()}, pairs)


def _same_questions(first: str, a: Sequence[EvalRecord], second: str, b: Sequence[EvalRecord]) -> None:
    of_a, of_b = ({(record.benchmark, record.question) for record in records} for records in (a, b))
    if of_a != of_b:
        raise DataError(
            f"compare: {first} answered {len(of_a)} questions, {second} {len(of_b)}, and {len(of_a ^ of_b)} questions "
            "were answered by only one of the two. Evaluate both on the same questions."
        )


def _compare(first: str, a: Columns, second: str, b: Columns) -> Pair:
    found = paired_auc(a.score, a.correct, a.question, b.score, b.correct, b.question)
    gain = np.asarray(found.per_question_b) - np.asarray(found.per_question_a)
    low, high = bootstrap_interval(gain) if len(gain) > 1 else (math.nan, math.nan)
    return Pair(first, second, found.n_valid, found.value_a, found.value_b, low, high)


# --- tables -----------------------------------------------------------------------------------------------------------


def _row(name: str, found: Mapping[str, float], pair: Pair | None) -> list[str]:
    paired = "" if pair is None else f"{_number(pair.auc_first)} -> {_number(pair.auc_second)} ({pair.questions})"
    return [
        name,
        f"{_number(found['accuracy'])} ± {_number(found['accuracy_se'])}",
        _number(found["pass_at_n"]),
        f"{_number(found['auc_mean'])} ± {_number(found['auc_mean_se'])}",
        f"{found['auc_questions']:.0f} of {found['questions']:.0f}",
        paired,
        _number(found["auc_pooled"]),
        _number(found["logprob_mean"]),
    ]


def _pair_row(pair: Pair) -> list[str]:
    interval = f"({_number(pair.low, '+')} to {_number(pair.high, '+')})"
    both = f"{_number(pair.auc_first)} -> {_number(pair.auc_second)}"
    return [f"{pair.first} -> {pair.second}", str(pair.questions), both, f"{_number(pair.difference, '+')} {interval}"]


def _number(value: float, sign: str = "") -> str:
    return "undefined" if math.isnan(value) else f"{value:{sign}.3f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up, the first to the left and the others to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
