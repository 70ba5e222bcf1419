"""Advantages, masks and weights from pairs and groups against golden numbers, and their edge cases one by one."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms.equations import (
    capo_advantage,
    capo_noise_mask,
    clipped_surrogate,
    codapo_select,
    codapo_weight,
    dapo_keep_group,
    dapo_overlong_penalty,
    grpo_advantage,
    reduction_weights,
    sequence_logprob_mean,
)
from tests.golden.cases import CASES, assert_golden

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
# --- golden numbers -------------------------------------------------------------------------------------------------


@DTYPES
def test_grpo_advantages_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["grpo_adv_basic"]
    reward, group = torch.tensor(case["inputs"]["reward"], dtype=dtype), torch.tensor(case["inputs"]["group"])
    assert_golden(grpo_advantage(reward, group), case["expected"]["advantage"], case)
    assert_golden(grpo_advantage(reward, group, eps=1e-4), case["expected"]["advantage_trl_eps1e4_ddof1"], case)


@DTYPES
def test_groups_of_one_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["grpo_adv_single_sample_groups"]
    reward, group = torch.tensor(case["inputs"]["reward"], dtype=dtype), torch.tensor([0, 1, 2])
    assert_golden(grpo_advantage(reward, group), case["expected"]["advantage_recommended_zero"], case)
    assert_golden(grpo_advantage(reward, group, singleton="raw"), case["expected"]["advantage_verl_raw"], case)


@DTYPES
def test_dr_grpo_advantages_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["drgrpo_adv_basic"]
    reward, group = torch.tensor(case["inputs"]["reward"], dtype=dtype), torch.tensor(case["inputs"]["group"])
    assert_golden(grpo_advantage(reward, group, scale_by_std=False), case["expected"]["advantage"], case)


@DTYPES
@pytest.mark.parametrize("variant", CASES["capo_adv_variants"]["expected"]["advantage"])
def test_capo_advantages_agree_with_golden_numbers(variant: str, dtype: torch.dtype) -> None:
    case = CASES["capo_adv_variants"]
    norm, inv_tau = variant.split("|inv_tau=")
    mean, correct = torch.tensor(case["inputs"]["lpm"], dtype=dtype), torch.tensor(case["inputs"]["reward"])
    got = capo_advantage(mean, correct, torch.zeros(5, dtype=torch.long), norm=norm, inv_tau=inv_tau == "True")
    assert_golden(got, case["expected"]["advantage"][variant], case)


def test_capo_linear_surrogate_agrees_with_golden_numbers() -> None:
    case = CASES["capo_adv_variants"]
    mean, correct = torch.tensor(case["inputs"]["lpm"]), torch.tensor(case["inputs"]["reward"]).bool()
    got = capo_advantage(mean, correct, torch.zeros(5, dtype=torch.long), surrogate="linear")
    assert got.tolist() == case["expected"]["linear_surrogate_sum"]


def test_capo_advantages_are_the_negative_gradient_of_the_pairwise_loss() -> None:
    case = CASES["capo_adv_variants"]
    mean = torch.tensor(case["inputs"]["lpm"], dtype=torch.float64, requires_grad=True)
    right = torch.tensor(case["inputs"]["reward"]).bool()
    loss = torch.nn.functional.softplus(-(mean[right].unsqueeze(1) - mean[~right]) / 0.6).sum()
    loss.backward()
    assert_golden(loss, case["expected"]["pairwise_surrogate_loss"], case)
    got = capo_advantage(mean, right, torch.zeros(5, dtype=torch.long), tau=0.6)
    torch.testing.assert_close(got, -mean.grad)
    assert not got.requires_grad


@pytest.mark.parametrize("surrogate", ["logistic", "linear"])
def test_capo_advantages_of_one_class_groups_are_exactly_zero(surrogate: str) -> None:
    case = CASES["capo_degenerate_groups"]
    groups = case["inputs"]["groups"]
    mean = torch.tensor([value for one in groups for value in one["lpm"]])
    correct = torch.tensor([value for one in groups for value in one["reward"]])
    group = torch.tensor([index for index, one in enumerate(groups) for _ in one["lpm"]])
    assert capo_advantage(mean, correct, group, surrogate=surrogate).tolist() == [0.0] * 6


@DTYPES
def test_capo_with_noise_mask_agrees_with_golden_numbers_from_log_probs_to_gradient(dtype: torch.dtype) -> None:
    case = CASES["capo_token_level_with_mask"]
    want = case["expected"]
    old, ref, logp, mask = (
        torch.tensor(case["inputs"][key], dtype=dtype) for key in ("old_logp", "ref_logp", "logp", "mask")
    )
    correct, group = torch.tensor(case["inputs"]["reward"]), torch.zeros(4, dtype=torch.long)
    mean, answered = sequence_logprob_mean(old, mask)
    ref_mean, _ = sequence_logprob_mean(ref, mask)
    assert answered.all()
    assert_golden(mean, want["lpm_old"], case)
    assert_golden((-ref_mean).exp(), want["ppl_ref"], case)
    keep = capo_noise_mask(ref_mean, correct)
    assert keep.tolist() == want["keep"]
    advantage = capo_advantage(mean, correct, group)
    assert_golden(advantage, want["advantage_unmasked"], case)
    assert_golden(capo_advantage(mean, correct, group, valid=keep), want["advantage_masked_leave_pairs"], case)
    assert_golden(advantage * keep, want["advantage_output_mask_only"], case)
    for mode, numbers in want["loss_output_mask_only"].items():
        now = logp.clone().requires_grad_()
        token = clipped_surrogate(now, old, (advantage * keep).unsqueeze(1) * mask)
        loss = (reduction_weights(mask, mode) * token).sum()
        loss.backward()
        assert_golden(loss, numbers["loss"], case)
        assert_golden(now.grad, numbers["dloss_dlogp"], case)


@DTYPES
def test_codapo_weights_and_selection_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["codapo_weights_and_selection"]
    want = case["expected"]
    mean, reward = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("lpm_old", "reward"))
    group = torch.tensor(case["inputs"]["group"])
    weight = codapo_weight(mean, reward, group)
    assert_golden(weight, want["weight"], case)
    assert_golden(weight * grpo_advantage(reward, group), want["advantage"], case)
    assert_golden(weight[::4], want["group_weight"], case)
    assert codapo_select(weight[::4]).tolist() == want["refocused_batch_group_order"]


def test_dapo_filter_agrees_with_golden_numbers() -> None:
    case = CASES["dapo_overlong_and_filter"]
    verdicts = torch.tensor(case["inputs"]["group_acc"])
    group = torch.arange(len(verdicts)).repeat_interleave(verdicts.shape[1])
    keep = dapo_keep_group(verdicts.flatten(), group).view_as(verdicts)
    assert keep.all(dim=1).tolist() == keep.any(dim=1).tolist() == case["expected"]["keep_group"]


# --- CAPO's edges ---------------------------------------------------------------------------------------------------


@DTYPES
def test_extreme_gaps_give_the_limits_of_the_weight_instead_of_overflow(dtype: torch.dtype) -> None:
    correct, group = torch.tensor([True, False]), torch.tensor([0, 0])
    reversed_order = capo_advantage(torch.tensor([-60.0, 0.0], dtype=dtype), correct, group, tau=0.05)
    assert reversed_order.tolist() == pytest.approx([20.0, -20.0])  # 1 / tau
    right_order = capo_advantage(torch.tensor([0.0, -60.0], dtype=dtype), correct, group, tau=0.05)
    assert right_order.abs().max() < 1e-30
    assert right_order.isfinite().all()


def test_rows_that_are_not_valid_are_as_if_absent_whatever_they_hold() -> None:
    mean = torch.tensor([-0.2, math.nan, -0.5, -math.inf, -0.9])
    correct = torch.tensor([1, 0, 0, 1, 1])
    valid = torch.tensor([True, False, True, False, True])
    for norm in ("sum", "group", "opposite_mean", "pairs"):
        got = capo_advantage(mean, correct, torch.full((5,), 7), norm=norm, valid=valid)
        alone = capo_advantage(mean[valid], correct[valid], torch.full((3,), 7), norm=norm)
        assert torch.equal(got[valid], alone)
        assert got[~valid].tolist() == [0.0, 0.0]


def test_groups_may_be_interleaved_uneven_negative_and_sparse() -> None:
    mean = -torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    correct = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 0])
    group = torch.tensor([-3, 9_000_000_000, -3, 5, 9_000_000_000, -3, 5, -3, 9_000_000_000])
    got, reward = capo_advantage(mean, correct, group), torch.randn(9, dtype=torch.float64)
    normalised = grpo_advantage(reward, group)
    for one in group.unique():
        rows = group == one
        same = torch.zeros(int(rows.sum()), dtype=torch.long)
        torch.testing.assert_close(got[rows], capo_advantage(mean[rows], correct[rows], same))
        torch.testing.assert_close(normalised[rows], grpo_advantage(reward[rows], same))


def test_pairs_formed_in_many_blocks_equal_those_formed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = -torch.rand(60, dtype=torch.float64)
    correct, group = torch.rand(60) < 0.5, torch.arange(60) // 20
    whole = capo_advantage(mean, correct, group)
    monkeypatch.setattr("capo_megatron.algorithms.equations.pairwise.PAIRS_AT_ONCE", 7)
    torch.testing.assert_close(capo_advantage(mean, correct, group), whole, rtol=1e-12, atol=1e-14)


def test_131072_rows_in_groups_of_eight_take_bounded_memory() -> None:
    # N x N weights would be 64 GiB. A process of its own, so that its peak is not somebody else's.
    code = """
