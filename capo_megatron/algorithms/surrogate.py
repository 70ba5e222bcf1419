"""What the algorithms share: the clipped loss with optional KL and entropy terms, its reduction, and who is counted.

An algorithm's config inherits `SurrogateConfig`; `assemble` turns it and an estimator into a `seams.Algorithm`. A new
surrogate (a sequence ratio, say) is one more PolicyLoss handed to `assemble`, which wraps it in the same extra terms.

Rows that are not *counted* (the verdict says nothing, or truncated="drop" and the response was cut) are in no group
statistic, no loss and no denominator. Rows that a TokenMask removes have advantage 0 and stay in every denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations import (
    KlKind,
    ReductionMode,
    clipped_surrogate,
    importance_ratio,
    kl_penalty,
    reduction_weights,
)
from capo_megatron.errors import ConfigError, ShapeError, TrainingError
from capo_megatron.seams import AdvantageEstimator, Algorithm, PolicyLoss, Signal, Stateful, TokenMask
from capo_megatron.types import PolicyOutputs, RolloutBatch, TokenLoss, TrainBatch

Truncated = Literal["keep", "drop", "mask_loss"]


@dataclass(frozen=True, kw_only=True)
class SurrogateConfig:
    """Options of the clipped loss that every algorithm has."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}  # an unknown key is an error

    reduction: ReductionMode = "seq-mean-token-mean"
    length: int | None = None  # response budget in tokens; required by, and only for, reduction=constant-length
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float | None = None  # c > 1 bounds the loss at -A c where A < 0 (verl: 3.0); None = off
    beta: float = 0.0  # coefficient of the KL term to the reference model; > 0 costs a reference pass
    kl: KlKind = "k3"
    entropy_coef: float = 0.0  # coefficient of the entropy bonus; > 0 computes entropies with gradient
    truncated: Truncated = "keep"  # drop: out of statistics, loss and denominators; mask_loss: out of the loss only


def assemble(
    name: str,
    config: SurrogateConfig,
    estimator: AdvantageEstimator,
    *,
    loss: PolicyLoss | None = None,
    masks: tuple[TokenMask, ...] = (),
    needs: frozenset[Signal] = frozenset(),
    stateful: Mapping[str, Stateful] | None = None,
    report: Callable[[], dict[str, float]] = dict,
) -> Algorithm:
    """The algorithm of this estimator with the config's loss and reduction. Raises ConfigError on options out of range.

    `loss` replaces the token-level clipped surrogate; KL and entropy terms are added to either. `needs` lists what the
    estimator, masks and loss read beyond old log-probs; what the extra terms need is added.
    """
    check_surrogate(config)
    if loss is None:
        loss = ClippedLoss(config.clip_low, config.clip_high, config.dual_clip)
    return Algorithm(
        name=name,
        estimator=estimator,
        loss=Regularised(loss, config.beta, config.kl, config.entropy_coef),
        reduction=CountedReduction(config.reduction, config.length, config.truncated),
        masks=masks,
        needs=needs | ({Signal.REF_LOGPROBS} if config.beta > 0 else set()),
        loss_needs=frozenset({Signal.ENTROPY} if config.entropy_coef > 0 else ()),
        stateful=stateful or {},
        report=report,
    )


def check_surrogate(config: SurrogateConfig) -> None:
    """Raise ConfigError, naming the option, if one is out of range or contradicts another."""
    for option in ("clip_low", "clip_high", "beta", "entropy_coef"):
        require(option, getattr(config, option), getattr(config, option) >= 0, "must be 0 or larger")
    dual = config.dual_clip
    require("dual_clip", dual, dual is None or dual > 1, "must be larger than 1, or null for no dual clip")
    if config.reduction == "constant-length":
        budget = config.length is not None and config.length > 0
        advice = "reduction=constant-length needs the response budget in tokens; set it to rollout.max_tokens"
        require("length", config.length, budget, advice)
    else:
        advice = f"not used by reduction={config.reduction}; remove it or choose constant-length"
        require("length", config.length, config.length is None, advice)


def require(option: str, value: object, holds: bool, rule: str) -> None:
    """Raise ConfigError for `algorithm.<option>` unless the rule holds."""
    if not holds:
        raise ConfigError(f"algorithm.{option}={value}: {rule}.")


