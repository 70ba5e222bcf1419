"""Laws that the evaluation metrics obey for any records."""

from __future__ import annotations

import math
import warnings
from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capo_megatron.evaluation.calibration import (
    answer_mass,
    auc_by_question,
    auc_mean,
    aurc,
    brier,
    calibration_errors,
    coverage_at_precision,
    excess_aurc,
    mean_at_k,
    pass_at_k,
    pooled_auc,
    precision_at_coverage,
    precision_coverage,
    rpc_keep,
    select_answer,
)

many = settings(max_examples=200, deadline=None)

record = st.tuples(st.integers(-12, 0), st.booleans(), st.sampled_from(["a", "b", "c"]))
records = st.lists(record, min_size=1, max_size=30).map(
    lambda rows: [np.array(column) for column in zip(*rows, strict=True)]
)
sampled = st.lists(st.tuples(st.sampled_from([None, "1", "2", "3"]), st.integers(1, 40)), min_size=1, max_size=20)


def pair_formula(score: np.ndarray, correct: np.ndarray) -> float:
    right, wrong = score[correct], score[~correct]
    if not len(right) or not len(wrong):
        return math.nan
    gap = right[:, None] - wrong[None, :]
    return float(np.mean((gap > 0) + 0.5 * (gap == 0)))


@many
@given(records)
def test_auc_from_ranks_equals_the_pair_formula(columns) -> None:
    score, correct, question = columns
    got = dict(zip(dict.fromkeys(question.tolist()), auc_by_question(score, correct, question), strict=True))
    for one, value in got.items():
        own = question == one
        assert value == pytest.approx(pair_formula(score[own], correct[own]), nan_ok=True)


@many
@given(records, st.randoms(use_true_random=False))
def test_auc_sees_only_the_order_of_scores_and_flips_with_their_sign(columns, random) -> None:
    score, correct, question = columns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for got, same, flipped in (
            (
                auc_mean(score, correct, question).value,
                auc_mean(np.exp(score / 7) ** 3, correct, question).value,
                auc_mean(-score, correct, question).value,
            ),
            (pooled_auc(score, correct), pooled_auc(score**3 + 2 * score, correct), pooled_auc(-score, correct)),
        ):
            assert same == pytest.approx(got, nan_ok=True)
            assert got + flipped == pytest.approx(1.0) or (math.isnan(got) and math.isnan(flipped))
        order = random.sample(range(len(score)), len(score))
        moved = auc_mean(score[order], correct[order], question[order])
        whole = auc_mean(score, correct, question)
        assert moved.value == pytest.approx(whole.value, nan_ok=True)
        assert (moved.n_valid, moved.n_total) == (whole.n_valid, whole.n_total)


@many
@given(st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_its_binomials_and_pass_at_1_the_mean(counts) -> None:
    n, c, k = counts
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))
    assert pass_at_k(n, c, 1) == pytest.approx(mean_at_k(np.arange(n) < c, np.zeros(n, dtype=int)))
    if k > 1:
        assert pass_at_k(n, c, k) >= pass_at_k(n, c, k - 1) - 1e-12


@many
@given(records)
def test_precision_at_full_coverage_is_the_accuracy_and_aurc_lies_between_oracle_and_its_reverse(columns) -> None:
    score, correct, _ = columns
    threshold, coverage, precision = precision_coverage(score, correct)
    assert (np.diff(threshold) < 0).all() and (np.diff(coverage) > 0).all()
    assert coverage[-1] == 1.0 and precision[-1] == pytest.approx(correct.mean())
    assert precision_at_coverage(score, correct, 1.0) == pytest.approx(correct.mean())
    for share, value in zip(coverage, precision, strict=True):
        assert precision_at_coverage(score, correct, share) == pytest.approx(value)
    assert excess_aurc(score, correct) >= -1e-12
    assert aurc(score, correct) <= aurc(~correct, correct) + 1e-12
    assert aurc(np.zeros(len(score)), correct) == pytest.approx(1 - correct.mean())


