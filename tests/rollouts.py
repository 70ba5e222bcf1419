"""Small rollouts for tests of what works on a step's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from capo_megatron.types import Problem, RolloutBatch, Signals, TrainBatch

PROMPT = 2


def make_batch(
    lengths: Sequence[int],
    correct: Sequence[int],
    group: Sequence[int],
    *,
    reward: Sequence[float] | None = None,
    gradable: Sequence[int] | None = None,
    truncated: Sequence[int] | None = None,
    sampler: Tensor | None = None,
    extra: dict[str, Tensor] | None = None,
) -> RolloutBatch:
    """Rows of a two-token prompt and a response of the given length."""
    rows, targets = len(lengths), PROMPT - 1 + max(lengths, default=0) + 1
    column = torch.arange(targets)
    mask = (column >= PROMPT - 1) & (column < PROMPT - 1 + torch.tensor(lengths).unsqueeze(1))
    right = torch.tensor(correct, dtype=torch.float32)
    rewards = {"correct": right, "reward": right.clone() if reward is None else torch.tensor(reward)}
    return RolloutBatch(
        problems=tuple(Problem(f"problem-{index}", "", (1, 2), "") for index in range(max(group, default=0) + 1)),
        tokens=torch.ones(rows, targets + 1, dtype=torch.int64),
        response_mask=mask,
        segment=torch.zeros(rows, targets, dtype=torch.uint8),
        group=torch.tensor(group),
        rewards=rewards | (extra or {}),
        gradable=torch.ones(rows, dtype=torch.bool) if gradable is None else torch.tensor(gradable).bool(),
        truncated=torch.zeros(rows, dtype=torch.bool) if truncated is None else torch.tensor(truncated).bool(),
        sampler_logprobs=torch.zeros(rows, targets) if sampler is None else sampler,
        policy_version=0,
    )


def spread(mean: Sequence[float], batch: RolloutBatch) -> Tensor:
    """[N, T] log-probs: each response token has its row's value, all else 0.0."""
    return torch.tensor(mean, dtype=torch.float32).unsqueeze(1) * batch.response_mask


def signals(mean: Sequence[float], batch: RolloutBatch, reference: Sequence[float] | None = None) -> Signals:
    """Old (and reference) log-probs with these means per row."""
    return Signals(spread(mean, batch), None if reference is None else spread(reference, batch))


def train_batch(batch: RolloutBatch, scored: Signals, advantages: Tensor, weights: Tensor | None = None) -> TrainBatch:
    """A mini-batch of these rows; weights default to 1 on response tokens."""
    return TrainBatch(batch, scored, advantages, batch.response_mask.float() if weights is None else weights)
