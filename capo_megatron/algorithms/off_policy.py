"""Correction for responses that another distribution than the policy sampled: the engine's numerics, or older weights.

Every algorithm has it (`SurrogateConfig.importance_*`). What it compares, per response token: the log-prob by the
policy as it is before the step's first update, and the one with which the engine sampled. Its numbers are constants
of a step, and a row's are its own, so they do not depend on micro-batches or layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from capo_megatron.algorithms.equations import ImportanceLevel, importance_weight, within_importance_bound
from capo_megatron.types import RolloutBatch, Signals, TrainBatch


@dataclass(frozen=True)
class Importance:
    """Truncated importance weights, per token or per response."""

    cap: float
    level: ImportanceLevel = "token"

    def __call__(self, mb: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """([n, T] weights of the policy loss, what is worth logging of them).

        Metrics, [n, T] each: `importance_weight`, and `importance_clip_share`, 1 where the cap cut a weight off.
        """
        batch = mb.rollouts
        columns = (mb.signals.old_logprobs, batch.sampler_logprobs)
        whole = importance_weight(*columns, float("inf"), batch.response_mask, self.level)
        weight = whole.clamp(max=self.cap)
        return weight, {"importance_weight": weight, "importance_clip_share": (whole > self.cap).to(weight.dtype)}


@dataclass
class ImportanceBound:
    """A TokenMask that rejects responses beyond `equations.within_importance_bound`.

    A rejected response trains nothing (the loss leaves out its KL and entropy terms, too). As with every mask, it stays
    in the statistics of its group and in every denominator: the siblings count as if it had been kept.
    """

    bound: float
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        kept = self.rows(batch, signals)
        rejected = int((~kept & batch.gradable).sum())
        self._last = {
            "importance/rejected": float(rejected),
            "importance/rejected_share": rejected / max(1, int(batch.gradable.sum())),
        }
        return kept.unsqueeze(1).expand_as(batch.response_mask)

    def rows(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N] bool: keep."""
        return within_importance_bound(signals.old_logprobs, batch.sampler_logprobs, self.bound, batch.response_mask)

    def report(self) -> dict[str, float]:
        """Of the last step: gradable responses that were rejected, and their share."""
        return self._last