@many
@given(records, st.integers(1, 20))
def test_calibration_errors_are_consistent(columns, bins) -> None:
    score, correct, _ = columns
    confidence = np.exp(score / 4)
    ece, pce, mce = calibration_errors(confidence, correct, bins)
    assert 0 <= pce <= ece + 1e-12 and ece <= mce + 1e-12 and mce <= 1
    assert calibration_errors(correct, correct, bins) == (0.0, 0.0, 0.0)
    assert calibration_errors(confidence, correct, 1)[0] == pytest.approx(abs(confidence.mean() - correct.mean()))
    assert brier(confidence, correct) >= (confidence.mean() - correct.mean()) ** 2 - 1e-12  # Jensen


@many
@given(sampled)
def test_pc_with_equal_log_probs_and_no_duplicates_selects_as_sc(rows) -> None:
    answer = [item for item, _ in rows]
    columns = (answer, [-0.37] * len(rows), list(range(len(rows))))
    assert select_answer(*columns, method="pc") == select_answer(*columns, method="sc")


@many
@given(sampled)
def test_rpc_prunes_only_below_the_mean_and_equals_pc_when_it_prunes_nothing(rows) -> None:
    answer, twentieths = zip(*rows, strict=True)
    columns = (list(answer), [-value / 20 for value in twentieths], list(range(len(rows))))
    prob = np.exp(np.array(columns[1]))
    keep = rpc_keep(prob)
    assert keep[prob >= prob.mean()].all()
    pc, rpc = answer_mass(*columns, method="pc"), answer_mass(*columns, method="rpc")
    assert all(rpc[item] <= pc[item] for item in pc)
    if keep.all():
        assert rpc == pc


@many
@given(sampled, st.randoms(use_true_random=False))
def test_selection_ignores_order_and_repeated_completions(rows, random) -> None:
    answer, twentieths = map(list, zip(*rows, strict=True))
    logprob = [-value / 20 for value in twentieths]
    names = list(range(len(rows)))
    assume(any(item is not None for item in answer))
    order = random.sample(names, len(names))
    for method in ("sc", "ppl", "pc"):
        winners = select_answer(answer, logprob, names, method)
        moved = select_answer([answer[i] for i in order], [logprob[i] for i in order], order, method)
        assert set(moved) == set(winners)
    again = select_answer(answer + answer[:1], logprob + logprob[:1], names + names[:1], "pc")
    assert again == select_answer(answer, logprob, names, "pc")


@many
@given(records)
def test_pooled_auc_and_brier_are_what_they_are_defined_as(columns) -> None:
    score, correct, _ = columns
    confidence = np.exp(score / 4)
    assert pooled_auc(score, correct) == pytest.approx(pair_formula(score, correct), nan_ok=True)
    assert brier(confidence, correct) == pytest.approx(np.mean((confidence - correct) ** 2))


@many
@given(records)
def test_auc_and_brier_are_scikit_learns(columns) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="python -m pip install scikit-learn")
    score, correct, _ = columns
    confidence = np.exp(score / 4)
    assert brier(confidence, correct) == pytest.approx(
        metrics.brier_score_loss(correct, confidence, labels=[False, True])
    )
    assume(0 < correct.sum() < len(correct))
    assert pooled_auc(score, correct) == pytest.approx(metrics.roc_auc_score(correct, score))


@many
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_aurc_is_the_mean_over_all_orders_of_the_tied(rows) -> None:
    score, correct = (np.array(column) for column in zip(*rows, strict=True))
    areas = []
    for order in permutations(range(len(rows))):
        ranked = list(order)
        if (np.diff(score[ranked]) <= 0).all():
            areas.append(np.mean(1 - np.cumsum(correct[ranked]) / np.arange(1, len(rows) + 1)))
    assert aurc(score, correct) == pytest.approx(np.mean(areas))


@many
@given(records, st.floats(0.01, 1.0))
def test_coverage_at_a_precision_is_the_largest_that_has_it(columns, precision) -> None:
    score, correct, _ = columns
    shares = [(score >= edge).mean() for edge in score if correct[score >= edge].mean() >= precision - 1e-12]
    assert coverage_at_precision(score, correct, precision) == pytest.approx(max(shares, default=0.0))
