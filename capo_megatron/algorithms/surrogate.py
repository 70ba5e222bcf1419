"""What the algorithms share: the clipped loss with optional KL and entropy terms, its reduction, and who is counted.

An algorithm's config inherits `SurrogateConfig`; `assemble` turns it and an estimator into a `seams.Algorithm`. A new
surrogate is one more PolicyLoss handed to `assemble`, which wraps it in the same extra terms. Every option here goes
with every algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import Truncated, counted_rows, present
from capo_megatron.algorithms.equations import (
    SEQUENCE_LOG_RATIO_LIMIT,
    ImportanceLevel,
    KlKind,
    ReductionMode,
    clipped_surrogate,
    gspo_surrogate,
    importance_ratio,
    kl_penalty,
    reduction_weights,
    sequence_logprob_mean,
)
from capo_megatron.algorithms.noise_mask import ReferencePerplexityMask, Threshold
from capo_megatron.algorithms.off_policy import Importance, ImportanceBound
from capo_megatron.errors import ConfigError
from capo_megatron.notices import warn_once
from capo_megatron.seams import AdvantageEstimator, Algorithm, PolicyLoss, Signal, Stateful
from capo_megatron.types import PolicyOutputs, RolloutBatch, Signals, TokenLoss, TrainBatch

_TOKEN_CLIP = 0.1  # a clip from here on is meant for a ratio per token: GSPO's are 300 times smaller


@dataclass(frozen=True, kw_only=True)
class SurrogateConfig:
    """Options of the clipped loss that every algorithm has."""

    # A dataclass inside a config does not inherit these: an unknown key is an error, and so are infinity and NaN.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    reduction: ReductionMode = "seq-mean-token-mean"
    length: int | None = None  # response budget in tokens; required by, and only for, reduction=constant-length
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float | None = None  # c > 1 bounds the loss at -A c where A < 0 (verl: 3.0); None = off
    ratio: Literal["token", "sequence"] = "token"  # importance ratio per token, or GSPO's, one per response
    importance_cap: float | None = None  # weigh tokens by min(policy / engine probability, cap) (verl: 2.0); None = off
    importance_level: ImportanceLevel = "token"  # sequence: of whole responses, one weight for all tokens of each
    importance_bound: float | None = None  # > 1: a response so many times likelier, or less likely, to the policy than
    # to the engine trains nothing; it stays in its group's statistics and in every denominator. None = off
    beta: float = 0.0  # coefficient of the KL term to the reference model; > 0 costs a reference pass
    kl: KlKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # reward: summed over a response, at the sampling policy, no gradient
    entropy_coef: float = 0.0  # coefficient of the entropy bonus; > 0 computes entropies with gradient
    truncated: Truncated = "keep"  # drop: out of statistics, loss, denominators; mask_loss: of the loss and token means
    mask: Literal["on", "off"] = "off"  # CAPO's noise mask by reference perplexity; on costs a reference pass
    ref_high: Threshold = 2.5  # largest reference perplexity of a correct answer; quartile: 75th percentile, see mask
    ref_low: Threshold = 1.05  # smallest reference perplexity of a wrong answer; quartile: 25th percentile
    reference_decay: float | None = None  # the reference follows the policy as a moving average; None = it is fixed


def assemble(
    name: str,
    config: SurrogateConfig,
    estimator: AdvantageEstimator,
    *,
    loss: PolicyLoss | None = None,
    noise: ReferencePerplexityMask | None = None,
    needs: frozenset[Signal] = frozenset(),
    loss_needs: frozenset[Signal] = frozenset(),
    top_k: int = 0,
    stateful: Mapping[str, Stateful] | None = None,
    report: Callable[[], dict[str, float]] = dict,
) -> Algorithm:
    """The algorithm of this estimator with the config's loss and reduction. Raises ConfigError on options out of range.

    `loss` replaces the clipped surrogate; what the config adds to a loss is added to either. `noise` is the config's
    noise mask, where the estimator has to know it; otherwise it is made here. `needs` and `loss_needs` list what the
    estimator and the loss read beyond old log-probs; what the extra terms need is added.
    """
    check_surrogate(config)
    _warn_of_sequence_ratio(config)
    _warn_of_unused(config)
    noise = noise or noise_mask(config)
    in_loss = config.beta if config.kl_in == "loss" else 0.0
    in_reward = NotedKl(estimator, config.kl) if config.beta > 0 and config.kl_in == "reward" else None
    importance = Importance(config.importance_cap, config.importance_level) if config.importance_cap else None
    bound = ImportanceBound(config.importance_bound) if config.importance_bound else None
    return Algorithm(
        name=name,
        estimator=in_reward or estimator,
        loss=Regularised(
            loss or clipped_loss(config), in_loss, config.kl, config.entropy_coef, importance=importance, bound=bound
        ),
        reduction=CountedReduction(config.reduction, config.length, config.truncated),
        masks=tuple(mask for mask in (noise, bound) if mask),
        needs=needs | ({Signal.REF_LOGPROBS} if config.beta > 0 or noise else set()),
        loss_needs=loss_needs | ({Signal.ENTROPY} if config.entropy_coef > 0 else set()),
        top_k=top_k,
        reference_decay=config.reference_decay,
        corrects_sampler=importance is not None,
        stateful={**({"reference_mask": noise} if noise else {}), **(stateful or {})},
        report=lambda: {
            **(noise.report() if noise else {}),
            **(in_reward.report() if in_reward else {}),
            **(bound.report() if bound else {}),
            **report(),
        },
    )


def noise_mask(config: SurrogateConfig) -> ReferencePerplexityMask | None:
    """CAPO's noise mask, if the config turns it on. Raises ConfigError on thresholds out of range."""
    high, low = config.ref_high, config.ref_low
    require("ref_high", high, high == "quartile" or high >= 1, "must be a perplexity, 1 or larger, or 'quartile'")
    require("ref_low", low, low == "quartile" or low > 0, "must be a perplexity (at most 1 keeps all) or 'quartile'")
    return ReferencePerplexityMask(high, low, config.truncated) if config.mask == "on" else None


