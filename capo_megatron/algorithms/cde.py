"""CDE: curiosity-driven exploration by the actor's own perplexity.

"CDE: Curiosity-Driven Exploration for Efficient Reinforcement Learning in Large Language Models", arXiv 2509.09675; its
actor bonus. With l_i the mean log-prob of a response under the policy that sampled it:

    R~_i = R_i + omega min(|R_i| / kappa, -alpha l_i),   A_i = GRPO's advantage of R~

The paper's analysis has R = +-1. With 0 and 1 (`reward_range: "01"`) the cap is 0 for wrong answers, so that only
correct ones get a bonus and confident mistakes go unpunished. omega falls over the run; the paper found a staircase
(high, then removed at once) best, and its levels are in a figure only: 1 for the first half here.

Groups of one verdict train as well: their members differ by their bonus, unless the cap holds for all of them.
The paper's other half, a critic with several value heads, needs a critic, which this trainer does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from capo_megatron.algorithms.counted import check_finite
from capo_megatron.algorithms.equations import ReductionMode, cde_shaped_reward, sequence_logprob_mean
from capo_megatron.algorithms.grpo import GroupConfig, group_advantage
from capo_megatron.algorithms.schedule import ScheduleKind, scheduled
from capo_megatron.algorithms.shaping import RewardRange, VerdictReward
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class CdeConfig(GroupConfig):
    """Options of CDE."""

    kind: Literal["cde"] = "cde"
    reduction: ReductionMode = "token-mean"
    reward_range: RewardRange = "pm1"  # of right and wrong responses: +1 and -1, or 1 and 0
    omega: float = 1.0  # weight of the bonus as the run starts
    omega_schedule: ScheduleKind = "staircase"
    omega_end: float = 0.0  # where the schedule leads
    omega_until: float = 0.5  # share of the run's steps after which it is there
    kappa: float = 3.0  # the bonus is at most |reward| / kappa; above 1 it never turns a reward's sign
    alpha: float = 1.0


def build(config: CdeConfig) -> Algorithm:
    """CDE as configured. Raises ConfigError on options out of range."""
    for option in ("omega", "omega_end", "alpha"):
        value = getattr(config, option)
        require(option, value, 0 <= value < math.inf, "must be 0 or larger, and finite")
    require("kappa", config.kappa, config.kappa > 0, "must be larger than 0")
    require("omega_until", config.omega_until, 0 < config.omega_until <= 1, "must be above 0 and at most 1")
    reward = CuriousReward(config, VerdictReward(config.reward_range))
    algorithm = assemble(config.kind, config, group_advantage(config, reward), report=reward.report)
    return replace(algorithm, scheduled=config.omega_schedule != "constant")


@dataclass
class CuriousReward:
    """A verdict's reward plus the perplexity bonus; notes the bonus and its weight."""

    config: CdeConfig
    verdict: VerdictReward
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        check_finite(batch, "old_logprobs", signals.old_logprobs, batch.response_mask)
        mean, answered = sequence_logprob_mean(signals.old_logprobs, batch.response_mask)
        reward, option = self.verdict(batch, signals), self.config
        omega = scheduled(option.omega_schedule, option.omega, option.omega_end, option.omega_until, batch.progress)
        shaped = cde_shaped_reward(reward, mean, omega, option.kappa, option.alpha, answered)
        capped = option.alpha * -mean >= reward.abs() / option.kappa
        self._last = {
            "cde/omega": omega,
            "cde/bonus": float((shaped - reward).mean()),
            "cde/capped_share": float(capped.float().mean()) if omega else 0.0,
        }
        return shaped

    def report(self) -> dict[str, float]:
        """Of the last step: omega, the mean bonus, and the share of responses whose bonus was capped."""
        return self._last
