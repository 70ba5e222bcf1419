"""Evaluation metrics against golden numbers and brute force, and what they do where nothing is defined."""

from __future__ import annotations

import math
import time
from itertools import permutations

import numpy as np
import pytest

from capo_megatron.errors import CapoError, ConfigError, ShapeError
from capo_megatron.evaluation.calibration import (
    answer_mass,
    auc_mean,
    aurc,
    bootstrap_interval,
    brier,
    calibration_errors,
    cluster_answers,
    excess_aurc,
    expected_accuracy,
    mean_at_k,
    paired_auc,
    pass_at_k,
    pooled_auc,
    precision_at_coverage,
    precision_coverage,
    rpc_keep,
    select_answer,
)
from capo_megatron.evaluation.selection import mixture_membership
from tests.golden.cases import CASES, assert_golden

# --- golden numbers -------------------------------------------------------------------------------------------------


def auc_columns() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    questions = CASES["metric_auc_mean"]["inputs"]["questions"]
    score = -np.concatenate([one["ppl"] for one in questions])
    correct = np.concatenate([one["correct"] for one in questions])
    return score, correct, np.repeat(np.arange(len(questions)), [len(one["ppl"]) for one in questions])


def test_auc_mean_agrees_with_golden_numbers() -> None:
    case = CASES["metric_auc_mean"]
    score, correct, question = auc_columns()
    got = auc_mean(score, correct, question)
    assert_golden(got.value, case["expected"]["auc_mean"], case)
    assert_golden(got.per_question, case["expected"]["per_question"], case)
    assert (got.n_valid, got.n_total) == (case["expected"]["n_valid"], case["expected"]["n_total"])
    assert_golden(pooled_auc(score, correct), case["expected"]["auc_pooled"], case)
    assert_golden(mean_at_k(correct, question), case["expected"]["mean_at_k"], case)


def test_pass_at_k_agrees_with_golden_numbers_one_by_one_and_at_once() -> None:
    case = CASES["metric_pass_at_k"]
    counts = case["inputs"]["n_c_k"]
    assert_golden([pass_at_k(*one) for one in counts], case["expected"]["pass_at_k"], case)
    assert_golden(pass_at_k(*np.array(counts).T), case["expected"]["pass_at_k"], case)
    assert isinstance(pass_at_k(4, 1, 2), float)


def test_precision_coverage_and_aurc_agree_with_golden_numbers() -> None:
    case = CASES["metric_precision_coverage_aurc"]
    confidence, correct = case["inputs"]["confidence"], case["inputs"]["correct"]
    want = case["expected"]
    curve = np.stack(precision_coverage(confidence, correct), axis=1)
    assert_golden(curve, want["curve_threshold_coverage_precision"], case)
    assert_golden(aurc(confidence, correct), want["aurc"], case)
    assert_golden(aurc(correct, correct), want["aurc_oracle"], case)
    assert_golden(excess_aurc(confidence, correct), want["e_aurc"], case)
    assert_golden(1 - aurc(confidence, correct), want["area_precision_coverage"], case)
    assert precision_at_coverage(confidence, correct, 1.0) == want["accuracy"]


def test_calibration_errors_agree_with_golden_numbers() -> None:
    case = CASES["metric_ece_pce_brier"]
    confidence, correct, want = case["inputs"]["confidence"], case["inputs"]["correct"], case["expected"]
    assert_golden(calibration_errors(confidence, correct), [want["ece20"], want["pce20"], want["mce20"]], case)
    assert_golden(calibration_errors(confidence, correct, bins=10)[:2], [want["ece10"], want["pce10"]], case)
    assert_golden(brier(confidence, correct), want["brier"], case)


