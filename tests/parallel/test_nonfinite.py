"""A loss or gradient that is not finite is named, and leaves weights, optimizer and schedule as they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capo_megatron.config import ParallelConfig
from capo_megatron.seams import PolicyLoss
from capo_megatron.types import PolicyOutputs, TokenLoss, TrainBatch
from tests.parallel.launch import run_ranks
from tests.parallel.test_checkpoint import make_policy
from tests.parallel.test_policy_parity import train_batch

pytestmark = pytest.mark.parallel

LAYOUTS = {
    "one rank": (1, ParallelConfig(), torch.float32),
    "one rank, bfloat16": (1, ParallelConfig(), torch.bfloat16),
    "DP2": (2, ParallelConfig(), torch.float32),
    "DP2, plain optimizer": (2, ParallelConfig(distributed_optimizer=False), torch.float32),
    "PP2": (2, ParallelConfig(pipeline=2), torch.float32),
}
ROW = 9  # of problem 2; a single row, so that a single data-parallel rank sees it


def run(parallel: ParallelConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A good step, a poisoned one, a good one: what the last two reported and left, for each poison and for none."""
    from capo_megatron.mcore import runtime

    ranks = runtime.start(parallel, seed=1)
    return [one_run(ranks, parallel, dtype, poison) for poison in (None, poison_loss, poison_gradient)]


def one_run(ranks: Any, parallel: ParallelConfig, dtype: torch.dtype, poison: Callable | None) -> dict[str, Any]:
    policy = make_policy(ranks, parallel, dtype)
    algorithm, batch = train_batch(policy)
    mark = torch.zeros(len(batch.rollouts), dtype=torch.bool)
    mark[ROW] = True
    marked = replace(batch, rollouts=replace(batch.rollouts, truncated=mark))  # which this loss does not look at
    policy.train_step(marked, algorithm.loss)
    found: dict[str, Any] = {}
    if poison is not None:
        before, version = weights(policy), policy.version
        found["report"] = policy.train_step(marked, lambda now, mb: poison(algorithm.loss, now, mb))
        found["moved"] = [name for name, value in weights(policy).items() if not torch.equal(value, before[name])]
        found["versions"] = policy.version - version
    report = policy.train_step(marked, algorithm.loss)
    return found | {"after": (report.loss, report.grad_norm, report.lr), "weights": weights(policy)}


def poison_loss(loss: PolicyLoss, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
    value = loss(now, mb)
    return replace(value, loss=torch.where(bad(mb), torch.nan, value.loss))


def poison_gradient(loss: PolicyLoss, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
    now.logprobs.register_hook(lambda gradient: torch.where(bad(mb), torch.inf, gradient))
    return loss(now, mb)


def bad(mb: TrainBatch) -> Tensor:
    return mb.rollouts.truncated.unsqueeze(1) & mb.rollouts.response_mask


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_is_named_and_changes_nothing(layout: str) -> None:
    size, parallel, dtype = LAYOUTS[layout]
    for want, loss, gradient in run_ranks(run, size, parallel, dtype):
        assert loss["report"].skipped == "non-finite loss: problem 2"
        assert np.isnan(loss["report"].loss)
        assert re.fullmatch(r"non-finite gradient: [a-z_.0-9]+\.weight on rank 0", gradient["report"].skipped)
        assert np.isfinite(gradient["report"].loss)
        for found in (loss, gradient):
            assert (found["moved"], found["versions"]) == ([], 0)
            assert found["after"] == want["after"]
            assert all(torch.equal(value, want["weights"][name]) for name, value in found["weights"].items())