def check_surrogate(config: SurrogateConfig) -> None:
    """Raise ConfigError, naming the option, if one is out of range or contradicts another."""
    for option in ("clip_low", "clip_high", "beta", "entropy_coef"):
        require(option, getattr(config, option), getattr(config, option) >= 0, "must be 0 or larger")
    dual, cap, decay = config.dual_clip, config.importance_cap, config.reference_decay
    require("dual_clip", dual, dual is None or dual > 1, "must be larger than 1, or null for no dual clip")
    require("importance_cap", cap, cap is None or cap > 0, "must be larger than 0 (e.g. 2), or null for no weights")
    used = cap is not None or config.importance_level == "token"
    require("importance_level", config.importance_level, used, "nothing is weighed; set importance_cap, too (e.g. 2)")
    bound = config.importance_bound
    require("importance_bound", bound, bound is None or bound > 1, "must be larger than 1, or null for no rejection")
    require("reference_decay", decay, decay is None or 0 <= decay < 1, "must be from 0 to below 1, or null: fixed")
    used = config.mask == "on" or config.beta > 0
    require("reference_decay", decay, decay is None or used, "nothing reads the reference; set mask=on or beta > 0")
    if config.reduction == "constant-length":
        budget = config.length is not None and config.length > 0
        advice = "reduction=constant-length needs the response budget in tokens; set it to what rollout.max_tokens is"
        require("length", config.length, budget, advice)
    else:
        advice = f"not used by reduction={config.reduction}; remove it or choose constant-length"
        require("length", config.length, config.length is None, advice)


def _warn_of_unused(config: SurrogateConfig) -> None:
    """Warn of options that were set and that another one, e.g. an override for an ablation, leaves without effect."""
    for options, used, why in (
        (("kl", "kl_in"), config.beta > 0, "beta=0"),
        (("ref_high", "ref_low"), config.mask == "on", "mask=off"),
    ):
        for option in options:
            if not used and getattr(config, option) != getattr(type(config), option):
                warn_once(f"algorithm.{option}={getattr(config, option)}: without effect with {why}.")


def _warn_of_sequence_ratio(config: SurrogateConfig) -> None:
    """Warn of what makes GSPO's ratio something else, or do nothing."""
    if config.ratio != "sequence":
        return
    if config.reduction != "seq-mean-token-mean":
        warn_once(
            f"algorithm.reduction={config.reduction}: with one ratio per response, only seq-mean-token-mean gives "
            "GSPO's loss. Here responses do not count the same, but by their length."
        )
    if max(config.clip_low, config.clip_high) >= _TOKEN_CLIP:
        warn_once(
            f"algorithm.clip_low={config.clip_low:g}, algorithm.clip_high={config.clip_high:g}: clips of a ratio per "
            "token. One ratio per response moves far less and is hardly ever clipped by them; GSPO's are 3e-4 and 4e-4."
        )


def require(option: str, value: object, holds: bool, rule: str) -> None:
    """Raise ConfigError for `algorithm.<option>` unless the rule holds."""
    if not holds:
        raise ConfigError(f"algorithm.{option}={'null' if value is None else value}: {rule}.")


