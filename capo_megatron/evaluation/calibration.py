"""How well a model's confidence tells its right answers from its wrong ones. Numpy only; one row per response.

`score` and `confidence` grow with the model's belief in an answer. For rankings use the mean log-prob per token (nats),
for ECE and Brier its exponential, which is 1/perplexity. `correct` is 0/1 or bool; where selected answers are rated it
may be a fraction (ties between answers). `question` is any id per row, rows of a question anywhere.

A NaN score means that the response has none: such rows are left out (they still count in `mean_at_k`). What is
undefined is NaN together with a RuntimeWarning, never 0. Errors: ShapeError for arrays that do not fit, ConfigError for
an option out of range.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capo_megatron.errors import ConfigError, ShapeError
from capo_megatron.evaluation.selection import (
    answer_mass,
    cluster_answers,
    expected_accuracy,
    rpc_keep,
    select_answer,
)

__all__ = [
    "AucMean",
    "PairedAuc",
    "answer_mass",
    "auc_by_question",
    "auc_mean",
    "aurc",
    "bootstrap_interval",
    "brier",
    "calibration_errors",
    "cluster_answers",
    "coverage_at_precision",
    "excess_aurc",
    "expected_accuracy",
    "mean_at_k",
    "paired_auc",
    "pass_at_k",
    "pooled_auc",
    "precision_at_coverage",
    "precision_coverage",
    "rpc_keep",
    "select_answer",
]

Floats = NDArray[np.float64]


class AucMean(NamedTuple):
    """AUC averaged over questions that have both right and wrong answers."""

    value: float  # NaN if there is no such question
    per_question: Floats  # [n_total], questions by first appearance; NaN where all right, all wrong, or without scores
    n_valid: int  # questions that entered the mean
    n_total: int


class PairedAuc(NamedTuple):
    """AUC-mean of two models on the same questions: those with right and wrong answers from both."""

    value_a: float
    value_b: float
    per_question_a: Floats  # [n_valid], the same questions in the same order as per_question_b
    per_question_b: Floats
    n_valid: int
    n_total: int  # questions that both models answered


# --- accuracy -----------------------------------------------------------------------------------------------------


def mean_at_k(correct: ArrayLike, question: ArrayLike) -> float:
    """Accuracy averaged over questions, each question weighing the same however many samples it has."""
    right = _real("correct", correct)
    index, count = _factorize(question, len(right))
    if count == 0:
        return _undefined("mean_at_k", "there are no responses")
    return float((np.bincount(index, right, count) / np.bincount(index, minlength=count)).mean())


def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | Floats:
    """Probability that k of a question's n samples, c of them right, contain a right one: 1 - C(n-c, k) / C(n, k).

    Scalars give a float; arrays (one entry per question, broadcast) give an array, whose mean is a benchmark's pass@k.
    Raises ConfigError unless 1 <= k <= n, ShapeError unless 0 <= c <= n.
    """
    samples, right, draws = np.broadcast_arrays(np.asarray(n), np.asarray(c), np.asarray(k))
    if np.any(draws < 1) or np.any(draws > samples):
        raise ConfigError(
            f"pass_at_k: k={draws} with n={samples} samples: undefined. Use 1 <= k <= n or draw more samples."
        )
    if np.any(right < 0) or np.any(right > samples):
        raise ShapeError(f"pass_at_k: c={right} right answers among n={samples}: must be between 0 and n.")
    missed = np.ones(samples.shape)
    for drawn in range(int(draws.max(initial=0))):
        wrong_left = np.maximum(samples - right - drawn, 0)
        missed *= np.where(drawn < draws, wrong_left / np.maximum(samples - drawn, 1), 1.0)
    return 1.0 - missed if missed.ndim else float(1.0 - missed)


# --- AUC ----------------------------------------------------------------------------------------------------------


def auc_by_question(score: ArrayLike, correct: ArrayLike, question: ArrayLike) -> Floats:
    """[questions, by first appearance] probability that a right answer scores above a wrong one, ties counting half.

        AUC_q = (1 / (n+ n-)) sum_{i right, j wrong} ([s_i > s_j] + [s_i = s_j] / 2)

    NaN for a question that lacks right or wrong answers with a score. From average ranks, in n log n.
    """
    value, right = _pair("score", score, correct)
    index, count = _factorize(question, len(value))
    scored = ~np.isnan(value)
    value, right, index = value[scored], right[scored] > 0.5, index[scored]
    order = np.lexsort((value, index))
    value, right, index = value[order], right[order], index[order]
    new_block = np.ones(len(value), dtype=bool)
    new_block[1:] = (index[1:] != index[:-1]) | (value[1:] != value[:-1])
    start = np.flatnonzero(new_block)
    size = np.diff(start, append=len(value))
    rank = np.repeat(start + (size + 1) / 2, size)  # average rank within all rows, from 1
    rows = np.bincount(index, minlength=count)
    rank -= (np.cumsum(rows) - rows)[index]
    n_right = np.bincount(index[right], minlength=count).astype(float)
    pairs = n_right * (rows - n_right)
    above = np.bincount(index[right], rank[right], count) - n_right * (n_right + 1) / 2
    return np.divide(above, pairs, out=np.full(count, np.nan), where=pairs > 0)


def auc_mean(score: ArrayLike, correct: ArrayLike, question: ArrayLike) -> AucMean:
    """AUC-mean, CAPO's calibration headline: `auc_by_question` averaged over the questions where it is defined.

    Questions that are all right or all wrong are skipped, so two models are judged on different questions: report
    `n_valid`, and compare by `paired_auc`. NaN and a warning if no question is valid.
    """
    each = auc_by_question(score, correct, question)
    valid = each[~np.isnan(each)]
    value = float(valid.mean()) if len(valid) else _undefined("auc_mean", "no question has right and wrong answers")
    return AucMean(value, each, len(valid), len(each))


def paired_auc(
    score_a: ArrayLike,
    correct_a: ArrayLike,
    question_a: ArrayLike,
    score_b: ArrayLike,
    correct_b: ArrayLike,
    question_b: ArrayLike,
) -> PairedAuc:
    """AUC-mean of models a and b on the questions where both have right and wrong answers. NaN if there are none."""
    auc_a, auc_b = auc_by_question(score_a, correct_a, question_a), auc_by_question(score_b, correct_b, question_b)
    _, at_a, at_b = np.intersect1d(_first_seen(question_a), _first_seen(question_b), return_indices=True)
    auc_a, auc_b = auc_a[at_a], auc_b[at_b]
    both = ~np.isnan(auc_a) & ~np.isnan(auc_b)
    auc_a, auc_b = auc_a[both], auc_b[both]
    if not both.any():
        nothing = _undefined("paired_auc", "no question has right and wrong answers from both models")
        return PairedAuc(nothing, nothing, auc_a, auc_b, 0, len(both))
    return PairedAuc(float(auc_a.mean()), float(auc_b.mean()), auc_a, auc_b, len(auc_a), len(both))


def pooled_auc(score: ArrayLike, correct: ArrayLike) -> float:
    """AUC over all responses together. Mixes a question's difficulty with confidence: not comparable to AUC-mean."""
    each = auc_by_question(score, correct, np.zeros(np.shape(score), dtype=int))
    if not len(each) or np.isnan(each[0]):
        return _undefined("pooled_auc", "the responses are not both right and wrong")
    return float(each[0])


