"""The sums behind a step's report, over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from capo_megatron.types import TokenLoss, TrainBatch


@dataclass
class Tally:
    """What a rank's micro-batches add up to, for the step's report."""

    loss: float = 0.0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    bad_rows: list[str] = field(default_factory=list)

    def add(self, value: Tensor, token_loss: TokenLoss, batch: TrainBatch) -> None:
        """Take note of one micro-batch."""
        mask = batch.rollouts.response_mask
        self.loss += float(value.detach())
        self.tokens += int(mask.sum())
        for name, values in token_loss.metrics.items():
            chosen = values.detach()[mask]  # fillers have no response
            if name.endswith("_max"):
                self.maxima[name] = max(
                    self.maxima.get(name, -float("inf")), float(chosen.max()) if len(chosen) else 0.0
                )
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float(chosen.sum())
        if not bool(torch.isfinite(value)):
            bad = (~torch.isfinite(batch.weights * token_loss.loss)).any(dim=1)
            groups = batch.rollouts.group[bad].tolist()
            self.bad_rows += [f"problem {batch.rollouts.problems[group].id}" for group in groups] or [
                "the sum overflowed"
            ]

    def packed(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "sums": self.sums,
            "maxima": self.maxima,
            "bad_rows": self.bad_rows,
        }

    @classmethod
    def merge(cls, parts: Sequence[dict[str, Any] | None]) -> Tally:
        total = cls()
        for part in filter(None, parts):
            total.loss += part["loss"]
            total.tokens += part["tokens"]
            total.bad_rows += part["bad_rows"]
            for name, value in part["sums"].items():
                total.sums[name] = total.sums.get(name, 0.0) + value
            for name, value in part["maxima"].items():
                total.maxima[name] = max(total.maxima.get(name, value), value)
        return total

    def means(self) -> dict[str, float]:
        return {**{name: value / max(self.tokens, 1) for name, value in self.sums.items()}, **self.maxima}
