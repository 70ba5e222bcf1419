"""Which tokens deserve more or less: SimKO's high-entropy tokens, SCAPO's tokens that a reworded prompt upsets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from capo_megatron.algorithms.equations.checks import (
    finite_rows,
    flags,
    float_dtype,
    group_index,
    real,
    token_mask,
    within,
)
from capo_megatron.algorithms.equations.sequences import row_quantile
from capo_megatron.errors import ConfigError, ShapeError


@torch.no_grad()
def simko_selected(entropy: Tensor, mask: Tensor, quantile: float = 0.8) -> Tensor:
    """[N, T] bool: tokens whose entropy is above the quantile of their own response (SimKO, arXiv 2510.14807).

    `entropy` [N, T] nats under the current policy, `mask` [N, T] bool or 0/1. The quantile is taken over the tokens on
    the mask and interpolated linearly; strictly above, so that a response of constant entropy has none selected.
    What stands off the mask is ignored. Raises ShapeError for a non-finite entropy on it; a loss that leaves a broken
    policy to whoever checks the loss hands in `entropy.nan_to_num()`.
    """
    within("quantile", quantile, 0.0, 1.0)
    value = real("entropy", entropy, 2)
    keep = token_mask(mask, value)
    finite_rows("entropy", value, keep)
    return keep & (value > row_quantile(value, keep, quantile).unsqueeze(1))


@torch.no_grad()
def scapo_credit(
    old_logprobs: Tensor,
    perturbed_logprobs: Tensor,
    mask: Tensor,
    group: Tensor,
    eps: float = 1e-6,
    available: Tensor | None = None,
) -> Tensor:
    """[N, T] what to add, times lambda, to the advantages: at most 0, low where a token is unstable (arXiv 2609.40360).

    `old_logprobs` [N, T] nats under the sampling policy; `perturbed_logprobs` [K, N, T] those of the same response
    tokens under the same policy after the k-th rewording of the prompt, in the same columns; `mask` [N, T] bool or
    0/1; `group` [N] any integer id. With p the probabilities of a token and z the standardisation over all response
    tokens of a group, (v - mean) / (std + eps) with the population's standard deviation:

        d^k = |p - p^k| / ((p + p^k) / 2) = 2 tanh(|log p - log p^k| / 2)      in [0, 2]
        u = z(1/K sum_k z(-d^k)),   credit = min(u, 0)                         SCAPO

    z is exactly 0 where the values of a group differ by no more than the rounding of the log-probs. 0.0 off the mask,
    where nothing matters. `available` [K, N] False: the k-th rewording is lacking there and enters no mean; a row
    without any has 0. Raises ShapeError for a non-finite log-prob on the mask.
    """
    if not eps >= 0:
        raise ConfigError(f"eps={eps}: must be 0 or larger.")
    old = real("old_logprobs", old_logprobs, 2)
    moved = real("perturbed_logprobs", perturbed_logprobs, 3)
    if moved.shape[1:] != old.shape:
        raise ShapeError(f"perturbed_logprobs: shape {tuple(moved.shape)}, expected {('K', *old.shape)}.")
    keep = token_mask(mask, old)
    ids = group_index(group, keep.any(dim=1))
    finite_rows("old_logprobs", old, keep)
    have = torch.ones(moved.shape[:2], dtype=torch.bool, device=old.device)
    if available is not None:
        have = flags("available", available, have)
    rounding = torch.finfo(float_dtype(old_logprobs, perturbed_logprobs)).eps
    total = torch.zeros_like(old, dtype=torch.float64)  # what cancels in a mean must leave nothing for z to blow up
    for index, (now, there) in enumerate(zip(moved, have, strict=True)):
        tokens = keep & there.unsqueeze(1)
        finite_rows(f"perturbed_logprobs[{index}]", now, tokens)
        drift = 2 * torch.tanh((old.double() - now.double()).abs() / 2)
        size = torch.where(tokens, torch.maximum(old.abs(), now.abs()), 0.0).double()
        total += _standardise(-drift, tokens, ids, eps, 2 * rounding * _group_max(size, ids))
    tokens = keep & have.any(dim=0).unsqueeze(1)
    mean = total / have.sum(dim=0).clamp(min=1).unsqueeze(1)
    credit = _standardise(mean, tokens, ids, eps, torch.full_like(_group_max(mean, ids), 1e-12))
    return credit.clamp(max=0.0).to(float_dtype(old_logprobs))


def _standardise(value: Tensor, tokens: Tensor, ids: Tensor, eps: float, slack: Tensor) -> Tensor:
    """[N, T] (value - mean) / (std + eps) over the tokens of each group; 0.0 elsewhere and in groups within `slack`."""
    high = _group_max(torch.where(tokens, value, -math.inf), ids)
    low = -_group_max(torch.where(tokens, -value, -math.inf), ids)
    count = _group_sum(tokens.to(value.dtype), ids).clamp(min=1)
    mean = _group_sum(torch.where(tokens, value, 0.0), ids) / count
    centred = torch.where(tokens, value - mean[ids].unsqueeze(1), 0.0)
    spread = (_group_sum(centred.square(), ids) / count).sqrt()
    varied = tokens & (high - low > slack)[ids].unsqueeze(1)
    return torch.where(varied, centred / (spread[ids].unsqueeze(1) + eps), 0.0)


def _group_sum(value: Tensor, ids: Tensor) -> Tensor:
    groups = int(ids.max()) + 1 if len(ids) else 0
    return value.new_zeros(groups).index_add(0, ids, value.sum(dim=1))


def _group_max(value: Tensor, ids: Tensor) -> Tensor:
    groups = int(ids.max()) + 1 if len(ids) else 0
    most = value.amax(dim=1) if value.shape[1] else value.new_full(value.shape[:1], -math.inf)
    return value.new_full((groups,), -math.inf).scatter_reduce(0, ids, most, "amax")