def bootstrap_interval(
    per_question: ArrayLike, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """(low, high): percentile interval of the mean over questions, drawing questions with replacement.

    `per_question` [questions], NaN = undefined, left out. NaNs and a warning if nothing is left.
    """
    if not 0 < level < 1 or resamples < 1:
        raise ConfigError(
            f"bootstrap_interval: level={level}, resamples={resamples}: need 0 < level < 1 and 1 or more."
        )
    value = _real("per_question", per_question)
    value = value[~np.isnan(value)]
    if not len(value):
        nothing = _undefined("bootstrap_interval", "no question has a value")
        return nothing, nothing
    draw = np.random.default_rng(seed)
    means = [value[draw.integers(len(value), size=len(value))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# --- selective prediction -------------------------------------------------------------------------------------------


def precision_coverage(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """(threshold, coverage, precision) at each distinct confidence, coverage growing; the last point is (1, accuracy).

    At a threshold, the answers with at least that confidence are given: coverage is their share, precision their
    accuracy. Tied answers enter together. Rows: responses, or one selected answer per question.
    """
    value, right = _scored(confidence, correct)
    order = np.argsort(-value, kind="stable")
    value, hits = value[order], np.cumsum(right[order])
    last = np.flatnonzero(np.append(value[1:] != value[:-1], True)[: len(value)])
    return value[last], (last + 1) / max(len(value), 1), hits[last] / (last + 1)


def precision_at_coverage(confidence: ArrayLike, correct: ArrayLike, coverage: float) -> float:
    """Accuracy of the ceil(coverage * N) most confident answers; a tie block that is cut counts at its own accuracy."""
    if not 0 < coverage <= 1:
        raise ConfigError(f"precision_at_coverage: coverage={coverage}: must be above 0 and at most 1.")
    value, right = _scored(confidence, correct)
    if not len(value):
        return _undefined("precision_at_coverage", "no answer has a confidence")
    count = max(int(np.ceil(coverage * len(value) - 1e-9)), 1)  # 0.7 * 10 is a little above 7
    return float(_expected_hits(value, right)[count - 1] / count)


def coverage_at_precision(confidence: ArrayLike, correct: ArrayLike, precision: float) -> float:
    """The largest coverage of a threshold whose precision is at least this; 0 if no threshold reaches it."""
    if not 0 < precision <= 1:
        raise ConfigError(f"coverage_at_precision: precision={precision}: must be above 0 and at most 1.")
    _, coverage, reached = precision_coverage(confidence, correct)
    if not len(coverage):
        return _undefined("coverage_at_precision", "no answer has a confidence")
    return float(coverage[reached >= precision - 1e-12].max(initial=0.0))


def aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Area under the risk-coverage curve: the error rate among the k most confident answers, averaged over k = 1..N.

    Inside a tie block errors grow linearly, which is the expectation over all orders of the tied answers. The area
    under the precision-coverage curve is 1 - aurc. Depends on accuracy: see `excess_aurc`.
    """
    value, right = _scored(confidence, correct)
    if not len(value):
        return _undefined("aurc", "no answer has a confidence")
    given = np.arange(1, len(value) + 1)
    return float(np.mean((given - _expected_hits(value, right)) / given))


def excess_aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """E-AURC: `aurc` minus that of an oracle which is more confident in every right answer than in any wrong one."""
    value, right = _scored(confidence, correct)
    return aurc(value, right) - aurc(right, right) if len(value) else _undefined("excess_aurc", "no confidences")


def _expected_hits(value: Floats, right: Floats) -> Floats:
    """[N] expected right answers among the k = 1..N most confident, over random orders within ties."""
    order = np.argsort(-value, kind="stable")
    value, right = value[order], right[order]
    block = np.cumsum(np.append(False, value[1:] != value[:-1]))
    return np.cumsum((np.bincount(block, right) / np.bincount(block))[block])


# --- calibration of probabilities -------------------------------------------------------------------------------------


def calibration_errors(
    confidence: ArrayLike, correct: ArrayLike, bins: int = 20, weight: ArrayLike | None = None
) -> tuple[float, float, float]:
    """(ECE, PCE, MCE) over `bins` bins of equal width, (lo, hi], of which the first holds 0 as well.

        ECE = sum_b (n_b / N) |acc_b - conf_b|
        PCE = sum_b (n_b / N) max(conf_b - acc_b, 0)        the overconfident part
        MCE = max_b |acc_b - conf_b|

    `weight` [N]: how much a row counts (RPC's question-level ECE: 10 bins, confidence = vote share of the winning
    answer, 1/m for each of m tied winners). Raises ShapeError for a confidence outside [0, 1].
    """
    if bins < 1:
        raise ConfigError(f"calibration_errors: bins={bins}: must be 1 or more.")
    value, right, share = _probabilities(confidence, correct, weight)
    if not share.sum() > 0:
        nothing = _undefined("calibration_errors", "no answer has a confidence")
        return nothing, nothing, nothing
    # i / bins is the double nearest to the decimal edge, also for float32 confidences that were rounded to it.
    single = np.asarray(confidence).dtype == np.float32
    edges = (np.arange(bins + 1) / bins).astype(np.float32 if single else np.float64).astype(np.float64)
    index = np.maximum(np.searchsorted(edges, value, side="left") - 1, 0)
    mass = np.bincount(index, share, bins)
    filled = mass > 0
    gap = (np.bincount(index, share * value, bins) - np.bincount(index, share * right, bins))[filled]
    total = mass.sum()
    largest = np.abs(gap / mass[filled]).max()
    return float(np.abs(gap).sum() / total), float(np.maximum(gap, 0).sum() / total), float(largest)


def brier(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Mean squared difference of confidence and correctness. Raises ShapeError for a confidence outside [0, 1]."""
    value, right, _ = _probabilities(confidence, correct, None)
    return float(np.mean((value - right) ** 2)) if len(value) else _undefined("brier", "no answer has a confidence")


# --- checks ---------------------------------------------------------------------------------------------------------


def _undefined(name: str, reason: str) -> float:
    warnings.warn(f"{name}: undefined, {reason}; the result is NaN.", RuntimeWarning, stacklevel=3)
    return float("nan")


def _real(name: str, value: ArrayLike) -> Floats:
    try:
        array = np.asarray(value, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{name}: not an array of numbers: {error}.") from error
    if array.ndim != 1:
        raise ShapeError(f"{name}: shape {array.shape}, expected one value per row.")
    return array


def _pair(name: str, value: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    first, right = _real(name, value), _real("correct", correct)
    if len(first) != len(right):
        raise ShapeError(f"correct: {len(right)} rows, expected {len(first)} as in {name}.")
    if np.isnan(right).any():
        raise ShapeError(f"correct: NaN in row {int(np.isnan(right).argmax())}; every response needs a verdict.")
    return first, right


def _scored(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    value, right = _pair("confidence", confidence, correct)
    known = ~np.isnan(value)
    return value[known], right[known]


def _probabilities(
    confidence: ArrayLike, correct: ArrayLike, weight: ArrayLike | None
) -> tuple[Floats, Floats, Floats]:
    value, right = _pair("confidence", confidence, correct)
    share = np.ones(len(value)) if weight is None else _pair("weight", weight, correct)[0]
    outside = (value < 0) | (value > 1)
    if outside.any():
        row = int(outside.argmax())
        raise ShapeError(f"confidence: {value[row]} in row {row}, outside [0, 1]. Log-probs need exp() first.")
    known = ~np.isnan(value)
    return value[known], right[known], share[known]


def _factorize(question: ArrayLike, rows: int) -> tuple[NDArray[np.int64], int]:
    """Dense question numbers by first appearance, and how many there are."""
    ids = np.asarray(question)
    if ids.shape != (rows,):
        raise ShapeError(f"question: shape {ids.shape}, expected ({rows},), one id per row.")
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return place[inverse], len(first)


def _first_seen(question: ArrayLike) -> NDArray[np.generic]:
    """The distinct question ids by first appearance."""
    ids = np.asarray(question)
    return ids[np.sort(np.unique(ids, return_index=True)[1])]
