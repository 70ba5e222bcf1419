"""CoDaPO: weigh groups by confidence and difficulty, and come back to those that weigh most.

"CoDaPO: Confidence and Difficulty-adaptive Policy Optimization", arXiv 2606.07950. With p_g the share of a group's
responses that are correct and c_g = exp(mean over its responses of their mean log-prob):

    v_g = c_g 4 p_g (1 - p_g) + offset,   A_i = v_g * GRPO's advantage

Two phases in turn (`refocus`): after a step on fresh problems, those whose v_g reaches the `percentile` are sampled
again for the next step, each `repeat` times, cycled until the step is full; every copy is a group of its own. So one
pass over the data takes two steps. Without `refocus` only the weights remain.

Correct means the verdict. The released code asks for a reward of exactly 1, which a shaped reward never is, and gives
an empty response confidence 1; here it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import broadcast, check_finite, counted_rows
from capo_megatron.algorithms.equations import (
    ReductionMode,
    codapo_select,
    codapo_weight,
    sequence_logprob_mean,
)
from capo_megatron.algorithms.grpo import GroupAdvantage, GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import NamedReward
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.errors import CheckpointError
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class CodapoConfig(GroupConfig):
    """Options of CoDaPO."""

    kind: Literal["codapo"] = "codapo"
    reduction: ReductionMode = "token-mean"
    reward: str = "reward"  # which of the named rewards
    offset: float = 0.1  # weight of a group that is all right or all wrong
    refocus: bool = True  # every other step samples the heaviest problems again; false: weights only
    percentile: float = 0.75  # of the weights; groups from there on are sampled again
    repeat: int = 4  # copies of each, about 1 / (1 - percentile)


def build(config: CodapoConfig) -> Algorithm:
    """CoDaPO as configured. Raises ConfigError on options out of range."""
    require("offset", config.offset, config.offset >= 0, "must be 0 or larger")
    require("percentile", config.percentile, 0 <= config.percentile <= 1, "must be from 0 to 1")
    require("repeat", config.repeat, config.repeat >= 1, "must be 1 or larger")
    estimator = WeighedAdvantage(config, group_advantage(config, NamedReward(config.reward)))
    if not config.refocus:
        return assemble(config.kind, config, estimator, report=estimator.report)
    focus = Refocus(config, estimator)
    report = lambda: estimator.report() | focus.report()  # noqa: E731
    algorithm = assemble(config.kind, config, estimator, stateful={"focus": focus}, report=report)
    return replace(algorithm, reselect=focus)


@dataclass
class WeighedAdvantage:
    """GRPO's advantage times `equations.codapo_weight` of the row's group."""

    config: CodapoConfig
    advantage: GroupAdvantage
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        weight = self.weights(batch, signals)
        self._last = {"codapo/weight": float(weight.mean()), "codapo/weight_max": float(weight.max())}
        return broadcast(self.advantage.rows(batch, signals) * weight[batch.group], batch)

    def weights(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[P] the weight of each problem; `offset` where none of its rows counts."""
        check_finite(batch, "old_logprobs", signals.old_logprobs, batch.response_mask)
        mean, answered = sequence_logprob_mean(signals.old_logprobs, batch.response_mask)
        rows = counted_rows(batch, self.config.truncated)
        group = batch.group[rows]
        weight = torch.full((len(batch.problems),), self.config.offset)
        weight[group] = codapo_weight(mean[rows], batch.correct[rows], group, self.config.offset, answered[rows])
        return weight

    def report(self) -> dict[str, float]:
        """Of the last step: mean and largest weight over its problems."""
        return self._last


class Refocus:
    """After a step on fresh problems, the order in which to sample them again; after such a step, nothing."""

    def __init__(self, config: CodapoConfig, estimator: WeighedAdvantage) -> None:
        self._config, self._estimator = config, estimator
        self._again = False  # the step under way samples problems again

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Sequence[int] | None:
        self._again = not self._again
        if not self._again:
            return None
        weights = self._estimator.weights(batch, signals)
        return codapo_select(weights, self._config.percentile, self._config.repeat).tolist()

    def report(self) -> dict[str, float]:
        """1 for a step that sampled problems again."""
        return {"codapo/refocused": float(self._again)}

    def state_dict(self) -> dict[str, Any]:
        return {"again": self._again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("again"), bool):
            raise CheckpointError(f"algorithm state focus.again={state.get('again')!r}: expected true or false.")
        self._again = state["again"]
