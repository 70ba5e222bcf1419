"""When to answer and when to abstain: a rule fitted on records for a wanted precision, kept as JSON.

A *threshold* rule answers where the confidence is at least a threshold, the lowest one at which the answers given had
the wanted precision. An *isotonic* rule maps confidence to the share of right answers, by a step function that never
falls, and answers where that share is at least the wanted precision. Then each answer is as reliable as wanted, not
their average alone, so fewer are given. Both hold for the models, benchmarks and confidences that they saw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation import calibration
from capo_megatron.evaluation.metrics import Confidence, bootstrap_questions
from capo_megatron.evaluation.table import Table
from capo_megatron.runlog import write_text

Floats = NDArray[np.float64]
Method = Literal["threshold", "isotonic"]

SCHEMA = 1
_RESAMPLES = 1000


@dataclass(frozen=True)
class Rule:
    """What answers, and where that was seen to hold."""

    method: Method
    confidence: str  # as `Confidence.parse` reads it
    wanted_precision: float
    threshold: float  # of the score, in nats or as stated; responses at or above it are answered
    knots: tuple[tuple[float, float], ...]  # isotonic: (score from which on, share of right answers); else empty
    precision: float  # of the answers given, on the records of the fit
    precision_low: float  # 95 % bootstrap interval over questions
    precision_high: float
    coverage: float  # share of responses that are answered
    responses: int
    questions: int
    lowest_score: float  # seen in the fit
    highest_score: float
    benchmarks: tuple[str, ...]
    models: tuple[str, ...]  # "model@step"
    schema: int = SCHEMA

    def answers(self, score: Floats) -> NDArray[np.bool_]:
        """[N] responses that are answered; without a score none is."""
        return score >= self.threshold

    def probability(self, score: Floats) -> Floats:
        """[N] share of right answers that an isotonic rule expects; NaN without a score."""
        starts, shares = np.array(self.knots).T
        found = shares[np.maximum(np.searchsorted(starts, score, side="right") - 1, 0)]
        return np.where(np.isnan(score), np.nan, found)


def fit(table: Table, precision: float, method: Method = "threshold", confidence: Confidence | None = None) -> Rule:
    """The rule that answers most, at this precision, on these records.

    Raises ConfigError for a precision outside (0, 1], DataError if no rule reaches it or no record has the confidence.
    """
    confidence = confidence or Confidence()
    if not 0 < precision <= 1:
        raise ConfigError(f"precision={precision}: must be above 0 and at most 1.")
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r}: unknown. Choose one of {', '.join(get_args(Method))}.")
    table = table.graded
    score = confidence.of(table)
    known = ~np.isnan(score)
    table, score = table.take(known), score[known]
    if not len(table):
        raise DataError(f"confidence {confidence}: no record holds what it needs. Choose another confidence.")
    knots = _isotonic(score, table.correct) if method == "isotonic" else ()
    threshold = _from_knots(knots, precision) if knots else _lowest_threshold(score, table.correct, precision)
    given = score >= threshold

    def reached(rows: NDArray[np.int64]) -> dict[str, float]:
        answered = rows[given[rows]]
        return {"precision": float(table.correct[answered].mean()) if len(answered) else math.nan}

    interval = bootstrap_questions(reached, table.starts, len(table), _RESAMPLES, 0)
    low, high = interval.get("precision", (math.nan, math.nan))
    return Rule(
        method,
        str(confidence),
        precision,
        threshold,
        knots,
        float(table.correct[given].mean()),
        low,
        high,
        float(given.mean()),
        len(table),
        len(table.starts),
        float(score.min()),
        float(score.max()),
        tuple(sorted({table.names["benchmark"][code] for code in np.unique(table.benchmark)})),
        tuple(sorted(_models(table))),
    )


def _models(table: Table) -> set[str]:
    starts = table.starts
    pairs = set(zip(table.model[starts].tolist(), table.step[starts].tolist(), strict=True))
    return {f"{table.names['model'][model]}@{step}" for model, step in pairs}


def _lowest_threshold(score: Floats, correct: NDArray[np.bool_], precision: float) -> float:
    thresholds, _, reached = calibration.precision_coverage(score, correct)
    enough = np.flatnonzero(reached >= precision - 1e-12)
    if not len(enough):
        raise _unreachable(precision, reached.max())
    return float(thresholds[enough[-1]])


def _isotonic(score: Floats, correct: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    from scipy.optimize import isotonic_regression

    values, index = np.unique(score, return_inverse=True)
    rows = np.bincount(index)
    shares = isotonic_regression(np.bincount(index, correct) / rows, weights=rows).x
    first = np.flatnonzero(np.append(True, np.diff(shares) > 1e-12))
    return tuple(zip(values[first].tolist(), shares[first].tolist(), strict=True))


def _from_knots(knots: Sequence[tuple[float, float]], precision: float) -> float:
    threshold = next((start for start, share in knots if share >= precision - 1e-12), None)
    if threshold is None:
        raise _unreachable(precision, knots[-1][1])
    return threshold


def _unreachable(precision: float, best: float) -> DataError:
    return DataError(f"precision {precision:g} is never reached on these records, {best:.3f} at most. Ask for less.")


# --- files ----------------------------------------------------------------------------------------------------------


def write_rule(path: Path, rule: Rule) -> None:
    """Raises CapoError if it cannot be written."""
    write_text(path, json.dumps(asdict(rule), indent=2) + "\n")


def read_rule(path: Path) -> Rule:
    """Raises DataError if the file holds no rule."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). Write one by capo-megatron calibrate.") from error
    try:
        if found["schema"] != SCHEMA:
            raise DataError(f"{path}: schema {found['schema']!r}, expected {SCHEMA}. Fit it again.")
        knots = tuple((float(start), float(share)) for start, share in found["knots"])
        lists = {name: tuple(found[name]) for name in ("benchmarks", "models")}
        rule = Rule(**(found | lists | {"knots": knots, "threshold": float(found["threshold"])}))
        Confidence.parse(rule.confidence)
        numbers = [rule.threshold, rule.lowest_score, rule.highest_score, *(value for knot in knots for value in knot)]
        if any(not isinstance(value, (int, float)) or math.isnan(value) for value in numbers):
            raise ValueError("a threshold, score or knot is no number")
        if [start for start, _ in knots] != sorted(start for start, _ in knots):
            raise ValueError("its knots are out of order")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"{path}: not a rule of capo-megatron calibrate ({error}). Fit it again.") from error
    return rule


