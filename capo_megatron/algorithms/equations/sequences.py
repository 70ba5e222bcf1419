"""Means over responses, the weights of a reduction, quantiles within a response."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations.checks import choice, finite_rows, float_dtype, real, token_mask
from capo_megatron.errors import ConfigError

ReductionMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"]


def sequence_logprob_mean(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-prob per response token ([N], nats), and which rows have one ([N] bool: not empty).

    `logprobs` [N, T], `mask` [N, T] bool or 0/1. Empty rows hold 0.0; what stands off the mask is ignored, whatever it
    is. exp(-mean) is the perplexity of the response. Differentiable in `logprobs`.
    """
    value = real("logprobs", logprobs, 2)
    keep = token_mask(mask, value)
    inside = torch.where(keep, value, 0.0)
    finite_rows("logprobs", inside.detach(), keep)
    count = keep.sum(dim=1)
    return (inside.sum(dim=1) / count.clamp(min=1)).to(float_dtype(logprobs)), count > 0


@torch.no_grad()
def reduction_weights(mask: Tensor, mode: ReductionMode, length: int | None = None) -> Tensor:
    """[N, T] weights: their sum-product with an unreduced token loss is the loss of the mini-batch.

    `mask` [N, T] bool or 0/1; the weights are 0.0 where it is. B rows, of which B' are not empty, n_i tokens in row i:

        token-mean             1 / sum(n)        every token counts the same
        seq-mean-token-mean    1 / (n_i B')      every response counts the same (GRPO's paper)
        seq-mean-token-sum     1 / B'
        constant-length        1 / (B length)    Dr.GRPO; `length` is the response budget, and required

    A floating mask gives its dtype, any other torch's default. `length` is unused in the first three modes.
    """
    choice("mode", mode, ReductionMode)
    keep = token_mask(mask, None)
    dtype = float_dtype(mask)
    if mode == "constant-length":
        if length is None or not length > 0:
            raise ConfigError(f"length={length}: mode 'constant-length' needs the response budget in tokens.")
        return keep.to(dtype) / (max(len(keep), 1) * length)
    count = keep.sum(dim=1, keepdim=True)
    answered = (count > 0).sum()
    denominator = {"token-mean": count.sum(), "seq-mean-token-mean": count * answered, "seq-mean-token-sum": answered}
    return keep.to(dtype) / denominator[mode].clamp(min=1)


def row_quantile(value: Tensor, keep: Tensor, quantile: float) -> Tensor:
    """[N] quantiles of each row's kept entries ([N, T]), interpolated linearly; rows without any are not finite."""
    if value.shape[1] == 0:
        return value.new_full(value.shape[:1], torch.inf)
    ordered = torch.where(keep, value, torch.inf).sort(dim=1).values
    # Rounded, so that a rank that is an integer on paper (0.55 of 20) hits its entry and not the next one's side.
    rank = ((keep.sum(dim=1, keepdim=True) - 1).clamp(min=0).double() * quantile).round(decimals=9)
    low, high = (ordered.gather(1, end.long()) for end in (rank.floor(), rank.ceil()))
    between = low + (high - low) * (rank - rank.floor()).to(value.dtype)
    return torch.minimum(between, high).squeeze(1)