# --- the loss -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClippedLoss:
    """PPO's token-level clipped surrogate (`equations.clipped_surrogate`) as a PolicyLoss, with its vital signs.

    Metrics per token: `clip_share` (1 where the clipped branch is the active one), `dual_clip_share`, `ratio_max` (the
    importance ratio), `approx_kl` (k3 estimate of KL(sampling policy || current policy)), `entropy` if it was computed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        old = mb.signals.old_logprobs
        loss = clipped_surrogate(now.logprobs, old, mb.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return TokenLoss(loss, self._metrics(now, old, mb.advantages))

    @torch.no_grad()
    def _metrics(self, now: PolicyOutputs, old: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        ratio = importance_ratio(now.logprobs, old)
        high, low = ratio > 1 + self.clip_high, ratio < 1 - self.clip_low
        clipped = torch.where(advantages > 0, high, low & (advantages < 0))
        metrics = {
            "clip_share": clipped.to(ratio.dtype),
            "ratio_max": ratio,
            "approx_kl": kl_penalty(old, now.logprobs.detach(), "k3"),
        }
        if self.dual_clip is not None:
            metrics["dual_clip_share"] = ((advantages < 0) & (ratio > self.dual_clip)).to(ratio.dtype)
        if now.entropy is not None:
            metrics["entropy"] = now.entropy.detach()
        return metrics


@dataclass(frozen=True)
class Regularised:
    """A PolicyLoss plus `beta` times the KL to the reference model minus `entropy_coef` times the entropy."""

    inner: PolicyLoss
    beta: float = 0.0
    kl: KlKind = "k3"
    entropy_coef: float = 0.0

    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        token = self.inner(now, mb)
        loss, metrics = token.loss, dict(token.metrics)
        if self.beta > 0:
            penalty = kl_penalty(now.logprobs, present(mb.signals.ref_logprobs, "Signals.ref_logprobs"), self.kl)
            loss = loss + self.beta * penalty
            metrics["reference_kl"] = penalty.detach()
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * present(now.entropy, "PolicyOutputs.entropy")
        return TokenLoss(loss, metrics)


def present(value: Tensor | None, name: str) -> Tensor:
    """The tensor that an algorithm declared it needs. Raises ShapeError if it was not computed."""
    if value is None:
        raise ShapeError(f"{name}: None, but the algorithm declared that it needs it. Compute it when scoring.")
    return value


# --- who is counted ---------------------------------------------------------------------------------------------------


def counted_rows(batch: RolloutBatch, truncated: Truncated) -> Tensor:
    """[N] bool: rows that enter group statistics, losses and denominators."""
    return batch.gradable & ~batch.truncated if truncated == "drop" else batch.gradable.clone()


@dataclass(frozen=True)
class CountedReduction:
    """`equations.reduction_weights` over the counted rows of a mini-batch; other rows weigh 0.0."""

    mode: ReductionMode
    length: int | None = None
    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch) -> Tensor:
        counted = counted_rows(batch, self.truncated)
        weights = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=counted.device)
        weights[counted] = reduction_weights(batch.response_mask[counted], self.mode, self.length).float()
        if self.truncated == "mask_loss":
            weights[batch.truncated] = 0.0
        return weights


def broadcast(advantage: Tensor, batch: RolloutBatch) -> Tensor:
    """[N, T] float32: every response token has its row's advantage, all else 0.0."""
    return advantage.float().unsqueeze(1) * batch.response_mask


def check_finite(batch: RolloutBatch, name: str, value: Tensor, where: Tensor) -> None:
    """Raise TrainingError naming the problem and the sample unless `value` ([N] or [N, T]) is finite on `where`."""
    bad = ~value.isfinite() & where
    if not bad.any():
        return
    place = bad.nonzero()[0]
    row = int(place[0])
    group = int(batch.group[row])
    sample = int((batch.group[:row] == group).sum())
    number = value[tuple(place)].item()
    kind = "NaN" if math.isnan(number) else str(number)
    raise TrainingError(
        f"{name}: {kind} in sample {sample} of problem {batch.problems[group].id!r}; it must be finite. "
        "The last checkpoint is intact: look at that response, its reward, and the policy's weights."
    )
