"""Token losses to minimise, their ratios and weights. Unreduced: `reduction_weights` says how tokens are averaged.

A non-finite log-prob is not an error here: it makes the loss non-finite, which a trainer must notice before it steps.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations.checks import (
    choice,
    finite_rows,
    flags,
    positive,
    real,
    same,
    tensor,
    token_mask,
    wide,
    within,
)
from capo_megatron.errors import ConfigError, ShapeError

LOG_RATIO_LIMIT = 20.0  # |lp - olp| is clamped here before exp, as verl does
SEQUENCE_LOG_RATIO_LIMIT = 10.0  # a response's mean log-ratio is clamped from above here, as verl does
KL_LIMIT = 10.0  # |k3| is clamped here, as verl does

KlKind = Literal["k1", "k2", "k3"]
ImportanceLevel = Literal["token", "sequence"]


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho = exp(clamp(lp - olp, -20, 20)), of the shape of `logprobs`; the gradient is 0 beyond the clamp."""
    _of_one_shape(logprobs, old_logprobs)
    return _ratio(logprobs, old_logprobs).to(logprobs.dtype)


def _of_one_shape(logprobs: Tensor, old_logprobs: Tensor) -> None:
    tensor("logprobs", logprobs)
    same("old_logprobs", old_logprobs, logprobs)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (wide(logprobs) - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def importance_weight(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    cap: float = 2.0,
    mask: Tensor | None = None,
    level: ImportanceLevel = "token",
) -> Tensor:
    """Truncated importance weights of tokens that an engine sampled, of the shape of `old_logprobs`.

    `old_logprobs` and `sampler_logprobs` [N, T] in nats: the same tokens, by the trainer and by the engine that sampled
    them, whose numerics differ, or whose weights are older. With d = old_logprobs - sampler_logprobs, a token's loss is
    multiplied with

        token      min(exp(clamp(d, -20, 20)), cap)
        sequence   min(exp(clamp(sum of d over its response, -20, 20)), cap), the same for every token of a response

    so that the gradient's expectation is that under the trainer's policy, up to the cap, which bounds its variance
    (truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456). Only the sequence's weight corrects for
    the tokens before a token, at the price of a variance that grows with length. `mask` [N, T]: elsewhere the weight is
    1, whatever stands there. cap=inf does not truncate. Raises ShapeError for non-finite log-probs.
    """
    positive("cap", cap)
    choice("level", level, ImportanceLevel)
    difference, keep = _off_policy(old_logprobs, sampler_logprobs, mask)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.where(keep, ratio.clamp(max=cap), 1.0).to(old_logprobs.dtype)


@torch.no_grad()
def within_importance_bound(
    old_logprobs: Tensor, sampler_logprobs: Tensor, bound: float, mask: Tensor | None = None
) -> Tensor:
    """[N] bool: responses that are neither `bound` times likelier nor `bound` times less likely to the trainer.

    The log-probs are those of `importance_weight`; a response is kept iff, with the sum over its tokens,

        |sum(old_logprobs - sampler_logprobs)| <= log(bound)

    An empty response is kept. Raises ConfigError unless bound > 1, ShapeError for non-finite log-probs.
    """
    if not bound > 1:
        raise ConfigError(f"bound={bound}: must be larger than 1, the ratio of an engine that is the policy.")
    difference, _ = _off_policy(old_logprobs, sampler_logprobs, mask)
    return difference.sum(dim=1).abs() <= math.log(bound)


def _off_policy(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """([N, T] old - sampler log-prob, 0.0 off the mask, [N, T] bool the mask)."""
    old, sampled = real("old_logprobs", old_logprobs, 2), real("sampler_logprobs", sampler_logprobs, 2)
    same("sampler_logprobs", sampler_logprobs, old_logprobs)
    keep = torch.ones_like(old, dtype=torch.bool) if mask is None else token_mask(mask, old)
    finite_rows("old_logprobs", old, keep)
    finite_rows("sampler_logprobs", sampled, keep)
    return torch.where(keep, old - sampled, 0.0), keep


# --- clipped surrogates -----------------------------------------------------------------------------------------------


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped loss per token, to minimise and unreduced, of the shape of `logprobs`.

    `logprobs`, `old_logprobs` [N, T] in nats, `advantages` [N, T] (or [N, 1]); only `logprobs` gets a gradient.

        loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));   where A < 0: loss = min(loss, -A dual_clip)

    The gradient is -A rho where the unclipped branch is active (ties included), else 0. A non-finite log-prob is not an
    error here: it makes the loss non-finite, which a trainer must notice before it steps.
    """
    _of_one_shape(logprobs, old_logprobs)
    ratio = _ratio(logprobs, old_logprobs)
    return clipped_ratio_loss(ratio, advantages, clip_low, clip_high, dual_clip).to(logprobs.dtype)


def clipped_ratio_loss(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """`clipped_surrogate` of a ratio that is computed already, e.g. by `simko_ratio`; of its shape and dtype.

    `ratio` [N, T], positive, with gradient; `advantages` [N, T] (or [N, 1]).
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ConfigError(f"clip_low={clip_low}, clip_high={clip_high}: both must be 0 or larger.")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip}: must be larger than 1, or None for no dual clip.")
    tensor("ratio", ratio)
    advantages = _advantages(advantages, ratio)
    plain = -advantages * ratio
    clipped = -advantages * ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    loss = torch.where(plain >= clipped, plain, clipped)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        loss = torch.where((advantages < 0) & (loss > ceiling), ceiling, loss)
    return loss.to(ratio.dtype)


