"""What the equations accept, keep and refuse."""

from __future__ import annotations

import math

import pytest
import torch

from capo_megatron.algorithms.equations import (
    capo_advantage,
    capo_noise_mask,
    cde_shaped_reward,
    clipped_ratio_loss,
    clipped_surrogate,
    codapo_select,
    codapo_weight,
    dapo_keep_group,
    dapo_overlong_penalty,
    dcpo_confidence_reward,
    dcpo_targets,
    grpo_advantage,
    gspo_surrogate,
    importance_weight,
    kl_penalty,
    reduction_weights,
    scapo_credit,
    sequence_logprob_mean,
    simko_ratio,
    simko_selected,
    within_importance_bound,
)
from capo_megatron.algorithms.equations.checks import same
from capo_megatron.errors import ConfigError, ShapeError

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
    assert capo_advantage(value, correct, group, norm="mass", weight_floor=0.5).dtype == dtype
    assert codapo_weight(value, correct, group).dtype == dtype
    assert cde_shaped_reward(correct, value, 1.0).dtype == dtype  # an integer reward takes the log-probs' dtype
    assert dapo_overlong_penalty(-value, 4, 2).dtype == dtype
    assert dcpo_targets(correct.to(dtype), group).dtype == dtype
    assert dcpo_confidence_reward(-value / 2, value).dtype == dtype
    ones = torch.ones(1, 2).bool()
    assert gspo_surrogate(matrix, matrix, matrix, ones, dual_clip=3.0).dtype == dtype
    assert simko_ratio(matrix, matrix, matrix.unsqueeze(2), ones, ones[0, :1]).dtype == dtype
    assert scapo_credit(matrix, matrix.unsqueeze(0), ones, group[:1]).dtype == dtype
    assert importance_weight(matrix, matrix, 2.0).dtype == dtype


