"""The shared maths, one function per named equation. Plain tensors in, plain tensors out: usable from any trainer.

Every function keeps the floating dtype it is given (half precisions are computed in float32 and rounded back, integer
rewards become torch's default dtype), works on any device, and checks what it is handed. Symbols: R reward, `olp` and
`lp` log-probs of a token under the sampling and the current policy, m response mask, n_i response length, G group size.

Advantages, weights and masks are constants: they never carry a gradient. Errors: `ShapeError` for a tensor of the wrong
type, shape, device or content (non-finite values are named by row), `ConfigError` for an option out of range.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from capo_megatron.errors import ConfigError, ShapeError

LOG_RATIO_LIMIT = 20.0  # |lp - olp| is clamped here before exp, as verl does
KL_LIMIT = 10.0  # |k3| is clamped here, as verl does
PAIRS_AT_ONCE = 1 << 22  # pairs whose weights exist at one time: bounds the memory of `capo_advantage`

Surrogate = Literal["logistic", "linear"]
Norm = Literal["sum", "group", "opposite_mean", "pairs"]
Singleton = Literal["zero", "raw"]
ReductionMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"]
KlKind = Literal["k1", "k2", "k3"]


# --- advantages ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def capo_advantage(
    logprob_mean: Tensor,
    correct: Tensor,
    group: Tensor,
    tau: float = 0.6,
    surrogate: Surrogate = "logistic",
    norm: Norm = "sum",
    inv_tau: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    """[N] calibration-aware advantages from all (correct, wrong) pairs inside each group.

    `logprob_mean` [N] mean log-prob per token in nats; `correct` [N] (bool, or numbers of which > 0.5 is correct);
    `group` [N] any integer id, rows of a group anywhere; `valid` [N] False: as if the row were absent, its advantage
    is 0 (e.g. an empty response, which has no mean log-prob).

        w_ij = (1/tau) sigmoid(-(logprob_mean_i - logprob_mean_j) / tau)      i correct, j wrong
        A_i = + sum_j w_ij,   A_j = - sum_i w_ij                              (CAPO, arXiv 2604.12632)

    which is -d/dlogprob_mean of the pairwise loss sum_ij log(1 + exp(-(logprob_mean_i - logprob_mean_j) / tau)). A
    group's advantages sum to 0; a group of one class gets 0. `inv_tau=False` leaves the factor 1/tau out. The linear
    surrogate has w_ij = 1 whatever `tau`: with norm="group" it is Dr.GRPO's R - mean(R). `norm` divides by 1 (sum), G
    (group), the number of partners (opposite_mean), or n_correct * n_wrong (pairs), counting valid rows only.
    Memory does not grow with N^2: pairs are formed in blocks.
    """
    _choice("surrogate", surrogate, Surrogate)
    _choice("norm", norm, Norm)
    _positive("tau", tau)
    if math.isinf(tau):
        raise ConfigError("tau=inf: must be finite; surrogate='linear' weighs all pairs alike.")
    score = _real("logprob_mean", logprob_mean, 1)
    right = _flags("correct", correct, score)
    member = torch.ones_like(right) if valid is None else _flags("valid", valid, score)
    ids = _group_index(group, score)
    _finite_rows("logprob_mean", score, member, "Rows without a log-prob need valid=False.")
    winners, losers = right & member, ~right & member
    groups = int(ids.max()) + 1 if len(ids) else 0
    n_right = torch.bincount(ids[winners], minlength=groups)[ids]
    n_wrong = torch.bincount(ids[losers], minlength=groups)[ids]
    if surrogate == "linear":
        total = torch.where(winners, n_wrong, torch.where(losers, -n_right, 0)).to(score.dtype)
    else:
        total = _pair_sums(score, ids, winners, losers, tau)
        total = total / tau if inv_tau else total
    divisor = {
        "sum": torch.ones_like(n_right),
        "group": n_right + n_wrong,
        "opposite_mean": torch.where(right, n_wrong, n_right),
        "pairs": n_right * n_wrong,
    }[norm]
    return (total / divisor.clamp(min=1)).to(_dtype(logprob_mean))


def _pair_sums(score: Tensor, ids: Tensor, winners: Tensor, losers: Tensor, tau: float) -> Tensor:
    """[N] sums of sigmoid(-(score_i - score_j) / tau) over each row's partners: + for winners, - for losers."""
    wrong = losers.nonzero().squeeze(1)
    wrong = wrong[torch.argsort(ids[wrong], stable=True)]
    per_group = torch.bincount(ids[wrong], minlength=int(ids.max()) + 1 if len(ids) else 0)
    first_of_group = per_group.cumsum(0) - per_group
    right = winners.nonzero().squeeze(1)
    partners = per_group[ids[right]]
    blocks = torch.bincount(partners.cumsum(0) // PAIRS_AT_ONCE).tolist()
    total = torch.zeros_like(score)
    for rows, count in zip(right.split(blocks), partners.split(blocks), strict=True):
        left = rows.repeat_interleave(count)
        rank = torch.arange(len(left), device=score.device) - (count.cumsum(0) - count).repeat_interleave(count)
        other = wrong[first_of_group[ids[left]] + rank]
        weight = torch.sigmoid((score[other] - score[left]) / tau)
        total.index_add_(0, left, weight)
        total.index_add_(0, other, weight, alpha=-1)
    return total


@torch.no_grad()
def capo_noise_mask(ref_logprob_mean: Tensor, correct: Tensor, ref_high: float = 2.5, ref_low: float = 1.05) -> Tensor:
    """[N] bool, True = keep: answers whose verdict the reference model does not find implausible.

    `ref_logprob_mean` [N] mean log-prob per token under the frozen reference model, `correct` [N]. With the reference
    perplexity PPL = exp(-ref_logprob_mean), keep a correct answer iff PPL <= ref_high and a wrong one iff
    PPL >= ref_low (CAPO's noise mask, arXiv 2604.12632). Compared as logarithms, so that PPL cannot overflow;
    perplexities that differ from a threshold by one rounding unit of the dtype count as equal, and equality keeps.
    """
    _positive("ref_high", ref_high)
    _positive("ref_low", ref_low)
    score = _real("ref_logprob_mean", ref_logprob_mean, 1)
    right = _flags("correct", correct, score)
    _finite_rows("ref_logprob_mean", score, torch.ones_like(right))
    slack = torch.finfo(score.dtype).eps
    low_enough = -score <= math.log(ref_high) + slack
    high_enough = -score >= math.log(ref_low) - slack
    return torch.where(right, low_enough, high_enough)


@torch.no_grad()
def grpo_advantage(
    reward: Tensor, group: Tensor, eps: float = 1e-6, scale_by_std: bool = True, singleton: Singleton = "zero"
) -> Tensor:
    """[N] group-relative advantages A_i = (R_i - mean_g) / (std_g + eps).

    `reward` [N], `group` [N] any integer id, rows of a group anywhere. The standard deviation divides by G - 1.
    GRPO (arXiv 2402.03300); with scale_by_std=False the division is left out: Dr.GRPO (arXiv 2503.20783). A group whose
    rewards are all equal gets exactly 0. A group of one gets 0, or with singleton="raw" verl's R / (1 + eps).
    """
    _choice("singleton", singleton, Singleton)
    if not eps >= 0:
        raise ConfigError(f"eps={eps}: must be 0 or larger.")
    value = _real("reward", reward, 1)
    ids = _group_index(group, value)
    _finite_rows("reward", value, torch.ones_like(ids, dtype=torch.bool))
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
    return advantage.to(_dtype(reward))


def _group_sum(value: Tensor, ids: Tensor, size: Tensor) -> Tensor:
    return value.new_zeros(size.shape).index_add(0, ids, value)


# --- losses -------------------------------------------------------------------------------------------------------


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho = exp(clamp(lp - olp, -20, 20)), of the shape of `logprobs`; the gradient is 0 beyond the clamp."""
    _same("old_logprobs", old_logprobs, logprobs)
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


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
    if not (clip_low >= 0 and clip_high >= 0):
        raise ConfigError(f"clip_low={clip_low}, clip_high={clip_high}: both must be 0 or larger.")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip}: must be larger than 1, or None for no dual clip.")
    if advantages.shape != (*logprobs.shape[:-1], 1):
        _same("advantages", advantages, logprobs)
    advantages = advantages.detach()
    ratio = importance_ratio(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    loss = torch.where(plain >= clipped, plain, clipped)
    if dual_clip is None:
        return loss
    ceiling = -advantages * dual_clip
    return torch.where((advantages < 0) & (loss > ceiling), ceiling, loss)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KlKind = "k3") -> Tensor:
    """Estimates of KL(current || reference) per token, of the shape of `logprobs`, with gradient.

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, where for k3 d is clamped to +-20 and
    the result to +-10 (Schulman's estimators; the clamps are verl's).
    """
    _choice("kind", kind, KlKind)
    _same("ref_logprobs", ref_logprobs, logprobs)
    gap = ref_logprobs.detach() - logprobs
    if kind == "k1":
        return -gap
    if kind == "k2":
        return gap.square() / 2
    gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(gap) - gap).clamp(-KL_LIMIT, KL_LIMIT)


# --- sequences and reductions ---------------------------------------------------------------------------------------


def sequence_logprob_mean(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-prob per response token ([N], nats), and which rows have one ([N] bool: not empty).

    `logprobs` [N, T], `mask` [N, T] bool or 0/1. Empty rows hold 0.0; what stands off the mask is ignored, whatever it
    is. exp(-mean) is the perplexity of the response. Differentiable in `logprobs`.
    """
    value = _real("logprobs", logprobs, 2)
    keep = _mask(mask, value)
    inside = torch.where(keep, value, 0.0)
    _finite_rows("logprobs", inside.detach(), keep)
    count = keep.sum(dim=1)
    return (inside.sum(dim=1) / count.clamp(min=1)).to(_dtype(logprobs)), count > 0


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
    _choice("mode", mode, ReductionMode)
    keep = _mask(mask, None)
    dtype = _dtype(mask)
    if mode == "constant-length":
        if length is None or not length > 0:
            raise ConfigError(f"length={length}: mode 'constant-length' needs the response budget in tokens.")
        return keep.to(dtype) / (max(len(keep), 1) * length)
    count = keep.sum(dim=1, keepdim=True)
    answered = (count > 0).sum()
    denominator = {"token-mean": count.sum(), "seq-mean-token-mean": count * answered, "seq-mean-token-sum": answered}
    return keep.to(dtype) / denominator[mode].clamp(min=1)


# --- checks ---------------------------------------------------------------------------------------------------------


def _dtype(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.get_default_dtype()


def _tensor(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor.")


def _real(name: str, value: Tensor, ndim: int) -> Tensor:
    _tensor(name, value)
    if value.ndim != ndim:
        raise ShapeError(f"{name}: shape {tuple(value.shape)}, expected {ndim} dimension(s).")
    if value.is_complex():
        raise ShapeError(f"{name}: dtype {value.dtype}, expected real numbers.")
    return value.to(torch.promote_types(_dtype(value), torch.float32))


def _same(name: str, value: Tensor, like: Tensor) -> None:
    _tensor(name, value)
    if value.shape != like.shape:
        raise ShapeError(f"{name}: shape {tuple(value.shape)}, expected {tuple(like.shape)}.")
    if value.device != like.device:
        raise ShapeError(f"{name}: on {value.device}, expected {like.device} like the other tensors.")


def _flags(name: str, value: Tensor, like: Tensor) -> Tensor:
    _same(name, value, like)
    if value.dtype == torch.bool:
        return value
    _finite_rows(name, value, torch.ones_like(value, dtype=torch.bool))
    return value > 0.5


def _mask(mask: Tensor, like: Tensor | None) -> Tensor:
    _tensor("mask", mask)
    if like is not None:
        _same("mask", mask, like)
    if mask.ndim != 2:
        raise ShapeError(f"mask: shape {tuple(mask.shape)}, expected [N, T].")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ShapeError("mask: holds values other than 0 and 1.")
    return mask.bool()


def _group_index(group: Tensor, like: Tensor) -> Tensor:
    _same("group", group, like)
    if group.is_floating_point() or group.is_complex():
        raise ShapeError(f"group: dtype {group.dtype}, expected integer ids.")
    return torch.unique(group.long(), return_inverse=True)[1]


def _finite_rows(name: str, value: Tensor, rows: Tensor, advice: str = "") -> None:
    bad = ~value.isfinite() & rows
    if bad.any():
        index = bad.nonzero()[0]
        place = f"row {int(index[0])}" + (f", column {int(index[1])}" if value.ndim == 2 else "")
        raise ShapeError(f"{name}: {value[tuple(index)].item()} in {place}; it must be finite. {advice}".rstrip())


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}={value}: must be larger than 0.")


def _choice(name: str, value: str, literal: Any) -> None:
    if value not in get_args(literal):
        raise ConfigError(f"{name}={value!r}: unknown. Choose one of {', '.join(get_args(literal))}.")