# --- use ------------------------------------------------------------------------------------------------------------


def apply(rule: Rule, table: Table) -> dict[str, float]:
    """What the rule does on these records: coverage, precision, and whether they are like those of its fit.

    answered, answered_precision     share of responses, accuracy among them
    out_of_range                     share of scores below or above all that the fit saw
    unseen                           1.0 if a model, step or benchmark was not in the fit, else 0.0
    mapped_ece, mapped_brier         isotonic: of the expected share of right answers
    """
    table = table.graded
    score = Confidence.parse(rule.confidence).of(table)
    known, given = ~np.isnan(score), rule.answers(score)
    outside = (score < rule.lowest_score) | (score > rule.highest_score)
    benchmarks = {table.names["benchmark"][code] for code in np.unique(table.benchmark)}
    unseen = not (benchmarks <= set(rule.benchmarks) and _models(table) <= set(rule.models))
    values = {
        "answered": float(given.mean()) if len(table) else math.nan,
        "answered_precision": float(table.correct[given].mean()) if given.any() else math.nan,
        "out_of_range": float(outside[known].mean()) if known.any() else math.nan,
        "unseen": float(unseen),
    }
    if rule.knots and known.any():
        mapped = rule.probability(score)
        values["mapped_ece"] = calibration.calibration_errors(mapped, table.correct)[0]
        values["mapped_brier"] = calibration.brier(mapped, table.correct)
    return values
