"""GRPO: group-relative policy optimisation.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.

    A_i = (R_i - mean_g) / (std_g + eps),  the same for every token of response i
    loss = PPO's clipped surrogate, averaged over tokens, then over responses, + beta * KL(current || reference)

Defaults follow the paper where it speaks (clip 0.2, mean over responses), verl for eps (1e-6, standard deviation over
G - 1), and leave the KL term off. verl's own also have reduction=token-mean and dual_clip=3.0; TRL has eps=1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations import Singleton, grpo_advantage
from capo_megatron.algorithms.surrogate import (
    SurrogateConfig,
    Truncated,
    assemble,
    broadcast,
    check_finite,
    counted_rows,
    require,
)
from capo_megatron.errors import ConfigError
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(SurrogateConfig):
    """Options of GRPO."""

    kind: Literal["grpo"] = "grpo"
    reward: str = "reward"  # which of the named rewards
    eps: float = 1e-6  # added to the standard deviation
    scale_by_std: bool = True  # False: only subtract the mean
    singleton: Singleton = "zero"  # advantage of a group of one; "raw" = its reward, as verl does


def build(config: GrpoConfig) -> Algorithm:
    """GRPO as configured."""
    require("eps", config.eps, config.eps >= 0, "must be 0 or larger")
    estimator = GroupAdvantage(config.reward, config.eps, config.scale_by_std, config.singleton, config.truncated)
    return assemble(config.kind, config, estimator)


@dataclass(frozen=True)
class GroupAdvantage:
    """`equations.grpo_advantage` of a named reward over the counted rows; [N, T], other rows 0.0."""

    reward: str = "reward"
    eps: float = 1e-6
    scale_by_std: bool = True
    singleton: Singleton = "zero"
    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        if self.reward not in batch.rewards:
            raise ConfigError(f"algorithm.reward={self.reward!r}: no such reward. Choose of {sorted(batch.rewards)}.")
        reward = batch.rewards[self.reward]
        counted = counted_rows(batch, self.truncated)
        check_finite(batch, f"rewards[{self.reward!r}]", reward, counted)
        advantage = torch.zeros_like(reward)
        advantage[counted] = grpo_advantage(
            reward[counted], batch.group[counted], self.eps, self.scale_by_std, self.singleton
        )
        return broadcast(advantage, batch)
