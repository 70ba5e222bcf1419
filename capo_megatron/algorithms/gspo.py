"""GSPO: group sequence policy optimisation, with one importance ratio per response.

Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071.

    s_i = exp(mean_t (lp - olp)),  A_i as in GRPO
    loss = mean_i max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

A ratio that is averaged over a response moves far less than a token's: the paper clips at 3e-4 and 4e-4. Strictly
on-policy, loss and gradient are GRPO's. Trained token by token (`equations.gspo_surrogate`), a response may be split
over nothing: a row always lies whole in one micro-batch.

Any other algorithm takes this ratio by `ratio: sequence` (with clips of this size), CAPO's estimator among them.
Clips of a ratio per token, and a reduction other than `seq-mean-token-mean`, are warned of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capo_megatron.algorithms.grpo import GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import NamedReward
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.seams import Algorithm


@dataclass(frozen=True, kw_only=True)
class GspoConfig(GroupConfig):
    """Options of GSPO."""

    kind: Literal["gspo"] = "gspo"
    reward: str = "reward"  # which of the named rewards
    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


def build(config: GspoConfig) -> Algorithm:
    """GSPO as configured."""
    require("ratio", config.ratio, config.ratio == "sequence", "GSPO is the sequence ratio; for tokens choose grpo")
    return assemble(config.kind, config, group_advantage(config, NamedReward(config.reward)))
