"""Every number of an evaluation from its records alone, per benchmark, step and model.

    accuracy, accuracy_se               mean@k: over questions; standard error over questions
    pass_at_k                           share of questions solved in k tries, k = samples of the question with fewest
    auc_mean, auc_mean_se               AUC of the confidence within questions that have right and wrong answers
    auc_questions, questions            how many have, of how many
    auc_pooled                          the same over all responses together
    ece, pce, mce, brier                of the confidence as a probability
    aurc, e_aurc                        of all responses, most confident first
    precision@C, coverage@P             of the C most confident; share that can be answered with precision P
    sc, ppl, pc, rpc                    accuracy of one answer selected among k, see `selection`
    sc/..., pc/...                      ece, brier, aurc, ... of selected answers, with their vote's share as confidence
    responses, samples, samples_most    how many, and per question at least and at most
    scored, unparseable, timeout, truncated, tokens, logprob_mean, logprob_correct, logprob_wrong

Unparseable responses (the reference answer cannot be read) are left out, but for their own share; a timeout is wrong
and has no confidence. What is undefined is NaN.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation import calibration
from capo_megatron.evaluation.records import standard_error
from capo_megatron.evaluation.table import Table
from capo_megatron.evaluation.votes import METHODS, Votes, vote
from capo_megatron.types import Verdict

Floats = NDArray[np.float64]

GROUPS = ("benchmark", "step", "model")
COVERAGES = (0.1, 0.25, 0.5, 0.75, 0.9)
PRECISIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
CURVE_POINTS = 200  # that are kept of a precision-coverage curve
_SELECTED = ("sc", "pc")  # methods whose share of the vote is a confidence


@dataclass(frozen=True)
class Confidence:
    """What a response's confidence is read from."""

    kind: str = "perplexity"
    count: int | None = None  # of the lowest log-probs

    @staticmethod
    def parse(text: str) -> Confidence:
        """`perplexity` (mean log-prob), `sum` (of log-probs), `lowest-K` (mean of the K lowest), or `stated`."""
        lowest = re.fullmatch(r"lowest-([1-9][0-9]{0,5})", text)
        if lowest:
            return Confidence("lowest", int(lowest[1]))
        if text not in ("perplexity", "sum", "stated"):
            raise ConfigError(f"confidence {text!r}: unknown. Choose perplexity, sum, lowest-8 or stated.")
        return Confidence(text)

    def __str__(self) -> str:
        return self.kind if self.count is None else f"{self.kind}-{self.count}"

    def of(self, table: Table) -> Floats:
        """[N] score that ranks responses; NaN where there is none, or no verdict to hold it against."""
        scores = {"perplexity": mean_logprob, "sum": _sum, "lowest": _lowest, "stated": lambda table: table.stated}
        return np.where(table.has(Verdict.TIMEOUT), np.nan, scores[self.kind](table))

    def probability(self, score: Floats) -> Floats:
        """[N] the score as a probability."""
        return score if self.kind == "stated" else np.exp(np.minimum(score, 0.0))  # rounding may lift it above 0


def mean_logprob(table: Table) -> Floats:
    """[N] nats per token; NaN for empty responses."""
    tokens = table.tokens
    return np.divide(table.logprob_sum, tokens, out=np.full(len(table), np.nan), where=tokens > 0)


def _sum(table: Table) -> Floats:
    return np.where(table.tokens > 0, table.logprob_sum, np.nan)


def _lowest(table: Table) -> Floats:
    return np.where(table.tokens > 0, table.lowest, np.nan)


@dataclass(frozen=True)
class Measured:
    """What was found for one group of records."""

    group: dict[str, str | int]
    values: dict[str, float]
    by_samples: dict[str, list[float]]  # pass, sc, ppl, pc, rpc at N = 1..k
    curves: dict[str, list[tuple[float, float, float]]]  # responses, sc, pc -> (threshold, coverage, precision)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)


