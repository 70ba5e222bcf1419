"""The reward that a group-relative advantage compares: a named one, a verdict, or either with a penalty.

A `Reward` is a function of a step's batch and signals to [N] numbers. It reads log-probs of the sampling policy only,
hence is a constant: no gradient flows through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import Truncated, check_finite, counted_rows, present
from capo_megatron.algorithms.equations import KlKind, grpo_advantage, kl_penalty
from capo_megatron.algorithms.surrogate import SurrogateConfig
from capo_megatron.errors import ConfigError
from capo_megatron.seams import AdvantageEstimator
from capo_megatron.types import RolloutBatch, Signals

Reward = Callable[[RolloutBatch, Signals], Tensor]
RewardRange = Literal["pm1", "01"]


@dataclass(frozen=True)
class NamedReward:
    """One of the rewards that the grader gave. Raises ConfigError if there is none of this name."""

    name: str = "reward"

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        if self.name not in batch.rewards:
            raise ConfigError(f"algorithm.reward={self.name!r}: no such reward. Choose of {sorted(batch.rewards)}.")
        return batch.rewards[self.name]


@dataclass(frozen=True)
class VerdictReward:
    """+1 for a correct response, -1 ("pm1") or 0 ("01") for another."""

    range: RewardRange = "pm1"

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        right = batch.correct.float()
        return 2 * right - 1 if self.range == "pm1" else right


@dataclass(frozen=True)
class ReferencePenalty:
    """[N] `beta` times the summed estimate of KL(sampling policy || reference) of each response."""

    beta: float
    kind: KlKind

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        reference = present(signals.ref_logprobs, "Signals.ref_logprobs")
        # k3 is bounded: it would make a number of infinity.
        check_finite(batch, "old_logprobs", signals.old_logprobs, batch.response_mask)
        check_finite(batch, "ref_logprobs", reference, batch.response_mask)
        penalty = kl_penalty(signals.old_logprobs, reference, self.kind)
        return self.beta * (penalty * batch.response_mask).sum(dim=1)


def with_penalty(config: SurrogateConfig, reward: Reward) -> Reward:
    """`reward`, less the KL to the reference model if the config puts that into the reward.

    In a group of equal rewards the penalties are all that differ, and a division by their deviation makes advantages of
    order 1 of them, rounding included. `scale_by_std: false` or `kl_in: loss` does not.
    """
    if not _in_reward(config):
        return reward
    penalty = ReferencePenalty(config.beta, config.kl)
    return lambda batch, signals: reward(batch, signals) - penalty(batch, signals)


def with_centred_penalty(config: SurrogateConfig, estimator: AdvantageEstimator) -> AdvantageEstimator:
    """The same for an estimator that reads verdicts and no reward.

    Each advantage loses its row's penalty, compared with the mean penalty of the group: as a group-relative advantage
    without standard deviation would.
    """
    if not _in_reward(config):
        return estimator
    return CentredPenalty(estimator, ReferencePenalty(config.beta, config.kl), config.truncated)


@dataclass(frozen=True)
class CentredPenalty:
    """`estimator` less a penalty's distance from its group's mean, over the counted rows."""

    estimator: AdvantageEstimator
    penalty: Reward
    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        penalty = self.penalty(batch, signals)
        counted = counted_rows(batch, self.truncated)
        distance = torch.zeros_like(penalty)
        distance[counted] = grpo_advantage(penalty[counted], batch.group[counted], scale_by_std=False)
        return self.estimator(batch, signals) - distance.unsqueeze(1) * batch.response_mask


def _in_reward(config: SurrogateConfig) -> bool:
    return config.beta > 0 and config.kl_in == "reward"
