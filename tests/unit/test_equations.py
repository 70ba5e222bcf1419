"""The equations against golden numbers, and their edge cases one by one."""

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
    grpo_advantage,
    importance_ratio,
    kl_penalty,
    reduction_weights,
    sequence_logprob_mean,
)
from capo_megatron.errors import ConfigError, ShapeError
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


@DTYPES
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_agree_with_golden_numbers(kind: str, dtype: torch.dtype) -> None:
    case = CASES["kl_low_var_k3"]
    logp, ref = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("logp", "ref_logp"))
    assert_golden(kl_penalty(logp, ref, kind), case["expected"][kind], case)


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
        loss, gradient = loss_and_gradient(logp, old, (advantage * keep).unsqueeze(1) * mask, mask, mode)
        assert_golden(loss, numbers["loss"], case)
        assert_golden(gradient, numbers["dloss_dlogp"], case)


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


# --- what goes in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    value, correct, group = torch.tensor([-1.0, -2.0], dtype=dtype), torch.tensor([1, 0]), torch.tensor([3, 3])
    matrix = value.unsqueeze(0)
    assert capo_advantage(value, correct, group).dtype == dtype
    assert capo_advantage(value, correct, group, surrogate="linear", norm="pairs").dtype == dtype
    assert grpo_advantage(value, group.to(torch.int32)).dtype == dtype
    assert sequence_logprob_mean(matrix, torch.ones(1, 2).bool())[0].dtype == dtype
    assert clipped_surrogate(matrix, matrix, matrix, dual_clip=3.0).dtype == dtype
    assert reduction_weights(torch.ones(1, 2, dtype=dtype), "constant-length", 5).dtype == dtype
    assert kl_penalty(matrix, matrix).dtype == dtype


def test_integer_rewards_and_no_rows_are_fine() -> None:
    assert grpo_advantage(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32
    nothing = torch.zeros(0)
    assert capo_advantage(nothing, nothing.bool(), nothing.long()).shape == (0,)
    assert grpo_advantage(nothing, nothing.long()).shape == (0,)
    assert capo_noise_mask(nothing, nothing.bool()).shape == (0,)
    assert reduction_weights(torch.zeros(0, 3), "token-mean").shape == (0, 3)


V2, B2, G2, M2 = torch.tensor([-1.0, -2.0]), torch.tensor([True, False]), torch.tensor([0, 0]), torch.ones(2, 3)
BAD = torch.tensor([-1.0, math.nan])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: capo_advantage(V2, B2, G2, tau=0.0), ConfigError, "tau=0.0"),
        (lambda: capo_advantage(V2, B2, G2, tau=math.nan), ConfigError, "tau=nan"),
        (lambda: capo_advantage(V2, B2, G2, tau=math.inf), ConfigError, "tau=inf"),
        (lambda: capo_advantage(V2, B2, G2, norm="mean"), ConfigError, "norm='mean'.*opposite_mean"),
        (lambda: capo_advantage(V2, B2, G2, surrogate="hinge"), ConfigError, "surrogate='hinge'.*logistic"),
        (lambda: capo_advantage(V2, B2[:1], G2), ShapeError, r"correct: shape \(1,\), expected \(2,\)"),
        (lambda: capo_advantage(V2, B2, G2.float()), ShapeError, "group: dtype torch.float32"),
        (lambda: capo_advantage(V2, B2, G2, valid=M2), ShapeError, "valid: shape"),
        (lambda: capo_advantage(BAD, B2, G2), ShapeError, "logprob_mean: nan in row 1.*valid=False"),
        (lambda: capo_advantage(V2, BAD, G2), ShapeError, "correct: nan in row 1"),
        (lambda: capo_advantage([-1.0], B2, G2), ShapeError, "logprob_mean: got list"),
        (lambda: capo_noise_mask(V2, B2, ref_high=0.0), ConfigError, "ref_high=0.0"),
        (lambda: capo_noise_mask(V2, B2, ref_low=-1.0), ConfigError, "ref_low=-1.0"),
        (lambda: capo_noise_mask(BAD, B2), ShapeError, "ref_logprob_mean: nan in row 1"),
        (lambda: grpo_advantage(-BAD / 0, G2), ShapeError, "reward: inf in row 0"),
        (lambda: grpo_advantage(V2, G2, eps=-1.0), ConfigError, "eps=-1.0"),
        (lambda: grpo_advantage(V2, G2, singleton="one"), ConfigError, "singleton='one'"),
        (lambda: grpo_advantage(M2, G2), ShapeError, r"reward: shape \(2, 3\)"),
        (lambda: clipped_surrogate(M2, M2[:, :2], M2), ShapeError, "old_logprobs: shape"),
        (lambda: clipped_surrogate(M2, M2, V2), ShapeError, "advantages: shape"),
        (lambda: clipped_surrogate(M2, M2, M2, clip_low=-0.1), ConfigError, "clip_low=-0.1"),
        (lambda: clipped_surrogate(M2, M2, M2, dual_clip=1.0), ConfigError, "dual_clip=1.0"),
        (lambda: kl_penalty(M2, M2, "k4"), ConfigError, "kind='k4'"),
        (lambda: kl_penalty(M2, V2), ShapeError, "ref_logprobs: shape"),
        (lambda: reduction_weights(M2, "mean"), ConfigError, "mode='mean'.*constant-length"),
        (lambda: reduction_weights(M2, "constant-length"), ConfigError, "length=None"),
        (lambda: reduction_weights(M2, "constant-length", 0), ConfigError, "length=0"),
        (lambda: reduction_weights(M2 / 2, "token-mean"), ShapeError, "mask: holds values other than 0 and 1"),
        (lambda: reduction_weights(V2, "token-mean"), ShapeError, r"mask: shape \(2,\)"),
        (lambda: sequence_logprob_mean(M2 / 0, M2.bool()), ShapeError, "logprobs: inf in row 0, column 0"),
        (lambda: sequence_logprob_mean(M2, M2[:1]), ShapeError, "mask: shape"),
    ],
)
def test_bad_input_is_named(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