def _advantages(advantages: Tensor, like: Tensor) -> Tensor:
    """`advantages`, detached. Raises ShapeError unless they are numbers, one per token or one per row."""
    tensor("advantages", advantages)
    if advantages.dtype == torch.bool or advantages.is_complex():
        raise ShapeError(f"advantages: dtype {advantages.dtype}, expected real numbers, of which some are negative.")
    if advantages.shape != (*like.shape[:-1], 1):
        same("advantages", advantages, like)
    return advantages.detach()


def gspo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    """GSPO's clipped loss per token, to minimise and unreduced, [N, T], 0.0 off the mask (arXiv 2507.18071).

    `logprobs`, `old_logprobs` [N, T] in nats, `advantages` [N, T] (or [N, 1]), `mask` [N, T] bool or 0/1; only
    `logprobs` gets a gradient. All tokens of a response have its ratio, the exponential of its mean log-ratio:

        s_i = exp(min(1/n_i sum_t (lp - olp), 10))
        loss = max(-A s_i, -A clip(s_i, 1 - clip_low, 1 + clip_high));   where A < 0: loss = min(loss, -A dual_clip)

    The gradient of a token's loss goes to its own log-prob alone: -A s_i where the unclipped branch is active, else 0,
    and 0 beyond the clamp. With `seq-mean-token-mean` weights and one advantage per response, loss and gradient are
    GSPO's; with other weights they are not. A row needs no other row. The paper has no dual clip.
    What stands off the mask is ignored; a non-finite log-prob on it makes the loss of its row non-finite.
    """
    value = real("logprobs", logprobs, 2)
    same("old_logprobs", old_logprobs, logprobs)
    keep = token_mask(mask, logprobs)
    advantages = _advantages(advantages, logprobs)
    gap = torch.where(keep, value - old_logprobs.detach(), 0.0)
    mean = gap.detach().sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (mean + (gap - gap.detach())).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    loss = clipped_ratio_loss(ratio, torch.where(keep, advantages, 0.0), clip_low, clip_high, dual_clip)
    return torch.where(keep, loss, 0.0).to(logprobs.dtype)


def simko_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    topk_logprobs: Tensor,
    selected: Tensor,
    correct: Tensor,
    alpha: float = 0.01,
) -> Tensor:
    """[N, T] SimKO's ratio: valued as `importance_ratio`, its gradient shared with the top K (arXiv 2510.14807).

    `logprobs`, `old_logprobs` [N, T] in nats; `topk_logprobs` [N, T, K] log-probs of the K most likely tokens under the
    current policy, with gradient; `selected` [N, T] from `simko_selected`; `correct` [N]; `alpha` in [0, 1]. With r the
    plain ratio, the gradient is on selected tokens of correct responses

        r ((1 - alpha) grad log p(sampled) + alpha / K sum_k grad log p_k)

    and r grad log p(sampled) elsewhere; 0 beyond the clamp of r. To be clipped by `clipped_ratio_loss`. (The released
    code also keeps the old top-K log-probs; they cancel.) SimKO's loss moreover multiplies the advantage of a selected
    token by 1.1 where it is negative and the token is the most likely one.
    """
    within("alpha", alpha, 0.0, 1.0)
    _of_one_shape(logprobs, old_logprobs)
    top = real("topk_logprobs", topk_logprobs, 3)
    if top.shape[:2] != logprobs.shape or top.shape[2] < 1:
        raise ShapeError(f"topk_logprobs: shape {tuple(top.shape)}, expected {(*logprobs.shape, 'K')} with K >= 1.")
    spread = flags("selected", selected, logprobs) & flags(
        "correct", correct, logprobs.new_empty(len(logprobs))
    ).unsqueeze(1)
    ratio = _ratio(logprobs, old_logprobs)
    constant = ratio.detach()
    spread = spread & ((logprobs - old_logprobs).detach().abs() <= LOG_RATIO_LIMIT)
    # A candidate without any probability has no gradient, and -inf less itself would be NaN.
    top = torch.where(spread.unsqueeze(2) & (top != -torch.inf), top, 0.0)
    # Both terms of the difference are 0 in value: only the gradient moves from the sampled token to the top K.
    moved = constant * (top - top.detach()).mean(dim=2) - (ratio - constant)
    return (ratio + torch.where(spread, alpha * moved, 0.0)).to(logprobs.dtype)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KlKind = "k3") -> Tensor:
    """Estimates of KL(current || reference) per token, of the shape of `logprobs`, with gradient.

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, where for k3 d is clamped to +-20 and
    the result to +-10 (Schulman's estimators; the clamps are verl's).
    """
    choice("kind", kind, KlKind)
    tensor("logprobs", logprobs)
    same("ref_logprobs", ref_logprobs, logprobs)
    gap = ref_logprobs.detach() - wide(logprobs)
    if kind == "k1":
        penalty = -gap
    elif kind == "k2":
        penalty = gap.square() / 2
    else:
        gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        penalty = (torch.expm1(gap) - gap).clamp(-KL_LIMIT, KL_LIMIT)
    return penalty.to(logprobs.dtype)
