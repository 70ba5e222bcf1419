"""Ratios, losses, means and reductions against golden numbers, and their edge cases one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms.equations import (
    clipped_ratio_loss,
    clipped_surrogate,
    gspo_surrogate,
    importance_ratio,
    importance_weight,
    kl_penalty,
    reduction_weights,
    sequence_logprob_mean,
    simko_ratio,
    simko_selected,
    within_importance_bound,
)
from tests.golden.cases import CASES, assert_golden

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
LOSS_CASES = {
    "token-mean": ("token-mean", {"dual_clip": 3.0}),
    "seq-mean-token-mean": ("seq-mean-token-mean", {"dual_clip": 3.0}),
    "seq-mean-token-sum": ("seq-mean-token-sum", {"dual_clip": 3.0}),
    "token-mean_no_dual_clip": ("token-mean", {}),
    "token-mean_clip_higher_0.28": ("token-mean", {"dual_clip": 3.0, "clip_high": 0.28}),
}


def loss_and_gradient(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor, mode: str, **clip: float) -> tuple:
    logp = logp.clone().requires_grad_()
    loss = (reduction_weights(mask, mode) * clipped_surrogate(logp, old, adv, **clip)).sum()
    loss.backward()
    return loss, logp.grad


# --- golden numbers -------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", LOSS_CASES)
def test_clipped_loss_and_its_gradient_agree_with_golden_numbers(name: str, dtype: torch.dtype) -> None:
    case = CASES["ppo_clip_loss_aggregations"]
    mode, clip = LOSS_CASES[name]
    logp, old, mask = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("logp", "old_logp", "mask"))
    adv = torch.tensor(case["inputs"]["advantage_seq"], dtype=dtype).unsqueeze(1) * mask
    loss, gradient = loss_and_gradient(logp, old, adv, mask, mode, **clip)
    assert_golden(loss, case["expected"][name]["loss"], case)
    assert_golden(gradient, case["expected"][name]["dloss_dlogp"], case)


def test_on_policy_loss_agrees_with_the_golden_sequence_level_one() -> None:
    case = CASES["onpolicy_gspo_equals_grpo"]
    logp, old, mask = (torch.tensor(case["inputs"][key]).double() for key in ("logp", "old_logp", "mask"))
    adv = torch.tensor(case["inputs"]["advantage_seq"]).double().unsqueeze(1)
    loss, gradient = loss_and_gradient(logp, old, adv, mask, "seq-mean-token-mean")
    assert_golden(loss, case["expected"]["loss"], case)
    assert_golden(gradient, case["expected"]["dloss_dlogp"], case)


GSPO_CASES = {"gspo_loss_wide_clip": {"clip_low": 0.2, "clip_high": 0.2}, "onpolicy_gspo_equals_grpo": {}}


@DTYPES
@pytest.mark.parametrize("name", GSPO_CASES)
def test_gspo_loss_and_its_gradient_agree_with_golden_numbers(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    logp, old, mask = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("logp", "old_logp", "mask"))
    logp.requires_grad_()
    adv = torch.tensor(case["inputs"]["advantage_seq"], dtype=dtype).unsqueeze(1)
    token = gspo_surrogate(logp, old, adv, mask, **GSPO_CASES[name])
    loss = (reduction_weights(mask, "seq-mean-token-mean") * token).sum()
    loss.backward()
    assert_golden(loss, case["expected"]["loss"], case)
    assert_golden(logp.grad, case["expected"]["dloss_dlogp"], case)


@DTYPES
def test_simko_loss_and_its_gradient_by_logits_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["simko_loss_visible_alpha"]
    want, param = case["expected"], case["params"]
    logits, old_logits = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("logits", "old_logits"))
    tokens, mask = torch.tensor(case["inputs"]["tokens"]).unsqueeze(2), torch.tensor(case["inputs"]["mask"]).bool()
    logits.requires_grad_()
    every = logits.log_softmax(dim=2)
    logp, old = (one.gather(2, tokens).squeeze(2) for one in (every, old_logits.log_softmax(dim=2)))
    entropy, top = -(every.exp() * every).sum(dim=2), every.topk(param["K"], dim=2)
    selected = simko_selected(entropy, mask, param["entropy_quantile"])
    assert selected.tolist() == want["selected"]
    ratio = simko_ratio(logp, old, top.values, selected, torch.tensor(case["inputs"]["reward"]), param["alpha"])
    assert_golden(ratio * mask, want["ratio_value"], case)
    adv = torch.tensor(case["inputs"]["advantage_seq"], dtype=dtype).unsqueeze(1) * mask
    sure = selected & (adv < 0) & (top.indices[..., 0] == tokens.squeeze(2))
    adv = torch.where(sure, param["top1_penalty"] * adv, adv)
    assert_golden(adv, want["token_advantage"], case)
    loss = (reduction_weights(mask, "token-mean") * clipped_ratio_loss(ratio, adv)).sum()
    loss.backward()
    assert_golden(loss, want["loss"], case)
    assert_golden(logits.grad, want["dloss_dlogits"], case)


@DTYPES
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_agree_with_golden_numbers(kind: str, dtype: torch.dtype) -> None:
    case = CASES["kl_low_var_k3"]
    logp, ref = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("logp", "ref_logp"))
    assert_golden(kl_penalty(logp, ref, kind), case["expected"][kind], case)


# --- losses ---------------------------------------------------------------------------------------------------------


def gradient_of_token(logp: float, old: float, adv: float, **clip: float) -> tuple[float, float]:
    value = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate(value, torch.tensor([[old]]).double(), torch.tensor([[adv]]).double(), **clip)
    loss.sum().backward()
    return loss.item(), value.grad.item()


def test_gradient_is_whole_on_policy_and_on_the_edges_of_the_clip_range() -> None:
    assert gradient_of_token(-1.0, -1.0, 2.0) == (-2.0, -2.0)
    for adv, log in ((2.0, math.log(1.5)), (-2.0, math.log(0.5))):
        ratio = torch.tensor(log, dtype=torch.float64).exp().item()
        width = abs(ratio - 1)  # exact, so that 1 +- width is the ratio itself
        loss, gradient = gradient_of_token(log, 0.0, adv, clip_low=width, clip_high=width)
        assert (loss, gradient) == (-adv * ratio, -adv * ratio)


def test_gradient_vanishes_where_the_clipped_branch_is_active_and_beyond_the_log_ratio_clamp() -> None:
    assert gradient_of_token(-0.5, -1.0, 1.0) == pytest.approx((-1.2, 0.0))
    assert gradient_of_token(-1.5, -1.0, -1.0) == pytest.approx((0.8, 0.0))
    loss, gradient = gradient_of_token(0.0, -25.0, -1.0)
    assert (loss, gradient) == pytest.approx((math.exp(20), 0.0))
    assert gradient_of_token(0.0, -20.0, -1.0) == pytest.approx((math.exp(20), math.exp(20)))


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    assert gradient_of_token(0.0, -2.0, -1.0, dual_clip=3.0) == (3.0, 0.0)
    assert gradient_of_token(-2.0, 0.0, 1.0, dual_clip=3.0) == gradient_of_token(-2.0, 0.0, 1.0)
    assert gradient_of_token(0.0, -1.0, -1.0, dual_clip=3.0) == gradient_of_token(0.0, -1.0, -1.0)


def test_only_current_log_probs_get_a_gradient() -> None:
    logp, old, ref, adv = (torch.randn(3, 4, requires_grad=True) for _ in range(4))
    (clipped_surrogate(logp, old, adv) + kl_penalty(logp, ref)).sum().backward()
    assert logp.grad is not None
    assert old.grad is None and ref.grad is None and adv.grad is None


def test_kl_k3_is_clamped_and_keeps_small_gaps() -> None:
    zero = torch.zeros(3)
    assert kl_penalty(zero, torch.tensor([1e-4, 50.0, -50.0])).tolist() == pytest.approx([5e-9, 10.0, 10.0], rel=1e-2)


def test_a_non_finite_log_prob_makes_the_loss_non_finite_instead_of_raising() -> None:
    loss = clipped_surrogate(torch.tensor([[math.nan]]), torch.zeros(1, 1), torch.ones(1, 1))
    assert loss.isnan().all()


def test_ratio_is_clamped() -> None:
    ratio = importance_ratio(torch.tensor([0.0, -900.0]), torch.tensor([-900.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


# --- sequence ratios --------------------------------------------------------------------------------------------------


def gspo_gradient(logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor, **clip: float) -> tuple[Tensor, Tensor]:
    logp = logp.clone().requires_grad_()
    loss = gspo_surrogate(logp, old, adv, mask, **clip)
    loss.sum().backward()
    return loss.detach(), logp.grad


def test_gspo_clips_a_whole_response_at_its_narrow_defaults() -> None:
    old, mask = torch.full((4, 2), -1.0, dtype=torch.float64), torch.ones(4, 2)
    logp = old + torch.tensor([[5e-4, 5e-4], [5e-4, -5e-4], [-1e-3, 2e-4], [-1e-3, 2e-4]])
    adv = torch.tensor([[1.0], [1.0], [-1.0], [1.0]]).double()
    loss, gradient = gspo_gradient(logp, old, adv, mask)
    ratio = (logp - old).mean(dim=1).exp().tolist()  # 1.0005, 1, 0.9996, 0.9996
    assert loss[:, 0].tolist() == pytest.approx([-1.0004, -1.0, 0.9997, -ratio[3]], rel=1e-12)
    assert gradient[:, 0].tolist() == pytest.approx([0.0, -1.0, 0.0, -ratio[3]], rel=1e-12)
    assert torch.equal(loss[:, 0], loss[:, 1]) and torch.equal(gradient[:, 0], gradient[:, 1])


def test_gspo_ignores_what_stands_off_the_mask_and_gives_empty_rows_zeros() -> None:
    nan, inf = math.nan, math.inf
    logp, old = torch.tensor([[-1.0, nan, -2.0], [nan, inf, -inf]]), torch.tensor([[-1.5, inf, -2.0], [0.0, nan, -inf]])
    adv = torch.tensor([[2.0, nan, 2.0], [nan, nan, nan]])
    loss, gradient = gspo_gradient(logp, old, adv, torch.tensor([[1, 0, 1], [0, 0, 0]]), clip_low=0.5, clip_high=0.5)
    ratio = math.exp(0.25)
    assert loss.tolist() == [pytest.approx([-2 * ratio, 0.0, -2 * ratio]), [0.0, 0.0, 0.0]]
    assert gradient.tolist() == [pytest.approx([-2 * ratio, 0.0, -2 * ratio]), [0.0, 0.0, 0.0]]


def test_gspo_clamps_the_log_ratio_from_above_and_bounds_bad_responses_by_the_dual_clip() -> None:
    far, old, mask = torch.tensor([[0.0, 0.0]]).double(), torch.tensor([[-30.0, -2.0]]).double(), torch.ones(1, 2)
    bad = torch.tensor([[-1.0]]).double()
    loss, gradient = gspo_gradient(far, old, bad, mask)
    assert loss.tolist() == [pytest.approx([math.exp(10)] * 2)] and gradient.abs().max() == 0
    loss, gradient = gspo_gradient(far, old, bad, mask, dual_clip=3.0)
    assert loss.tolist() == [[3.0, 3.0]] and gradient.abs().max() == 0
    loss, gradient = gspo_gradient(old, far, -bad, mask)  # ratio exp(-16)
    assert loss.tolist() == [pytest.approx([-math.exp(-16)] * 2)]


def test_gspo_in_bfloat16_still_tells_ratios_apart_that_its_own_precision_cannot() -> None:
    # 1.0005 is 1 in bfloat16: only a ratio computed in float32 is clipped.
    old = torch.zeros(1, 8, dtype=torch.bfloat16)
    logp = torch.tensor([[0.004] + [0.0] * 7], dtype=torch.bfloat16)
    loss, gradient = gspo_gradient(logp, old, torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 8))
    assert loss.dtype == gradient.dtype == torch.bfloat16
    assert gradient.abs().max() == 0


def test_a_non_finite_log_prob_makes_the_loss_of_its_response_alone_non_finite() -> None:
    logp = torch.tensor([[-1.0, math.nan], [-1.0, -2.0], [-math.inf, -1.0]])
    loss = gspo_surrogate(logp, torch.full((3, 2), -1.5), torch.ones(3, 1), torch.ones(3, 2))
    assert loss.sum(dim=1).isfinite().tolist() == [False, True, False]


# --- SimKO's ratio ----------------------------------------------------------------------------------------------------


def test_simko_takes_a_candidate_without_any_probability_for_one_without_gradient() -> None:
    logits = torch.tensor([[[0.5, 0.2, -math.inf]]], requires_grad=True)  # as where a vocabulary is restricted
    every = logits.log_softmax(dim=2)
    top = every.topk(3, dim=2).values
    assert top[0, 0, 2] == -math.inf
    ratio = simko_ratio(every[..., 0], every[..., 0].detach(), top, torch.ones(1, 1), torch.ones(1), alpha=0.3)
    ratio.sum().backward()
    assert ratio.item() == 1.0
    own, other = every[0, 0, 0].exp().item(), every[0, 0, 1].exp().item()
    moved = 0.7 * (1 - own) + 0.3 / 3 * ((1 - own) - own)  # of log p(sampled), and of the two that have a probability
    assert logits.grad[0, 0].tolist() == pytest.approx([moved, 0.7 * -other + 0.1 * ((1 - other) - other), 0.0])
    broken = simko_ratio(every[..., 0], every[..., 0], top * math.nan, torch.ones(1, 1), torch.ones(1))
    assert broken.isnan().all(), "a broken policy must look broken"


def test_simko_moves_a_share_of_the_gradient_to_the_top_tokens_of_selected_correct_ones_alone() -> None:
    logp, old = torch.tensor([[-1.0, -0.5], [-1.0, -0.5]]).double(), torch.tensor([[-1.2, -0.3], [-1.2, -0.3]]).double()
    top = torch.tensor([-0.9, -1.0, -2.0, -3.0]).double().expand(2, 2, 4).clone()
    logp.requires_grad_(), top.requires_grad_(), old.requires_grad_()
    selected, correct = torch.tensor([[1, 0], [1, 0]]), torch.tensor([1, 0])
    ratio = simko_ratio(logp, old, top, selected, correct, alpha=0.3)
    assert torch.equal(ratio, importance_ratio(logp, old))
    ratio.sum().backward()
    up, down = math.exp(0.2), math.exp(-0.2)
    assert logp.grad.tolist() == [pytest.approx([0.7 * up, down]), pytest.approx([up, down])]
    assert top.grad[0, 0].tolist() == pytest.approx([0.3 * up / 4] * 4)
    assert top.grad.abs().sum().item() == pytest.approx(0.3 * up)
    assert old.grad is None


def test_simko_ignores_top_tokens_where_nothing_is_selected_and_stops_beyond_the_clamp() -> None:
    logp, top = (
        torch.tensor([[-1.0, 0.0]], requires_grad=True),
        torch.tensor([[[math.nan], [-1.0]]], requires_grad=True),
    )
    ratio = simko_ratio(logp, torch.tensor([[-1.0, -25.0]]), top, torch.tensor([[0, 1]]), torch.tensor([True]), 0.5)
    ratio.sum().backward()
    assert ratio.tolist() == [pytest.approx([1.0, math.exp(20)])]
    assert logp.grad.tolist() == [[1.0, 0.0]] and top.grad.abs().max() == 0


# --- importance weights -----------------------------------------------------------------------------------------------


def test_importance_weights_are_capped_clamped_and_constant() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([[-1.0, -1.5, -9.0, -900.0]], dtype=torch.float64, requires_grad=True)
    weight = importance_weight(old, sampled, 2.0)
    assert weight.tolist() == [pytest.approx([1.0, math.exp(0.5), 2.0, 2.0], rel=1e-14)]
    assert not weight.requires_grad
    assert importance_weight(old, sampled, math.inf)[0, 3].item() == pytest.approx(math.exp(20))
    broken = torch.tensor([[-1.0, math.nan]])
    assert importance_weight(broken, torch.tensor([[-3.0, math.inf]]), 2.0, torch.tensor([[1, 0]])).tolist() == [
        [2.0, 1.0]
    ]


def test_a_responses_weight_is_the_capped_product_over_its_tokens() -> None:
    old = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    sampled = torch.tensor([[-1.5, -1.9, 0.0], [-9.0, -9.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weight = importance_weight(old, sampled, 5.0, mask, "sequence")
    assert weight[0].tolist() == [pytest.approx(math.exp(0.4)), pytest.approx(math.exp(0.4)), 1.0]
    assert weight[1].tolist() == [5.0] * 3
    assert importance_weight(old, sampled, math.inf, mask, "sequence")[1, 0].item() == pytest.approx(math.exp(20))


def test_a_response_is_rejected_beyond_the_bound_in_either_direction() -> None:
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, math.nan], [math.nan, math.nan]])
    sampled = torch.tensor([[-1.3, -1.3], [-1.4, -1.3], [-0.6, -0.7], [-0.4, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]])
    assert within_importance_bound(old, sampled, math.exp(0.65), mask).tolist() == [True, False, False, True, True]


# --- sequences and reductions ---------------------------------------------------------------------------------------


def test_empty_responses_have_no_mean_and_what_stands_off_the_mask_is_ignored() -> None:
    logp = torch.tensor([[-1.0, -3.0, math.nan], [-math.inf, math.nan, 7.0]], requires_grad=True)
    mean, valid = sequence_logprob_mean(logp, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert mean.tolist() == [-2.0, 0.0]
    assert valid.tolist() == [True, False]
    mean.sum().backward()
    assert logp.grad.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_reduction_weights_follow_their_formulas_with_an_empty_row() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
    rows = {
        "token-mean": (1 / 6, 1 / 6),
        "seq-mean-token-mean": (1 / 4, 1 / 8),  # two responses are not empty
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "constant-length": (1 / 30, 1 / 30),  # all three count
    }
    for mode, (short, long) in rows.items():
        weights = reduction_weights(mask, mode, length=10)
        torch.testing.assert_close(weights, mask * torch.tensor([[short], [0.0], [long]]).double())
        assert reduction_weights(torch.zeros(3, 4).bool(), mode, length=10).abs().sum() == 0


def test_counts_beyond_the_integers_of_float32_are_exact() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool).expand(4097, 4097)  # 16,785,409 tokens: not a float32
    assert reduction_weights(mask, "token-mean")[0, 0].item() == pytest.approx(1 / 4097**2, rel=1e-7)
