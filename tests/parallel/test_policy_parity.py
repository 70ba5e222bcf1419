"""The same numbers from every layout: log-probs, entropies, top-k, losses, gradient norms, weights after three steps.

One rank with one micro-batch is the yardstick. Every layout runs with a small token budget, so that each also has
another split into micro-batches. Each layout is started once and runs every combination of algorithm and optimizer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from capo_megatron.algorithms import build
from capo_megatron.algorithms.capo import CapoConfig
from capo_megatron.algorithms.grpo import GrpoConfig
from capo_megatron.config import ParallelConfig, TrainConfig
from capo_megatron.seams import Algorithm, Signal
from capo_megatron.types import Problem, RolloutBatch, Segment, Signals, TrainBatch
from tests.parallel.launch import run_ranks

# Float32 sums in another order: a few units in the last place, amplified by three optimizer steps.
TOLERANCE = 1e-5

LAYOUTS = {
    "one rank, small micro-batches": (1, ParallelConfig(), 40),
    "one rank, one row each": (1, ParallelConfig(), 1),
    "TP2": (2, ParallelConfig(tensor=2), 64),
    "PP2": (2, ParallelConfig(pipeline=2), 64),
    "DP2": (2, ParallelConfig(), 64),
    "TP2 x PP2": (4, ParallelConfig(tensor=2, pipeline=2), 64),
    "TP2 x DP2": (4, ParallelConfig(tensor=2), 64),
    "PP2 x DP2": (4, ParallelConfig(pipeline=2), 64),
    "PP2 with 2 virtual stages": (2, ParallelConfig(pipeline=2, virtual=2), 64),
    "TP2 with sequence parallel": (2, ParallelConfig(tensor=2, sequence=True), 64),
    "TP2 x PP2 with sequence parallel": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True), 64),
}
ALGORITHMS = {"capo": CapoConfig(), "grpo": GrpoConfig()}


def rollouts(problems: int = 4, samples: int = 4, prompt: int = 3, longest: int = 14, vocab: int = 19) -> RolloutBatch:
    """Random responses of mixed lengths, one of them empty, right and wrong ones in every group."""
    generator = torch.Generator().manual_seed(0)
    rows, targets = problems * samples, prompt + longest - 1
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    lengths[3] = 0
    column = torch.arange(targets)
    mask = (column >= prompt - 1) & (column < prompt - 1 + lengths[:, None])
    tokens = torch.randint(0, vocab, (rows, targets + 1), generator=generator)
    correct = (torch.arange(rows) % samples < torch.tensor([1, 2, 3, 2]).repeat_interleave(samples)).float()
    return RolloutBatch(
        problems=tuple(Problem(str(index), "", (), "") for index in range(problems)),
        tokens=tokens,
        response_mask=mask,
        segment=mask.to(torch.uint8) * Segment.REASONING,
        group=torch.arange(problems).repeat_interleave(samples),
        rewards={"reward": correct, "correct": correct},
        gradable=torch.ones(rows, dtype=torch.bool),
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler_logprobs=torch.zeros(rows, targets),
        policy_version=0,
    )


def run(
    parallel: ParallelConfig, budget: int, combinations: tuple[tuple[str, bool, bool], ...]
) -> list[dict[str, Any]]:
    """Score and train on this rank; what it saw, for each (algorithm, distributed optimizer, tied head)."""
    from capo_megatron.mcore import runtime

    ranks = runtime.start(parallel, seed=1)
    return [one_run(ranks, parallel, budget, *combination) for combination in combinations]


def one_run(
    ranks: Any, parallel: ParallelConfig, budget: int, name: str, distributed: bool, tied: bool
) -> dict[str, Any]:
    from capo_megatron.mcore.policy import MegatronPolicy
    from capo_megatron.weights.shape import ModelShape
    from capo_megatron.weights.sources import DictSource

    shape = ModelShape(
        vocab_size=19,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    config = TrainConfig(lr=1e-3, micro_batch_tokens=budget, logprob_chunk_tokens=16, betas=(0.9, 0.95), eps=1e-6)
    policy = MegatronPolicy(
        shape, ranks, config, dtype=torch.float32, total_steps=3, temperature=0.8, distributed_optimizer=distributed
    )
    policy.load(DictSource(random_weights(shape)))
    policy.freeze_reference()
    batch = rollouts()
    needs = frozenset({Signal.ENTROPY, Signal.TOPK})
    scored = policy.score(batch, needs, top_k=3)
    assert scored.entropy is not None and scored.topk is not None
    algorithm, whole = train_batch(policy, name)
    reference = whole.signals.ref_logprobs
    reports = [policy.train_step(whole, algorithm.loss, algorithm.loss_needs) for _ in range(3)]
    after = policy.score(batch, which="reference").logprobs
    return {
        "logprobs": scored.logprobs.numpy(),
        "entropy": scored.entropy.numpy(),
        "topk": scored.topk.logprobs.numpy(),
        "reference_unchanged": np.array(float((after - reference).abs().max())),
        "loss": np.array([report.loss for report in reports]),
        "grad_norm": np.array([report.grad_norm for report in reports]),
        "ratio_max": np.array([report.metrics["ratio_max"] for report in reports]),
        "clip_share": np.array([report.metrics["clip_share"] for report in reports]),
        "weights": {name: tensor.numpy().copy() for name, tensor in policy.hf_weights()},
    }


def train_batch(policy: Any, name: str = "capo") -> tuple[Algorithm, TrainBatch]:
    """An algorithm, and a mini-batch for it whose old log-probs lie around the policy's, so that ratios leave one."""
    algorithm, batch = build(ALGORITHMS[name]), rollouts()
    now = policy.score(batch).logprobs
    noise = torch.randn(now.shape, generator=torch.Generator().manual_seed(2))
    signals = Signals((now + 0.2 * noise) * batch.response_mask, policy.score(batch, which="reference").logprobs)
    return algorithm, TrainBatch(batch, signals, algorithm.estimator(batch, signals), algorithm.reduction(batch))


def random_weights(shape: Any) -> dict[str, torch.Tensor]:
    """Seeded Hugging Face weights with QKV biases that are not zero."""
    from capo_megatron.weights.table import hf_shapes

    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(size, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, size in hf_shapes(shape).items()
    }


COMBINATIONS = (("capo", True, True), ("capo", False, False), ("grpo", True, False), ("grpo", False, True))


@cache
def yardstick() -> list[dict[str, Any]]:
    return run_ranks(run, 1, ParallelConfig(), 10_000, COMBINATIONS)[0]


@pytest.mark.parallel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_numbers_of_one_rank(layout: str) -> None:
    size, parallel, budget = LAYOUTS[layout]
    for rank, found in enumerate(run_ranks(run, size, parallel, budget, COMBINATIONS)):
        for combination, got, want in zip(COMBINATIONS, found, yardstick(), strict=True):
            for name, value in want.items():
                pairs = value.items() if isinstance(value, dict) else [(name, value)]
                for key, expected in pairs:
                    actual = got[name][key] if isinstance(value, dict) else got[name]
                    error = np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-6)
                    assert error <= TOLERANCE, f"rank {rank}, {combination}, {key}: relative error {error:.1e}"


def test_the_yardstick_trains() -> None:
    """Guards the comparison itself: weights move, and ratios leave one."""
    for found in yardstick():
        assert found["grad_norm"].min() > 1e-3
        assert found["reference_unchanged"] == 0.0
        assert found["clip_share"].max() > 0.0