def measure(
    table: Table,
    by: Sequence[str] = GROUPS,
    confidence: Confidence | None = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> list[Measured]:
    """All numbers of every group. `bootstrap`: resamples of questions for 95 % intervals, 0 for none.

    Raises ConfigError for a column in `by` that is not one of GROUPS, DataError if no record has the confidence that
    was asked for, unless it is the perplexity: then what needs it is NaN.
    """
    confidence = confidence or Confidence()
    unknown = [name for name in by if name not in GROUPS]
    if unknown or len(set(by)) < len(by):
        raise ConfigError(f"group by {', '.join(by)}: choose among {', '.join(GROUPS)}, each at most once.")
    if confidence.kind != "perplexity" and np.isnan(confidence.of(table)).all():
        raise DataError(f"confidence {confidence}: no record holds what it needs. Choose another confidence.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
        return [_measure(group, part, confidence, bootstrap, seed) for group, part in table.split(by)]


def _measure(group: dict[str, str | int], table: Table, confidence: Confidence, bootstrap: int, seed: int) -> Measured:
    rated = table.graded
    if not len(rated):
        return Measured(group, _shares(table) | {"questions": 0.0}, {}, {})
    starts = rated.starts
    sizes, right = sizes_and_right(rated)
    samples = int(sizes.min())
    score, logprob = confidence.of(rated), _logprob(rated)
    votes = vote(rated, logprob, samples, seed)
    per_question = values_per_question(rated, score, samples) | _selected(rated, votes, logprob)
    values, pooled_curve = _pooled(score, confidence.probability(score), rated.correct)
    curves = {"responses": pooled_curve}
    for method in _SELECTED:
        share, hits = votes.share[method], np.where(np.isnan(votes.share[method]), np.nan, votes.right[method][:, -1])
        if method in per_question and not np.isnan(share).all():
            hits = np.nan_to_num(hits)
            found, curves[method] = _pooled(share, share, hits)
            values |= {f"{method}/{name}": value for name, value in found.items() if name != "auc_pooled"}
    values = {
        "questions": float(len(starts)),
        "samples": float(samples),
        "samples_most": float(sizes.max()),
        **_shares(table),
        **{name: _mean(each) for name, each in per_question.items()},
        "accuracy_se": standard_error(per_question["accuracy"]),
        "auc_mean_se": standard_error(per_question["auc_mean"]),
        "auc_questions": float((~np.isnan(per_question["auc_mean"])).sum()),
        "rpc_questions": float((~np.isnan(votes.right["rpc"][:, 0])).sum()),
        **values,
        "scored": float(np.mean(~np.isnan(score))),
        "logprob_mean": _mean(logprob),
        "logprob_correct": _mean(logprob[rated.correct]),
        "logprob_wrong": _mean(logprob[~rated.correct]),
    }
    by_samples = {"pass": [_pass(sizes, right, k) for k in range(1, samples + 1)]}
    by_samples |= {
        method: [_mean(column) for column in votes.right[method].T] for method in METHODS if method in per_question
    }
    intervals = _intervals(rated, per_question, score, confidence, bootstrap, seed) if bootstrap else {}
    return Measured(group, values, by_samples, curves, intervals)


def sizes_and_right(table: Table) -> tuple[NDArray[np.int64], Floats]:
    """([Q] samples, [Q] right ones among them) of every question."""
    starts = table.starts
    return np.diff(starts, append=len(table)), np.add.reduceat(table.correct.astype(float), starts)


def values_per_question(table: Table, score: Floats, samples: int) -> dict[str, Floats]:
    """Name -> [Q], whose means are accuracy, pass@k for k = `samples`, and AUC-mean."""
    sizes, right = sizes_and_right(table)
    return {
        "accuracy": right / sizes,
        "pass_at_k": np.asarray(calibration.pass_at_k(sizes, right, samples)),
        "auc_mean": calibration.auc_by_question(score, table.correct, table.unit),
    }


def votes_per_question(table: Table, samples: int, seed: int = 0) -> dict[str, Floats]:
    """Method -> [Q] accuracy of the answer that it selects among `samples`. Only what the records allow."""
    logprob = _logprob(table)
    return _selected(table, vote(table, logprob, samples, seed, curve=False), logprob)


def _logprob(table: Table) -> Floats:
    return np.where(table.has(Verdict.TIMEOUT), np.nan, mean_logprob(table))


def _shares(table: Table) -> dict[str, float]:
    """What is counted over all responses, the unparseable ones too."""
    unknown = (table.tokens == 0).all()  # in foreign records
    return {
        "responses": float(len(table)),
        "unparseable": float(table.has(Verdict.UNPARSEABLE).mean()),
        "timeout": float(table.has(Verdict.TIMEOUT).mean()),
        "truncated": math.nan if unknown else float(table.truncated.mean()),
        "tokens": math.nan if unknown else float(table.tokens.mean()),
    }


def _pass(samples: NDArray, right: Floats, k: int) -> float:
    return float(np.mean(calibration.pass_at_k(samples, right, k)))


def _selected(table: Table, votes: Votes, logprob: Floats) -> dict[str, Floats]:
    """Method -> [Q] accuracy of the answer that it selects. Only what the records allow."""
    if not (table.answer != 0).any():  # nobody extracted answers: there is nothing to vote on
        return {}
    methods = METHODS if not np.isnan(logprob).all() else ("sc",)
    return {method: votes.right[method][:, -1] for method in methods}


def _pooled(score: Floats, probability: Floats, correct: NDArray) -> tuple[dict[str, float], list]:
    """(numbers of rated answers all together, precision-coverage curve); correct may be a fraction."""
    order = np.argsort(-score, kind="stable")[: int((~np.isnan(score)).sum())]  # NaN comes last; sorted once, for all
    score, probability, right = score[order], probability[order], np.asarray(correct, dtype=np.float64)[order]
    ece, pce, mce = calibration.calibration_errors(probability, right)
    values = {
        "auc_pooled": calibration.pooled_auc(score, right),
        "ece": ece,
        "pce": pce,
        "mce": mce,
        "brier": calibration.brier(probability, right),
        "aurc": calibration.aurc(score, right),
        "e_aurc": calibration.excess_aurc(score, right),
    }
    values |= {f"precision@{share:g}": calibration.precision_at_coverage(score, right, share) for share in COVERAGES}
    values |= {f"coverage@{goal:g}": calibration.coverage_at_precision(score, right, goal) for goal in PRECISIONS}
    curve = np.stack(calibration.precision_coverage(score, right), axis=1)
    kept = np.unique(np.linspace(0, len(curve) - 1, min(CURVE_POINTS, len(curve))).astype(int))
    return values, [tuple(point) for point in curve[kept].tolist()]


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


# --- intervals ------------------------------------------------------------------------------------------------------


def _intervals(
    table: Table, per_question: dict[str, Floats], score: Floats, confidence: Confidence, resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Name -> 95 % percentile interval over resampled questions, of all that depends on the draw of questions."""
    intervals = {
        name: calibration.bootstrap_interval(each, resamples=resamples, seed=seed)
        for name, each in per_question.items()
        if not np.isnan(each).all()
    }
    if np.isnan(score).all():
        return intervals
    correct, probability = table.correct, confidence.probability(score)

    def pooled(rows: NDArray[np.int64]) -> dict[str, float]:
        return _pooled(score[rows], probability[rows], correct[rows])[0]

    return intervals | bootstrap_questions(pooled, table.starts, len(correct), resamples, seed)


def bootstrap_questions(
    numbers: Callable[[NDArray[np.int64]], dict[str, float]],
    starts: NDArray[np.int64],
    rows: int,
    resamples: int,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Name -> 95 % percentile interval of what `numbers` makes of the rows of resampled questions."""
    draw, sizes = np.random.default_rng(seed), np.diff(starts, append=rows)
    found: dict[str, list[float]] = {}
    for _ in range(resamples):
        chosen = draw.integers(len(starts), size=len(starts))
        lengths = sizes[chosen]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        for name, value in numbers(np.repeat(starts[chosen], lengths) + within).items():
            found.setdefault(name, []).append(value)
    return {
        name: tuple(np.nanquantile(values, [0.025, 0.975]).tolist())
        for name, values in found.items()
        if not np.isnan(values).all()
    }
