"""Coefficients that change while a run proceeds, as functions of its progress: nothing to save, nothing to lose."""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine", "staircase"]


def scheduled(kind: ScheduleKind, start: float, end: float, until: float, progress: float) -> float:
    """The coefficient when `progress` (0 to 1) of a run's steps are done.

    constant: `start` for ever. linear, cosine: from `start` to `end`, which is reached at `until` and kept.
    staircase: `start` before `until`, `end` from there on.
    """
    if kind == "constant":
        return start
    share = min(progress / until, 1.0) if until > 0 else 1.0
    if kind == "staircase":
        return end if share >= 1 else start
    if kind == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return start + (end - start) * share
