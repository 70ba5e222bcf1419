"""GRPO: group-relative policy optimisation.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.

    A_i = (R_i - mean_g) / (std_g + eps),  the same for every token of response i
    loss = PPO's clipped surrogate, averaged over tokens, then over responses, + beta * KL(current || reference)

Defaults follow the paper where it speaks (clip 0.2, mean over responses), verl for eps (1e-6, standard deviation over
G - 1), and leave the KL term off. verl's own also have reduction=token-mean and dual_clip=3.0; TRL has eps=1e-4.

CAPO's noise mask alone, on GRPO's advantages, is `mask: on`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import Truncated, broadcast, check_finite, counted_rows
from capo_megatron.algorithms.equations import Singleton, grpo_advantage
from capo_megatron.algorithms.shaping import NamedReward, Reward, with_penalty
from capo_megatron.algorithms.surrogate import SurrogateConfig, assemble, require
from capo_megatron.notices import warn_once
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class GroupConfig(SurrogateConfig):
    """Options of every algorithm that compares a response's reward with those of its group."""

    eps: float = 1e-6  # added to the standard deviation
    scale_by_std: bool = True  # False: only subtract the mean
    singleton: Singleton = "zero"  # advantage of a group of one; "raw" = its reward, as verl does


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(GroupConfig):
    """Options of GRPO."""

    kind: Literal["grpo"] = "grpo"
    reward: str = "reward"  # which of the named rewards


def build(config: GrpoConfig) -> Algorithm:
    """GRPO as configured."""
    return assemble(config.kind, config, group_advantage(config, NamedReward(config.reward)))


def group_advantage(config: GroupConfig, reward: Reward) -> GroupAdvantage:
    """The group-relative advantage of `reward`, with the config's KL penalty in it if there is one."""
    require("eps", config.eps, config.eps >= 0, "must be 0 or larger")
    if config.beta > 0 and config.kl_in == "reward" and config.scale_by_std:
        warn_once(
            "algorithm.kl_in=reward: advantages are divided by the deviation of a group's rewards, which for answers "
            "of one verdict is that of their penalties: such groups train as much as others. scale_by_std=false or "
            "kl_in=loss prevents it."
        )
    reward = with_penalty(config, reward)
    return GroupAdvantage(reward, config.eps, config.scale_by_std, config.singleton, config.truncated)


@dataclass(frozen=True)
class GroupAdvantage:
    """`equations.grpo_advantage` of a reward over the counted rows; [N, T], other rows 0.0."""

    reward: Reward = field(default_factory=NamedReward)
    eps: float = 1e-6
    scale_by_std: bool = True
    singleton: Singleton = "zero"
    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        return broadcast(self.rows(batch, signals), batch)

    def rows(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N] the advantage of each row."""
        check_finite(batch, "old_logprobs", signals.old_logprobs, batch.response_mask)
        reward = self.reward(batch, signals)
        counted = counted_rows(batch, self.truncated)
        check_finite(batch, "reward", reward, counted)
        advantage = torch.zeros_like(reward)
        advantage[counted] = grpo_advantage(
            reward[counted], batch.group[counted], self.eps, self.scale_by_std, self.singleton
        )
        return advantage
