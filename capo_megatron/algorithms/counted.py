"""Which rows count, and the checks on what they hold.

Rows that are not *counted* (the verdict says nothing, or truncated="drop" and the response was cut) are in no group
statistic, no loss and no denominator. Rows that a TokenMask removes have advantage 0 and stay in every denominator.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from capo_megatron.errors import ShapeError, TrainingError
from capo_megatron.types import RolloutBatch

Truncated = Literal["keep", "drop", "mask_loss"]


def present(value: Tensor | None, name: str) -> Tensor:
    """The tensor that an algorithm declared it needs. Raises ShapeError if it was not computed."""
    if value is None:
        raise ShapeError(f"{name}: None, but the algorithm declared that it needs it. Compute it when scoring.")
    return value


def counted_rows(batch: RolloutBatch, truncated: Truncated) -> Tensor:
    """[N] bool: rows that enter group statistics, losses and denominators."""
    return batch.gradable & ~batch.truncated if truncated == "drop" else batch.gradable.clone()


def broadcast(advantage: Tensor, batch: RolloutBatch) -> Tensor:
    """[N, T] float32: every response token has its row's advantage, all else 0.0."""
    return advantage.float().unsqueeze(1) * batch.response_mask


def check_finite(batch: RolloutBatch, name: str, value: Tensor, where: Tensor) -> None:
    """Raise TrainingError naming the problem and the sample unless `value` ([N] or [N, T]) is finite on `where`."""
    bad = ~value.isfinite() & where
    if not bad.any():
        return
    place = bad.nonzero()[0]
    row = int(place[0])
    group = int(batch.group[row])
    sample = int((batch.group[:row] == group).sum())
    number = value[tuple(place)].item()
    kind = "NaN" if math.isnan(number) else str(number)
    raise TrainingError(
        f"{name}: {kind} in sample {sample} of problem {batch.problems[group].id!r}; it must be finite. "
        "The last checkpoint is intact: look at that response, its reward, and the policy's weights."
    )