import resource, torch
from capo_megatron.algorithms.equations import capo_advantage
n = 131072
mean, correct, group = -torch.rand(n), torch.rand(n) < 0.5, torch.randperm(n) % (n // 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
advantage = capo_advantage(mean, correct, group)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert advantage.isfinite().all() and grown < 200_000, f"{grown} KiB"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@DTYPES
def test_noise_mask_keeps_equality_and_does_not_overflow(dtype: torch.dtype) -> None:
    perplexity = torch.tensor([2.5, 2.50001, 1.0, 1.05, 1.04999, 50.0], dtype=dtype)
    correct = torch.tensor([1, 1, 1, 0, 0, 0])
    assert capo_noise_mask(-perplexity.log(), correct).tolist() == [True, False, True, True, False, True]
    vast = torch.tensor([-5000.0, -5000.0], dtype=dtype)
    assert capo_noise_mask(vast, torch.tensor([True, False])).tolist() == [False, True]
    assert capo_noise_mask(vast, torch.tensor([True, False]), ref_high=math.inf).tolist() == [True, True]


# --- GRPO's edges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e4 + 0.1, -3.3])
def test_equal_rewards_give_exactly_zero_in_float32(reward: float) -> None:
    value = torch.full((21,), reward)
    for scale in (True, False):
        assert grpo_advantage(value, torch.arange(21) // 7, scale_by_std=scale).abs().max() == 0


def test_a_large_offset_of_the_rewards_costs_no_precision() -> None:
    reward = torch.tensor([1000001.0, 1000000.0, 1000000.0, 1000001.0])
    expected = grpo_advantage(reward - 1000000.0, torch.zeros(4, dtype=torch.long))
    assert torch.equal(grpo_advantage(reward, torch.zeros(4, dtype=torch.long)), expected)


def test_groups_of_one_leak_nothing_without_the_raw_option() -> None:
    assert grpo_advantage(torch.tensor([3.0]), torch.tensor([4]), scale_by_std=False).tolist() == [0.0]
    assert grpo_advantage(torch.tensor([3.0]), torch.tensor([4]), scale_by_std=False, singleton="raw").tolist() == [3.0]


# --- CAPO's variants ------------------------------------------------------------------------------------------------


def dense_capo(mean: Tensor, correct: Tensor, floor: float, exponent: float | None, tau: float) -> Tensor:
    """One group's advantages from the whole matrix of pair weights."""
    weight = torch.sigmoid((mean.unsqueeze(0) - mean.unsqueeze(1)) / tau).clamp(min=floor)
    weight = weight * (correct.unsqueeze(1) & ~correct.unsqueeze(0))
    if exponent is not None:
        weight = weight * (correct.sum() * (~correct).sum() / weight.sum()) ** exponent
    return (weight.sum(dim=1) - weight.sum(dim=0)) / tau


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("exponent", [None, 0.0, 0.5, 1.0, 1.5])
def test_weight_floor_and_mass_follow_their_formulas_together(floor: float, exponent: float | None) -> None:
    mean = torch.tensor([-0.2, -1.5, -0.9, -0.3, -2.0, -0.25, -0.8], dtype=torch.float64)
    correct = torch.tensor([1, 0, 1, 0, 0, 1, 0]).bool()
    group = torch.tensor([4, 4, 4, 4, 2, 2, 2])
    option = {"norm": "sum"} if exponent is None else {"norm": "mass", "mass_exponent": exponent}
    got = capo_advantage(mean, correct, group, tau=0.4, weight_floor=floor, **option)
    for one in (2, 4):
        rows = group == one
        torch.testing.assert_close(got[rows], dense_capo(mean[rows], correct[rows], floor, exponent, 0.4))
    scaled = capo_advantage(mean, correct, group, tau=0.4, weight_floor=floor, inv_tau=False, **option)
    torch.testing.assert_close(scaled, got * 0.4)


@DTYPES
def test_mass_has_the_limit_of_groups_whose_weights_underflow(dtype: torch.dtype) -> None:
    mean, correct = torch.tensor([0.0, -60.0, -70.0], dtype=dtype), torch.tensor([1, 0, 0])
    group = torch.zeros(3, dtype=torch.long)
    got = capo_advantage(mean, correct, group, tau=0.05, norm="mass", inv_tau=False)
    assert got.tolist() == pytest.approx([2.0, -2.0, 0.0])  # two pairs' weight, all on the less hopeless one
    half = capo_advantage(mean, correct, group, tau=0.05, norm="mass", mass_exponent=0.5)
    assert half.isfinite().all() and half.abs().max() < 1e-30
    assert capo_advantage(mean, correct, group, tau=0.05, norm="mass", mass_exponent=9.0).isfinite().all()
    floored = capo_advantage(mean, correct, group, tau=0.05, norm="mass", weight_floor=0.5, inv_tau=False)
    assert floored.tolist() == pytest.approx([2.0, -1.0, -1.0])


def test_variants_leave_the_linear_surrogate_and_one_class_groups_alone() -> None:
    mean, correct = torch.tensor([-0.1, -0.5, -0.7, -0.9, -0.2]), torch.tensor([1, 0, 0, 1, 1])
    group = torch.tensor([0, 0, 0, 1, 1])
    linear = capo_advantage(mean, correct, group, surrogate="linear", norm="mass", weight_floor=0.7)
    assert linear.tolist() == [2.0, -1.0, -1.0, 0.0, 0.0]
    assert capo_advantage(mean, correct, group, norm="mass", weight_floor=0.7)[3:].tolist() == [0.0, 0.0]


# --- DAPO and CoDaPO ------------------------------------------------------------------------------------------------


def test_length_penalty_gives_all_correct_groups_a_signal_that_only_the_filter_removes() -> None:
    correct, group = torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    penalty = dapo_overlong_penalty(torch.tensor([100, 175, 100, 200]), 200, 50)
    assert penalty.tolist() == [0.0, -0.5, 0.0, -1.0]
    advantage = grpo_advantage(2.0 * correct - 1 + penalty, group)
    assert advantage.tolist() == pytest.approx([2**-0.5, -(2**-0.5)] * 2, rel=1e-5)
    assert dapo_keep_group(correct, group).tolist() == [False, False, True, True]


def test_dapo_filter_ignores_invalid_rows_and_drops_groups_of_one() -> None:
    correct, group = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([8, 8, 8, -1, 3])
    assert dapo_keep_group(correct, group).tolist() == [True, True, True, False, False]
    valid = torch.tensor([1, 0, 1, 1, 1])
    assert not dapo_keep_group(correct, group, valid).any()


def test_codapo_takes_a_row_without_tokens_out_of_the_confidence_but_not_out_of_the_verdicts() -> None:
    mean = torch.tensor([-0.5, -1.5, math.nan, math.nan, -0.3], dtype=torch.float64)
    correct, group = torch.tensor([1, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 2])
    got = codapo_weight(mean, correct, group, offset=0.2, valid=mean.isfinite())
    mixed = math.exp(-1.0) * 4 * (1 / 3) * (2 / 3) + 0.2
    assert got.tolist() == pytest.approx([mixed, mixed, mixed, 0.2, 0.2], rel=1e-12)


def test_codapo_selection_walks_the_selected_groups_until_the_batch_is_full() -> None:
    equal = torch.full((6,), 0.1)
    assert codapo_select(equal).tolist() == [0, 0, 0, 0, 1, 1]  # all tie: the rest finds no place
    spread = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.1, 0.2, 0.3], dtype=torch.float64)
    assert codapo_select(spread).tolist() == [1, 1, 1, 1, 3, 3, 3, 3]
    assert codapo_select(spread, repeat=3).tolist() == [1, 1, 1, 3, 3, 3, 1, 1]
    assert codapo_select(spread, percentile=1.0, repeat=1).tolist() == [1] * 8
    assert codapo_select(spread, percentile=0.0, repeat=1).tolist() == list(range(8))
    assert codapo_select(torch.zeros(0)).shape == (0,)


def test_codapo_threshold_is_the_linear_quantile_also_where_the_rank_is_whole() -> None:
    weight = torch.arange(21, dtype=torch.float64)
    for percentile in (0.05, 0.35, 0.55, 0.7, 0.75, 0.85):  # 0.55 * 20 is not 11 in binary
        assert codapo_select(weight, percentile, repeat=1)[0] == round(percentile * 20)
    between = torch.tensor([0.0, 1.0, 2.0, 3.0])  # quantile(0.5) = 1.5
    assert codapo_select(between, 0.5, repeat=1).tolist() == [2, 3, 2, 3]
