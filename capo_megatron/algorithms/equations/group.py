"""Group statistics: GRPO's advantages, DAPO's filter, CoDaPO's weights and selection."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations.checks import (
    choice,
    finite_rows,
    flags,
    float_dtype,
    group_index,
    members,
    real,
    within,
)
from capo_megatron.algorithms.equations.sequences import row_quantile
from capo_megatron.errors import ConfigError

Singleton = Literal["zero", "raw"]


@torch.no_grad()
def grpo_advantage(
    reward: Tensor, group: Tensor, eps: float = 1e-6, scale_by_std: bool = True, singleton: Singleton = "zero"
) -> Tensor:
    """[N] group-relative advantages A_i = (R_i - mean_g) / (std_g + eps).

    `reward` [N], `group` [N] any integer id, rows of a group anywhere. The standard deviation divides by G - 1.
    GRPO (arXiv 2402.03300); with scale_by_std=False the division is left out: Dr.GRPO (arXiv 2503.20783). A group whose
    rewards are all equal gets exactly 0. A group of one gets 0, or with singleton="raw" verl's R / (1 + eps).
    """
    choice("singleton", singleton, Singleton)
    if not eps >= 0:
        raise ConfigError(f"eps={eps}: must be 0 or larger.")
    value = real("reward", reward, 1)
    ids = group_index(group, value)
    finite_rows("reward", value, torch.ones_like(ids, dtype=torch.bool))
    size = torch.bincount(ids)
    low = value.new_full(size.shape, math.inf).scatter_reduce(0, ids, value, "amin")
    high = value.new_full(size.shape, -math.inf).scatter_reduce(0, ids, value, "amax")
    above = value - low[ids]  # from the group's lowest reward: no cancellation when rewards sit on a large offset
    centred = above - (_group_sum(above, ids, size) / size)[ids]
    advantage = centred
    if scale_by_std:
        variance = _group_sum(centred.square(), ids, size) / (size - 1).clamp(min=1)
        advantage = centred / (variance.sqrt()[ids] + eps)
    advantage = torch.where((low == high)[ids], 0.0, advantage)
    if singleton == "raw":
        advantage = torch.where(size[ids] == 1, value / (1 + eps) if scale_by_std else value, advantage)
    return advantage.to(float_dtype(reward))


@torch.no_grad()
def dapo_keep_group(correct: Tensor, group: Tensor, valid: Tensor | None = None) -> Tensor:
    """[N] bool: the row's group has correct and wrong answers (DAPO's dynamic sampling, arXiv 2503.14476).

    `correct` [N] is the verdict, before any shaping: a length penalty would make every group look mixed. `group` [N]
    any integer id. A group of one is never mixed. `valid` [N] False: as if the row were absent, its entry is False.
    """
    like = real("correct", correct, 1)
    right, member, ids = flags("correct", correct, like), members(valid, like), group_index(group, like)
    groups = int(ids.max()) + 1 if len(ids) else 0
    n_right, n_wrong = (torch.bincount(ids[rows & member], minlength=groups) for rows in (right, ~right))
    return ((n_right > 0) & (n_wrong > 0))[ids] & member


@torch.no_grad()
def codapo_weight(
    logprob_mean: Tensor, correct: Tensor, group: Tensor, offset: float = 0.1, valid: Tensor | None = None
) -> Tensor:
    """[N] CoDaPO's weight of the row's group, to be multiplied with GRPO's advantage (arXiv 2606.07950).

    `logprob_mean` [N] mean log-prob per token in nats under the sampling policy, `correct` [N], `group` [N] any
    integer id. With p the share of correct answers of the group and c its confidence:

        v = c * 4 p (1 - p) + offset,   c = exp(mean_i logprob_mean_i)

    `valid` [N] False: the row has no mean log-prob (an empty response) and is left out of c; its verdict still counts
    in p, as its reward does in the group's mean. (The released code takes such a row for one of confidence 1.) A group
    without any valid row has c = 0. `correct` is the verdict, not a shaped reward.
    """
    if not (offset >= 0 and math.isfinite(offset)):
        raise ConfigError(f"offset={offset}: must be 0 or larger, and finite.")
    score = real("logprob_mean", logprob_mean, 1)
    right, member, ids = flags("correct", correct, score), members(valid, score), group_index(group, score)
    finite_rows("logprob_mean", score, member, "Rows without a log-prob need valid=False.")
    size = torch.bincount(ids)
    share = _group_sum(right.to(score.dtype), ids, size) / size
    answered = _group_sum(member.to(score.dtype), ids, size)
    mean = _group_sum(torch.where(member, score, 0.0), ids, size) / answered.clamp(min=1)
    confidence = torch.where(answered > 0, mean.exp(), 0.0)
    return (confidence * 4 * share * (1 - share) + offset)[ids].to(float_dtype(logprob_mean))


@torch.no_grad()
def codapo_select(weight_per_group: Tensor, percentile: float = 0.75, repeat: int = 4) -> Tensor:
    """[P] int64: which group each place of CoDaPO's refocused batch repeats (arXiv 2606.07950).

    `weight_per_group` [P] one weight per group, in batch order (`codapo_weight` of one row each). Selected are the
    groups whose weight reaches the linearly interpolated `percentile` (a share, in [0, 1]) of all weights; each is
    repeated `repeat` times, in batch order, over and over until P places are filled. Ties at the threshold are all
    selected, so that the last of them may find no place. Every copy is a group of its own.
    """
    within("percentile", percentile, 0.0, 1.0)
    if not (repeat >= 1 and float(repeat).is_integer()):
        raise ConfigError(f"repeat={repeat}: must be an integer, 1 or larger.")
    weight = real("weight_per_group", weight_per_group, 1)
    every = torch.ones_like(weight, dtype=torch.bool)
    finite_rows("weight_per_group", weight, every)
    threshold = row_quantile(weight.unsqueeze(0), every.unsqueeze(0), percentile)
    selected = (weight >= threshold).nonzero().squeeze(1).repeat_interleave(int(repeat))
    return selected[torch.arange(len(weight), device=weight.device) % max(len(selected), 1)]


def _group_sum(value: Tensor, ids: Tensor, size: Tensor) -> Tensor:
    return value.new_zeros(size.shape).index_add(0, ids, value)
