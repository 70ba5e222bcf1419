"""The numbers behind the report's charts and tables, as JSON values (None where something is undefined)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capo_megatron.evaluation.calibration import (
    PairedAuc,
    bootstrap_interval,
    paired_auc,
    precision_coverage,
)
from capo_megatron.evaluation.gather import Run
from capo_megatron.evaluation.records import Columns, summarise
from capo_megatron.types import EvalRecord

Floats = NDArray[np.float64]

_RELIABILITY_BINS = 20  # those of `calibration.calibration_errors`
_HISTOGRAM_BINS = 40
_COVERAGE_POINTS = 200
_FEWEST = 50  # responses, and
_LEAST = 0.01  # share of them, below which the precision of the most confident ones is mere noise
_CURVE_POINTS = 400  # beyond which a curve becomes means with a band from smallest to largest

# What is drawn over steps: heading, metric -> label of its line
CURVES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Validation accuracy", "share", {"validation/accuracy": ""}),
    ("Validation AUC-mean", "over the mixed questions of each step", {"validation/auc_mean": ""}),
    ("Mixed validation questions", "with right and wrong answers", {"validation/auc_questions": ""}),
    ("Training accuracy", "of the sampled batch", {"reward/accuracy": ""}),
    ("Training AUC-mean", "of the sampled batch", {"calibration/auc_mean": ""}),
    ("Reward", "mean", {"reward/mean": ""}),
    (
        "Mean log-prob",
        "nats per token, of the batch",
        {"calibration/logprob_correct": "right", "calibration/logprob_wrong": "wrong"},
    ),
    ("Entropy", "nats per token", {"policy/entropy": ""}),
    ("Response length", "tokens", {"response/length": ""}),
    ("Truncated responses", "share", {"response/truncated": ""}),
    ("Groups without a gradient", "share", {"advantage/zero_groups": ""}),
    ("Loss", "", {"train/loss": ""}),
    ("Gradient norm", "", {"train/grad_norm": ""}),
    ("Learning rate", "", {"train/lr": ""}),
    ("Gap of engine and policy", "99th percentile of exp |gap|", {"engine/gap_p99": ""}),
)
MASK_CURVES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Tokens that the mask removes",
        "mean share of a response",
        {"mask/dropped_correct": "right", "mask/dropped_wrong": "wrong"},
    ),
    (
        "Perplexity under the reference, right answers",
        "quartiles over responses",
        {"reference/ppl_correct_q25": "25 %", "reference/ppl_correct_q50": "50 %", "reference/ppl_correct_q75": "75 %"},
    ),
    (
        "Perplexity under the reference, wrong answers",
        "quartiles over responses",
        {"reference/ppl_wrong_q25": "25 %", "reference/ppl_wrong_q50": "50 %", "reference/ppl_wrong_q75": "75 %"},
    ),
    ("Thresholds of the mask", "perplexity", {"mask/ref_high": "high", "mask/ref_low": "low"}),
)


@dataclass(frozen=True)
class Evaluation:
    """What one model, at one step, answered: without the texts."""

    label: str
    run: int  # index of its run
    step: int
    columns: Columns
    summary: Mapping[str, float]
    benchmarks: Mapping[str, Mapping[str, float]]  # the same numbers by benchmark, if there are several
    is_base: bool

    @staticmethod
    def of(label: str, run: int, is_base: bool, records: Sequence[EvalRecord]) -> Evaluation:
        """Raises DataError if a record occurs twice."""
        by_benchmark: dict[str, list[EvalRecord]] = {}
        for record in records:
            by_benchmark.setdefault(record.benchmark, []).append(record)
        each = {name: summarise(found) for name, found in by_benchmark.items()} if len(by_benchmark) > 1 else {}
        return Evaluation(label, run, records[0].step, Columns.of(records), summarise(records), each, is_base)

    @property
    def scored(self) -> tuple[Floats, NDArray[np.bool_]]:
        """(mean log-prob, correct) of the responses that have both."""
        known = np.isfinite(self.columns.score)
        return self.columns.score[known], self.columns.correct[known]


@dataclass(frozen=True)
class Change:
    """A mean over questions under two models, with a 95 % bootstrap interval of its difference."""

    before: float
    after: float
    low: float
    high: float
    questions: int

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def sign(self) -> int | None:
        """1 or -1 where the interval excludes 0, else 0; None if there is nothing to compare."""
        if not self.questions or math.isnan(self.difference):
            return None
        return int(self.low > 0) - int(self.high < 0)


def changes(before: Evaluation, after: Evaluation) -> tuple[Change, Change]:
    """(accuracy, paired AUC-mean) on the questions that both answered."""
    a, b = before.columns, after.columns
    names_a, names_b = np.unique(a.question), np.unique(b.question)  # as Columns orders its counts
    _, at_a, at_b = np.intersect1d(names_a, names_b, assume_unique=True, return_indices=True)
    accuracy = _change(
        a.right_by_question[at_a] / a.samples_by_question[at_a],
        b.right_by_question[at_b] / b.samples_by_question[at_b],
    )
    paired = on_common_ground(before, after)
    return accuracy, _change(paired.per_question_a, paired.per_question_b)


def on_common_ground(before: Evaluation, after: Evaluation) -> PairedAuc:
    """AUC-means on the questions that are mixed under both."""
    a, b = before.columns, after.columns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
        return paired_auc(a.score, a.correct, a.question, b.score, b.correct, b.question)


def _change(a: Floats, b: Floats) -> Change:
    if not len(a):
        return Change(math.nan, math.nan, math.nan, math.nan, 0)
    low, high = bootstrap_interval(b - a) if len(a) > 1 else (-math.inf, math.inf)
    return Change(float(a.mean()), float(b.mean()), low, high, len(a))


# --- charts of an evaluation ------------------------------------------------------------------------------------------


def reliability(found: Evaluation) -> list[list[float]]:
    """[mean confidence, accuracy, share of responses] of the bins of exp(mean log-prob) that hold any."""
    score, correct = found.scored
    confidence = np.exp(np.minimum(score, 0.0))
    edges = np.arange(_RELIABILITY_BINS + 1) / _RELIABILITY_BINS
    index = np.maximum(np.searchsorted(edges, confidence, side="left") - 1, 0)
    count = np.bincount(index, minlength=_RELIABILITY_BINS)
    full = count > 0
    mean = np.bincount(index, confidence, _RELIABILITY_BINS)[full] / count[full]
    accuracy = np.bincount(index, correct, _RELIABILITY_BINS)[full] / count[full]
    return [[_short(v) for v in row] for row in np.column_stack([mean, accuracy, count[full] / len(score)]).tolist()]


def histogram_edges(evaluations: Iterable[Evaluation]) -> Floats:
    """Edges of bins of the mean log-prob that suit all evaluations: the lowest half percent falls below the first.

    They are even on the scale of sqrt(-log-prob), since most responses are near 0.
    """
    scores = [found.scored[0] for found in evaluations]
    lows = [np.quantile(score, 0.005) for score in scores if len(score)]
    low = min(lows, default=-1.0)
    return -np.square(np.linspace(math.sqrt(max(-float(low), 1e-6)), 0.0, _HISTOGRAM_BINS + 1))


def histogram(found: Evaluation, edges: Floats) -> dict[str, Any]:
    """Shares of the right and of the wrong responses by bin; what lies outside counts in the outermost bins."""
    score, correct = found.scored
    inside = np.clip(score, edges[0], edges[-1])
    shares = {"right": inside[correct], "wrong": inside[~correct]}
    return {"edges": [_short(edge) for edge in edges.tolist()]} | {
        name: [_short(v) for v in (np.histogram(values, edges)[0] / max(len(values), 1)).tolist()]
        for name, values in shares.items()
    }


def coverage(found: Evaluation) -> dict[str, Any] | None:
    """Precision among the most confident responses over their share, where it is more than noise."""
    score, correct = found.scored
    _, share, precision = precision_coverage(score, correct)
    enough = share * len(score) >= min(max(_FEWEST, _LEAST * len(score)), len(score)) - 1e-6
    share, precision = share[enough], precision[enough]
    if not len(share):
        return None
    few = np.unique(np.searchsorted(share, np.linspace(share[0], 1, _COVERAGE_POINTS)).clip(max=len(share) - 1))
    return {"x": [_short(v) for v in share[few].tolist()], "y": [_short(v) for v in precision[few].tolist()]}


# --- charts of a run --------------------------------------------------------------------------------------------------


def curve(run: Run, metric: str) -> dict[str, Any] | None:
    """x, y and, where there is one, a band of one standard error (or from smallest to largest); None without values."""
    found = [(row["step"], row[metric], row.get(f"{metric}_se")) for row in run.rows if _is_number(row.get(metric))]
    if not found:
        return None
    x, y = np.array([row[0] for row in found], float), np.array([row[1] for row in found], float)
    if len(x) > _CURVE_POINTS:
        parts = np.array_split(np.arange(len(x)), _CURVE_POINTS)
        low, high = (np.array([bound(y[part]) for part in parts]) for bound in (np.min, np.max))
        return _line([x[part].mean() for part in parts], [y[part].mean() for part in parts]) | {
            "low": [_short(v) for v in low.tolist()],
            "high": [_short(v) for v in high.tolist()],
        }
    line = _line(x, y)
    if all(_is_number(row[2]) for row in found):
        half = np.array([row[2] for row in found], float)
        line |= {"low": [_short(v) for v in (y - half).tolist()], "high": [_short(v) for v in (y + half).tolist()]}
    return line


def trajectory(run: Run) -> dict[str, Any] | None:
    """Validation AUC-mean over validation accuracy, with the step of each point."""
    names = ("validation/accuracy", "validation/auc_mean")
    rows = [row for row in run.rows if all(_is_number(row.get(name)) for name in names)]
    if len(rows) < 2:
        return None
    x, y = ([row[name] for row in rows] for name in names)
    return _line(x, y) | {"step": [row["step"] for row in rows]}


def _line(x: Iterable[float], y: Iterable[float]) -> dict[str, Any]:
    return {"x": [_short(v) for v in x], "y": [_short(v) for v in y]}


def phase_seconds(run: Run) -> dict[str, float]:
    """Seconds of all steps by phase, the longest first, and what no phase accounts for as "other"."""
    total, whole = dict[str, float](), 0.0
    for row in run.rows:
        whole += row["seconds/step"] if _is_number(row.get("seconds/step")) else 0.0
        for name, value in row.items():
            phase = name.removeprefix("seconds/")
            if phase != name and phase in PHASES and _is_number(value):
                total[phase] = total.get(phase, 0.0) + value
    other = whole - sum(total.values())
    if whole and other > 0.005 * whole:
        total["other"] = other
    return dict(sorted(total.items(), key=lambda item: (item[0] == "other", -item[1])))


PHASES = ("rollout", "score", "train", "refit", "eval", "checkpoint")  # of a step, one after another


def throughput(run: Run) -> dict[str, float]:
    """Median tokens per second by phase."""
    values: dict[str, list[float]] = {}
    for row in run.rows:
        for name, value in row.items():
            phase = name.removeprefix("tokens_per_second/")
            if phase != name and _is_number(value):
                values.setdefault(phase, []).append(value)
    return {phase: float(np.median(found)) for phase, found in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
