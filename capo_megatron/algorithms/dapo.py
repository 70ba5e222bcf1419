"""DAPO: clip-higher, a penalty on overlong responses, and groups that always teach something.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476; defaults as in its verl
recipe.

    R_i = +-1 + penalty(n_i),   penalty(n) = min(-(n - (max_length - overlong_buffer)) / overlong_buffer * factor, 0)
    A_i as in GRPO;   ratio clipped to [1 - 0.2, 1 + 0.28];   loss averaged over all tokens of the mini-batch

Dynamic sampling: groups whose verdicts are all equal are replaced by other problems' until the step has its number of
groups. Whether a group is kept is decided by verdicts, not by the shaped reward, with which nearly all would differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from capo_megatron.algorithms.counted import Truncated, counted_rows
from capo_megatron.algorithms.equations import ReductionMode, dapo_keep_group, dapo_overlong_penalty
from capo_megatron.algorithms.grpo import GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import RewardRange, VerdictReward
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class DapoConfig(GroupConfig):
    """Options of DAPO."""

    kind: Literal["dapo"] = "dapo"
    reduction: ReductionMode = "token-mean"
    clip_high: float = 0.28
    reward_range: RewardRange = "pm1"  # of right and wrong responses: +1 and -1, or 1 and 0
    overlong_buffer: int = 0  # tokens below max_length in which the penalty grows (paper: 4096); 0 = no penalty
    overlong_factor: float = 1.0  # the penalty of a response of max_length tokens
    max_length: int | None = (
        None  # response budget in tokens, for an overlong_buffer; a run's default: rollout.max_tokens
    )
    dynamic_sampling: bool = True
    max_refills: int = 10  # rounds of replacement before the run stops with an error


def build(config: DapoConfig) -> Algorithm:
    """DAPO as configured. Raises ConfigError on options out of range."""
    buffer, budget = config.overlong_buffer, config.max_length
    require("max_refills", config.max_refills, config.max_refills >= 0, "must be 0 or larger")
    require("overlong_buffer", buffer, buffer >= 0, "must be 0 (no penalty) or larger")
    require("overlong_factor", config.overlong_factor, config.overlong_factor >= 0, "must be 0 or larger")
    enough = budget is not None and budget >= buffer
    require("max_length", budget, not buffer or enough, f"overlong_buffer={buffer} needs it, that long or longer")
    reward = OverlongReward(VerdictReward(config.reward_range), buffer, budget or 0, config.overlong_factor)
    algorithm = assemble(config.kind, config, group_advantage(config, reward), report=reward.report)
    if not config.dynamic_sampling:
        return algorithm
    return replace(algorithm, keep_group=MixedGroup(config.truncated), max_refills=config.max_refills)


@dataclass
class OverlongReward:
    """A verdict's reward less the penalty for its length; notes how often and how much it punished."""

    verdict: VerdictReward
    buffer: int
    max_length: int
    factor: float = 1.0
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        reward = self.verdict(batch, signals)
        if not self.buffer:
            return reward
        length = batch.response_mask.sum(dim=1)
        penalty = dapo_overlong_penalty(length, self.max_length, self.buffer, self.factor).to(reward.dtype)
        self._last = {
            "dapo/overlong_share": float((penalty < 0).float().mean()),
            "dapo/overlong_penalty": float(penalty.mean()),
        }
        return reward + penalty

    def report(self) -> dict[str, float]:
        """Of the last step: the share of responses that were punished, and the mean penalty."""
        return self._last


@dataclass(frozen=True)
class MixedGroup:
    """Keep a group iff its counted rows have both verdicts."""

    truncated: Truncated = "keep"

    def __call__(self, batch: RolloutBatch) -> bool:
        counted = counted_rows(batch, self.truncated)
        return bool(dapo_keep_group(batch.correct[counted], batch.group[counted]).any())