def test_integer_rewards_and_no_rows_are_fine() -> None:
    assert grpo_advantage(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32
    nothing = torch.zeros(0)
    assert capo_advantage(nothing, nothing.bool(), nothing.long()).shape == (0,)
    assert grpo_advantage(nothing, nothing.long()).shape == (0,)
    assert capo_noise_mask(nothing, nothing.bool()).shape == (0,)
    assert reduction_weights(torch.zeros(0, 3), "token-mean").shape == (0, 3)
    assert capo_advantage(nothing, nothing.bool(), nothing.long(), norm="mass").shape == (0,)
    assert dapo_keep_group(nothing, nothing.long()).shape == (0,)
    assert codapo_weight(nothing, nothing, nothing.long()).shape == (0,)
    assert dcpo_targets(nothing, nothing.long()).shape == (0,)
    for rows, columns in ((0, 3), (2, 0)):
        empty = torch.zeros(rows, columns)
        assert gspo_surrogate(empty, empty, empty, empty).shape == (rows, columns)
        assert simko_selected(empty, empty).shape == (rows, columns)
        assert simko_ratio(empty, empty, empty.unsqueeze(2), empty, torch.ones(rows)).shape == (rows, columns)
        assert scapo_credit(empty, empty.unsqueeze(0), empty, torch.zeros(rows).long()).shape == (rows, columns)


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
        (lambda: clipped_surrogate(M2, M2, M2.bool()), ShapeError, "advantages: dtype torch.bool, expected real numb"),
        (lambda: clipped_surrogate(M2, M2, M2[:, :1].numpy()), ShapeError, "advantages: got ndarray"),
        (lambda: clipped_surrogate(M2.numpy(), M2, M2), ShapeError, "logprobs: got ndarray, expected a torch.Tensor"),
        (lambda: clipped_ratio_loss(M2.numpy(), M2), ShapeError, "ratio: got ndarray"),
        (lambda: gspo_surrogate(M2, M2, M2.bool(), M2), ShapeError, "advantages: dtype torch.bool"),
        (lambda: kl_penalty(M2.numpy(), M2), ShapeError, "logprobs: got ndarray"),
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
        (
            lambda: capo_advantage(V2, B2, G2, weight_floor=1.5),
            ConfigError,
            "weight_floor=1.5: must lie between 0 and 1",
        ),
        (lambda: capo_advantage(V2, B2, G2, norm="mass", mass_exponent=-1.0), ConfigError, "mass_exponent=-1.0"),
        (lambda: dapo_overlong_penalty(BAD, 200, 50), ShapeError, "length: nan in row 1"),
        (lambda: dapo_overlong_penalty(V2, 200, 0), ConfigError, "buffer=0"),
        (lambda: dapo_overlong_penalty(V2, math.inf, math.inf), ConfigError, "buffer=inf: must be finite"),
        (lambda: dapo_overlong_penalty(V2, 200, 201), ConfigError, "buffer=201.*max_length=200"),
        (lambda: dapo_overlong_penalty(V2, 200, 50, -1.0), ConfigError, "factor=-1.0"),
        (lambda: dapo_keep_group(V2, G2.float()), ShapeError, "group: dtype"),
        (lambda: codapo_weight(BAD, B2, G2), ShapeError, "logprob_mean: nan in row 1.*valid=False"),
        (lambda: codapo_weight(V2, B2, G2, offset=-0.1), ConfigError, "offset=-0.1"),
        (lambda: codapo_select(BAD), ShapeError, "weight_per_group: nan in row 1"),
        (lambda: codapo_select(V2, percentile=75), ConfigError, "percentile=75: must lie between 0 and 1"),
        (lambda: codapo_select(V2, repeat=0), ConfigError, "repeat=0"),
        (lambda: codapo_select(V2, repeat=2.5), ConfigError, "repeat=2.5: must be an integer, 1 or larger"),
        (lambda: codapo_select(V2, repeat=math.inf), ConfigError, "repeat=inf: must be an integer"),
        (lambda: cde_shaped_reward(BAD, V2, 1.0), ShapeError, "reward: nan in row 1"),
        (lambda: cde_shaped_reward(V2, BAD, 1.0), ShapeError, "logprob_mean: nan in row 1.*valid=False"),
        (lambda: cde_shaped_reward(V2, V2, -1.0), ConfigError, "omega=-1.0"),
        (lambda: cde_shaped_reward(V2, V2, 1.0, kappa=0.0), ConfigError, "kappa=0.0"),
        (lambda: cde_shaped_reward(V2, V2[:1], 1.0), ShapeError, "logprob_mean: shape"),
        (lambda: dcpo_targets(B2, G2, 2.0), ConfigError, "group_share=2.0"),
        (lambda: dcpo_confidence_reward(V2, V2, "cubic"), ConfigError, "distance='cubic'.*square"),
        (lambda: dcpo_confidence_reward(BAD, V2), ShapeError, "confidence: nan in row 1.*-1"),
        (lambda: dcpo_confidence_reward(-85 * V2, V2), ShapeError, "confidence: 85.0 in row 0"),
        (
            lambda: dcpo_confidence_reward(V2, V2),
            ShapeError,
            "confidence: -2.0 in row 1; it must lie in .0, 1., or be -1",
        ),
        (lambda: dcpo_confidence_reward(V2 / 2, V2), ShapeError, "confidence: -0.5 in row 0"),
        (lambda: dcpo_confidence_reward(V2, V2[:1]), ShapeError, "target: shape"),
        (lambda: simko_selected(M2 / 0, M2), ShapeError, "entropy: inf in row 0, column 0"),
        (lambda: simko_selected(M2, M2, 80), ConfigError, "quantile=80"),
        (lambda: simko_ratio(M2, M2, M2, M2, B2), ShapeError, r"topk_logprobs: shape \(2, 3\)"),
        (lambda: simko_ratio(M2, M2, M2[:, :, None], M2[:1], B2), ShapeError, "selected: shape"),
        (lambda: simko_ratio(M2, M2, M2[:, :, None], M2, B2[:1]), ShapeError, "correct: shape"),
        (lambda: simko_ratio(M2, M2, M2[:, :0, None], M2, B2), ShapeError, "topk_logprobs: shape.*'K'"),
        (lambda: simko_ratio(M2, M2, M2[:, :, None], M2, B2, 1.5), ConfigError, "alpha=1.5"),
        (lambda: simko_ratio(M2.numpy(), M2, M2[:, :, None], M2, B2), ShapeError, "logprobs: got ndarray"),
        (lambda: simko_ratio(M2, M2.numpy(), M2[:, :, None], M2, B2), ShapeError, "old_logprobs: got ndarray"),
        (lambda: simko_ratio(M2, M2, M2[:, :, None].numpy(), M2, B2), ShapeError, "topk_logprobs: got ndarray"),
        (lambda: same("x", M2, M2.numpy()), ShapeError, "what x belongs to: got ndarray, expected a torch.Tensor"),
        (lambda: gspo_surrogate(M2, M2, V2, M2), ShapeError, "advantages: shape"),
        (lambda: gspo_surrogate(M2, M2, M2, M2[:1]), ShapeError, "mask: shape"),
        (lambda: gspo_surrogate(M2, M2, M2, M2, dual_clip=0.5), ConfigError, "dual_clip=0.5"),
        (lambda: clipped_ratio_loss(M2, V2), ShapeError, "advantages: shape"),
        (lambda: importance_weight(M2, M2 / 0, 2.0), ShapeError, "sampler_logprobs: inf in row 0, column 0"),
        (lambda: importance_weight(M2, M2, 0.0), ConfigError, "cap=0.0"),
        (lambda: importance_weight(M2, M2, 2.0, level="row"), ConfigError, "level='row': unknown. Choose one of token"),
        (lambda: within_importance_bound(M2, M2, 1.0), ConfigError, "bound=1.0: must be larger than 1"),
        (lambda: within_importance_bound(M2 / 0, M2, 2.0), ShapeError, "old_logprobs: inf in row 0, column 0"),
        (lambda: scapo_credit(M2 / 0, M2[None], M2, G2), ShapeError, "old_logprobs: inf in row 0, column 0"),
        (
            lambda: scapo_credit(M2, M2[None] / 0, M2, G2),
            ShapeError,
            r"perturbed_logprobs\[0\]: inf in row 0, column 0",
        ),
        (lambda: scapo_credit(M2, M2, M2, G2), ShapeError, "perturbed_logprobs: shape"),
        (lambda: scapo_credit(M2, M2[None], M2, G2[:1]), ShapeError, "group: shape"),
        (lambda: scapo_credit(M2, M2[None], M2, G2, available=B2[None, :1]), ShapeError, "available: shape"),
        (lambda: scapo_credit(M2, M2[None], M2, G2, eps=-1.0), ConfigError, "eps=-1.0"),
    ],
)
def test_bad_input_is_named(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