@pytest.mark.parametrize("method", ["sc", "ppl", "pc"])
def test_answer_selection_agrees_with_golden_numbers(method: str) -> None:
    case = CASES["select_sc_ppl_pc"]
    columns = [case["inputs"][key] for key in ("answer", "mean_logprob", "completion_id")]
    want = case["expected"][method]
    mass = answer_mass(*columns, method=method)
    assert_golden([mass[key] for key in want["mass"]], list(want["mass"].values()), case)
    if want["share"]:
        assert_golden([mass[key] / sum(mass.values()) for key in want["share"]], list(want["share"].values()), case)
    winners = select_answer(*columns, method=method)
    assert winners == want["winners"]
    assert expected_accuracy(winners, lambda item: item == case["inputs"]["truth"]) == want["expected_correct"]


def test_completions_of_their_own_are_not_merged() -> None:
    case = CASES["select_sc_ppl_pc"]
    mass = answer_mass(case["inputs"]["answer"], case["inputs"]["mean_logprob"], list(range(8)))
    want = case["expected"]["pc_no_dedupe"]["mass"]
    assert_golden([mass[key] for key in want], list(want.values()), case)


def test_mixture_membership_agrees_with_golden_numbers_whichever_component_is_named_first() -> None:
    case = CASES["rpc_membership_given_params"]
    prob, p = np.array(case["inputs"]["prob"]), case["params"]
    high = mixture_membership(prob, p["w1"], p["k1"], p["lam1"], p["k2"], p["lam2"])
    assert_golden(high, case["expected"]["membership_high"], case)
    assert_golden(mixture_membership(prob, 1 - p["w1"], p["k2"], p["lam2"], p["k1"], p["lam1"]), high, case)
    assert (~((high < 0.5) & (prob < prob.mean()))).tolist() == case["expected"]["keep"]
    assert rpc_keep(prob).tolist() == case["expected"]["keep"]


def test_rpc_prunes_nothing_if_all_are_equal() -> None:
    case = CASES["rpc_all_equal"]
    assert rpc_keep(case["inputs"]["prob"]).tolist() == case["expected"]["keep"]


# --- AUC ------------------------------------------------------------------------------------------------------------


def test_responses_without_a_score_leave_the_auc_but_not_the_accuracy() -> None:
    score, correct, question = [-0.1, -0.5, math.nan, None], [1, 0, 0, 0], ["a", "a", "a", "b"]
    got = auc_mean(score, correct, question)
    assert (got.value, got.n_valid, got.n_total) == (1.0, 1, 2)
    assert mean_at_k(correct, question) == pytest.approx((1 / 3 + 0) / 2)


def test_questions_keep_the_order_of_their_first_appearance() -> None:
    got = auc_mean([-1, -2, -3, -4], [0, 1, 1, 0], ["q10", "q10", "q2", "q2"])
    assert got.per_question.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: auc_mean([-1.0, -2.0], [1, 1], [0, 0]).value,
        lambda: auc_mean([], [], []).value,
        lambda: pooled_auc([-1.0, -2.0], [0, 0]),
        lambda: paired_auc([-1.0, -2.0], [1, 0], [0, 0], [-1.0, -2.0], [1, 1], [0, 0]).value_a,
        lambda: mean_at_k([], []),
        lambda: aurc([math.nan], [1]),
        lambda: excess_aurc([], []),
        lambda: precision_at_coverage([], [], 0.5),
        lambda: calibration_errors([], [])[0],
        lambda: brier([math.nan], [1]),
        lambda: bootstrap_interval([math.nan])[0],
    ],
)
def test_what_is_undefined_is_nan_with_a_warning(call) -> None:
    with pytest.warns(RuntimeWarning, match="undefined"):
        assert math.isnan(call())


def test_paired_auc_judges_both_models_on_the_same_questions() -> None:
    a = ([-1, -2, -1, -2, -1, -2], [1, 0, 0, 1, 1, 1], ["x", "x", "y", "y", "z", "z"])
    b = ([-1, -2, -1, -2, -3, -4, -5], [0, 1, 1, 0, 1, 0, 1], ["y", "y", "x", "x", "z", "z", "w"])
    got = paired_auc(*a, *b)
    assert (got.value_a, got.value_b, got.n_valid, got.n_total) == (0.5, 0.5, 2, 3)
    assert got.per_question_a.tolist() == [1.0, 0.0]
    assert got.per_question_b.tolist() == [1.0, 0.0]