@dataclass
class NotedKl:
    """An estimator whose reward holds the KL to the reference model, and how large that is: as it is in the loss."""

    estimator: AdvantageEstimator
    kl: KlKind
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        advantages = self.estimator(batch, signals)  # which refuses log-probs that are not finite
        reference = present(signals.ref_logprobs, "Signals.ref_logprobs")
        penalty = kl_penalty(signals.old_logprobs, reference, self.kl)[batch.response_mask]
        self._last = {"reward/reference_kl": float(penalty.mean())} if penalty.numel() else {}
        return advantages

    def report(self) -> dict[str, float]:
        """Of the last step: the mean estimate per response token, by the policy that sampled."""
        return self._last


# --- the loss -----------------------------------------------------------------------------------------------------


def clipped_loss(config: SurrogateConfig) -> ClippedLoss:
    """The clipped surrogate with the config's ratio and clips."""
    return ClippedLoss(config.clip_low, config.clip_high, config.dual_clip, config.ratio == "sequence")


@dataclass(frozen=True)
class ClippedLoss:
    """The clipped surrogate with a ratio per token (PPO) or per sequence (GSPO) as a PolicyLoss, with its vital signs.

    Metrics per token: `clip_share` (1 where the clipped branch is the active one), `dual_clip_share`, `ratio_max` (the
    importance ratio), `approx_kl` (k3 estimate of KL(sampling policy || current policy)), `entropy` if it was computed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sequence: bool = False

    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        old, mask = mb.signals.old_logprobs, mb.rollouts.response_mask
        clips = (self.clip_low, self.clip_high, self.dual_clip)
        if self.sequence:
            loss = gspo_surrogate(now.logprobs, old, mb.advantages, mask, *clips)
        else:
            loss = clipped_surrogate(now.logprobs, old, mb.advantages, *clips)
        return TokenLoss(loss, self.metrics(now, mb))

    @torch.no_grad()
    def metrics(self, now: PolicyOutputs, mb: TrainBatch) -> dict[str, Tensor]:
        """What the class's docstring lists, [n, T] each."""
        old, advantages = mb.signals.old_logprobs, mb.advantages
        ratio = importance_ratio(now.logprobs, old)
        if self.sequence:
            # A broken policy's loss is not finite, and its step is skipped: no reason to end the run here.
            mean, _ = sequence_logprob_mean((now.logprobs - old).nan_to_num(), mb.rollouts.response_mask)
            ratio = mean.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp().unsqueeze(1).expand_as(old)
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
    """A PolicyLoss, weighed, plus `beta` times the KL to the reference model minus `entropy_coef` times the entropy.

    With `importance`, the policy loss is weighed for the engine that sampled; the two extra terms are not. The rows
    that `bound` rejects have a loss of 0.
    """

    inner: PolicyLoss
    beta: float = 0.0
    kl: KlKind = "k3"
    entropy_coef: float = 0.0
    importance: Importance | None = None
    bound: ImportanceBound | None = None

    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        token = self.inner(now, mb)
        loss, metrics = token.loss, dict(token.metrics)
        if self.importance is not None:
            weight, signs = self.importance(mb)
            loss = loss * weight
            metrics |= signs
        if self.beta > 0:
            penalty = kl_penalty(now.logprobs, present(mb.signals.ref_logprobs, "Signals.ref_logprobs"), self.kl)
            loss = loss + self.beta * penalty
            metrics["reference_kl"] = penalty.detach()
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * present(now.entropy, "PolicyOutputs.entropy")
        if self.bound is not None:
            loss = torch.where(self.bound.rows(mb.rollouts, mb.signals).unsqueeze(1), loss, 0.0)
        return TokenLoss(loss, metrics)


@dataclass(frozen=True)
class CountedReduction:
    """`equations.reduction_weights` over the counted rows of a mini-batch; other rows weigh 0.0.

    With truncated="mask_loss", cut responses keep their place in group statistics and weigh 0.0. A mean over tokens is
    one over the tokens that are left; a mean over responses still has all of them in its denominator. So does TRL's
    mask_truncated_completions.
    """

    mode: ReductionMode
    length: int | None = None
    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch) -> Tensor:
        counted = counted_rows(batch, self.truncated)
        weights = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=counted.device)
        masked = batch.truncated & (self.truncated == "mask_loss")
        tokens = batch.response_mask & ~masked.unsqueeze(1) if self.mode == "token-mean" else batch.response_mask
        weights[counted] = reduction_weights(tokens[counted], self.mode, self.length).float()
        weights[masked] = 0.0
        return weights
