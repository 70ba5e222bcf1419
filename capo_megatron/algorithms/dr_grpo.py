"""Dr.GRPO: GRPO without its two biases.

Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.

    A_i = R_i - mean_g                                   no division by the standard deviation
    loss = sum of PPO's clipped surrogate / (B * length)   no division by the response's own length

`length` is a constant, the response budget: with the padded width of each batch instead, the effective learning rate
would change with the batch. TRL divides like this; verl's seq-mean-token-sum-norm leaves the number of responses B out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capo_megatron.algorithms.equations import ReductionMode
from capo_megatron.algorithms.grpo import GroupAdvantage
from capo_megatron.algorithms.shaping import NamedReward, with_penalty
from capo_megatron.algorithms.surrogate import SurrogateConfig, assemble
from capo_megatron.seams import Algorithm


@dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(SurrogateConfig):
    """Options of Dr.GRPO. `length` is the response budget; a run that gives none has rollout.max_tokens here."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    reduction: ReductionMode = "constant-length"
    reward: str = "reward"  # which of the named rewards


def build(config: DrGrpoConfig) -> Algorithm:
    """Dr.GRPO as configured. Raises ConfigError if `length` is missing."""
    reward = with_penalty(config, NamedReward(config.reward))
    return assemble(config.kind, config, GroupAdvantage(reward, scale_by_std=False, truncated=config.truncated))