def test_bootstrap_interval_covers_the_mean_and_narrows_with_questions() -> None:
    value = np.random.default_rng(0).random(400)
    low, high = bootstrap_interval(np.append(value, np.nan))
    assert low < value.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * value.std() / 20, rel=0.1)  # 2000 resamples: sd of a width is 2 %
    assert (low, high) == bootstrap_interval(value)  # seeded; NaN left out


def test_a_million_records_take_seconds() -> None:
    draw = np.random.default_rng(0)
    question, score, correct = (
        draw.integers(0, 62_500, 1_000_000),
        -draw.random(1_000_000),
        draw.random(1_000_000) < 0.5,
    )
    start = time.process_time()
    assert auc_mean(score, correct, question).value == pytest.approx(0.5, abs=0.01)
    precision_coverage(score, correct)
    assert time.process_time() - start < 10  # about 2 s; a loop over questions takes far longer


# --- selective prediction and calibration -----------------------------------------------------------------------------


def test_aurc_with_ties_is_the_mean_over_all_orders_of_the_tied() -> None:
    confidence, correct = np.array([0.9, 0.5, 0.5, 0.5, 0.1]), np.array([1, 0, 1, 0, 1.0])
    areas = []
    for order in permutations([1, 2, 3]):
        ranked = correct[[0, *order, 4]]
        areas.append(np.mean(1 - np.cumsum(ranked) / np.arange(1, 6)))
    assert aurc(confidence, correct) == pytest.approx(np.mean(areas))


def test_precision_at_coverage_counts_a_cut_tie_block_at_its_own_accuracy() -> None:
    confidence, correct = [0.9, 0.5, 0.5, 0.5], [1, 1, 0, 0]
    assert precision_at_coverage(confidence, correct, 0.25) == 1.0
    assert precision_at_coverage(confidence, correct, 0.5) == pytest.approx((1 + 1 / 3) / 2)
    assert precision_at_coverage(confidence, correct, 0.51) == pytest.approx((1 + 2 / 3) / 3)
    assert precision_at_coverage(np.arange(10.0), np.arange(10) >= 3, 0.7) == 1.0  # 0.7 * 10 must be 7 answers


def test_selected_answers_may_be_fractionally_correct() -> None:
    threshold, coverage, precision = precision_coverage([0.8, 0.6, 0.6], [0.5, 1.0, 0.0])
    assert threshold.tolist() == [0.8, 0.6]
    assert coverage.tolist() == pytest.approx([1 / 3, 1.0])
    assert precision.tolist() == pytest.approx([0.5, 0.5])
    assert aurc([0.8, 0.6, 0.6], [0.5, 1.0, 0.0]) == pytest.approx(0.5)


def test_no_confidences_give_an_empty_curve() -> None:
    assert [len(part) for part in precision_coverage([math.nan], [1])] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_confidences_on_a_bin_edge_belong_to_the_bin_below(dtype: type) -> None:
    for bins in (10, 20):
        for edge in range(1, bins + 1):
            confidence = np.array([edge / bins, (edge - 0.5) / bins], dtype=dtype)  # same bin: the gaps cancel
            mean = float(confidence.astype(float).mean())
            assert calibration_errors(confidence, [1, 0], bins)[0] == pytest.approx(abs(0.5 - mean))


def test_weights_share_one_question_among_tied_winners() -> None:
    ece = calibration_errors([0.4, 0.4, 0.8], [1, 0, 1], bins=10, weight=[0.5, 0.5, 1.0])[0]
    assert ece == pytest.approx((abs(0.5 - 0.4) + abs(1 - 0.8)) / 2)


# --- answer selection -------------------------------------------------------------------------------------------------


def test_ties_give_every_winner_and_an_expected_accuracy() -> None:
    columns = (["1", "2", "2", "1", None, "3"], [-0.3, -0.1, -0.3, -0.1, -0.01, -0.9], list("abcdef"))
    for method in ("sc", "pc", "ppl"):
        assert select_answer(*columns, method=method) == ["1", "2"]
    assert expected_accuracy(["1", "2"], lambda item: item == "2") == 0.5


def test_unreadable_answers_cannot_win() -> None:
    assert select_answer([None, None, "5"], [-0.1, -0.1, -3.0], ["a", "b", "c"]) == ["5"]
    assert select_answer([None], [-0.1], ["a"]) == []
    assert expected_accuracy([], bool) == 0.0


def test_a_response_without_a_log_prob_votes_but_has_no_mass() -> None:
    columns = (["1", "1", "2"], [math.nan, math.nan, -0.5], ["a", "b", "c"])
    assert select_answer(*columns, method="sc") == ["1"]
    assert select_answer(*columns, method="pc") == ["2"]


def test_rpc_ignores_the_pruned_majority() -> None:
    answer = ["1"] * 4 + ["2"] * 8
    prob = [0.91, 0.9, 0.89, 0.88, 0.31, 0.3, 0.29, 0.28, 0.32, 0.33, 0.27, 0.3]
    columns = (answer, np.log(prob), list(range(12)))
    assert answer_mass(*columns, method="rpc") == {"1": pytest.approx(sum(prob[:4])), "2": 0.0}
    assert select_answer(*columns, method="sc") == ["2"]
    assert select_answer(*columns, method="rpc") == ["1"]


def test_pruning_needs_five_responses_and_survives_zeros() -> None:
    assert rpc_keep([0.9, 0.9, 0.1, 0.1]).all()
    assert rpc_keep([]).shape == (0,)
    assert rpc_keep([0.0, 0.0, 0.9, 0.9, 0.8, 0.85]).shape == (6,)


def test_clusters_are_transitive_and_keep_the_first_spelling() -> None:
    near = cluster_answers(["1", "9", None, "3", "2"], lambda a, b: abs(int(a) - int(b)) == 1)
    assert near == ["1", "9", None, "1", "1"]  # 1 ~ 2 ~ 3


# --- what goes in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: pass_at_k(4, 1, 5), ConfigError, "k=5 with n=4"),
        (lambda: pass_at_k(4, 1, 0), ConfigError, "k=0"),
        (lambda: pass_at_k(4, 5, 1), ShapeError, "c=5"),
        (lambda: auc_mean([-1.0], [1, 0], [0]), ShapeError, "correct: 2 rows, expected 1"),
        (lambda: auc_mean([-1.0], [1], [0, 1]), ShapeError, r"question: shape \(2,\)"),
        (lambda: auc_mean([[-1.0]], [1], [0]), ShapeError, r"score: shape \(1, 1\)"),
        (lambda: auc_mean(["x"], [1], [0]), ShapeError, "score: not an array of numbers"),
        (lambda: auc_mean([-1.0], [math.nan], [0]), ShapeError, "correct: NaN in row 0"),
        (lambda: calibration_errors([0.5, 1.5], [1, 0]), ShapeError, "confidence: 1.5 in row 1"),
        (lambda: brier([-0.5], [1]), ShapeError, "confidence: -0.5 in row 0"),
        (lambda: calibration_errors([0.5], [1], bins=0), ConfigError, "bins=0"),
        (lambda: precision_at_coverage([0.5], [1], 0.0), ConfigError, "coverage=0.0"),
        (lambda: bootstrap_interval([0.5], level=1.0), ConfigError, "level=1.0"),
        (lambda: select_answer(["1"], [-1.0], ["a"], method="best"), ConfigError, "method='best'.*rpc"),
        (lambda: select_answer(["1"], [-1.0, -2.0], ["a"]), ShapeError, "1, 2 and 1 rows"),
        (lambda: select_answer(["1"], [0.7], ["a"]), ShapeError, "mean_logprob: 0.7 in row 0"),
        (lambda: rpc_keep([-0.1]), ShapeError, "prob"),
    ],
)
def test_bad_input_is_named(call, error: type[CapoError], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
