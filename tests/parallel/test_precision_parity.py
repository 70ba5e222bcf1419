"""What FP8 asks of a policy, as far as a CPU has it: padded micro-batches, weights made again from the optimizer's.

Without TransformerEngine Megatron-core multiplies as before, so every number has to stay what it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from capo_megatron.config import ParallelConfig, PrecisionConfig, TrainConfig
from tests.parallel.launch import run_ranks
from tests.parallel.test_policy_parity import TOLERANCE, random_weights, rollouts, train_batch

pytestmark = pytest.mark.parallel

LAYOUTS = {
    "one rank": (1, ParallelConfig()),
    "TP2 with sequence parallelism": (2, ParallelConfig(tensor=2, sequence=True)),
    "PP2 with 2 virtual stages": (2, ParallelConfig(pipeline=2, virtual=2)),
    "DP2": (2, ParallelConfig()),
}


def make_policy(parallel: ParallelConfig, precision: PrecisionConfig | None, dtype: torch.dtype) -> Any:
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.policy import MegatronPolicy
    from capo_megatron.weights.shape import ModelShape
    from capo_megatron.weights.sources import DictSource

    ranks = runtime.start(parallel, seed=1)
    shape = ModelShape(19, 32, 4, 4, 2, 48, tie_word_embeddings=True, initializer_range=0.1)
    config = TrainConfig(lr=1e-3, micro_batch_tokens=64, betas=(0.9, 0.95), eps=1e-6)
    policy = MegatronPolicy(shape, ranks, config, dtype=dtype, total_steps=3, precision=precision)
    # Such as bfloat16 can hold: the optimizer is given the file's own numbers where FP8 rounds those of the model.
    policy.load(DictSource({name: weight.to(dtype).float() for name, weight in random_weights(shape).items()}))
    policy.freeze_reference()
    return policy


def numbers(parallel: ParallelConfig, precision: PrecisionConfig | None) -> dict[str, Any]:
    policy = make_policy(parallel, precision, torch.float32)
    algorithm, batch = train_batch(policy)
    reports = [policy.train_step(batch, algorithm.loss) for _ in range(2)]
    return {
        "logprobs": policy.score(rollouts()).logprobs.numpy(),
        "loss": np.array([report.loss for report in reports]),
        "grad_norm": np.array([report.grad_norm for report in reports]),
        "reference": policy.score(rollouts(), which="reference").logprobs.numpy(),
    }


@cache
def yardstick() -> dict[str, Any]:
    return run_ranks(numbers, 1, ParallelConfig(), None)[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_for_fp8_changes_no_number(layout: str, recipe: Any) -> None:
    size, parallel = LAYOUTS[layout]
    for found in run_ranks(numbers, size, parallel, PrecisionConfig(fp8=recipe)):
        for name, want in yardstick().items():
            assert np.linalg.norm(found[name] - want) <= TOLERANCE * np.linalg.norm(want), name


def restored(parallel: ParallelConfig) -> dict[str, bool]:
    """Whether a reference pass, which cannot copy FP8 weights back, and an overwritten model end where they began."""
    gathered = PrecisionConfig(fp8="tensorwise", param_gather=True)
    policy, plain = (make_policy(parallel, precision, torch.bfloat16) for precision in (gathered, None))
    outcome = {}
    for step in range(2):
        before = {name: weight.clone() for name, weight in policy.hf_weights()}
        policy.score(rollouts(), which="reference")
        after = dict(policy.hf_weights())
        outcome[f"step {step}"] = all(torch.equal(after[name], weight) for name, weight in before.items())
        for one in (policy, plain):
            algorithm, batch = train_batch(one)
            one.train_step(batch, algorithm.loss)
    pairs = zip(policy.hf_weights(), plain.hf_weights(), strict=True)
    outcome["trains as without"] = all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
    outcome["reference"] = torch.equal(
        policy.score(rollouts(), which="reference").logprobs, plain.score(rollouts(), which="reference").logprobs
    )
    return outcome


@pytest.mark.parametrize("layout", ["one rank", "DP2", "PP2 with 2 virtual stages"])
def test_weights_come_back_from_the_optimizer_bit_for_bit(layout: str) -> None:
    size, parallel = LAYOUTS[layout]
    for outcome in run_ranks(restored, size, parallel):
        assert all(outcome.values()), outcome


def delayed_scaling() -> dict[str, Any]:
    """A policy whose activations record their largest input as delayed scaling does, and what is seen of that."""
    from capo_megatron.mcore.layers import SwiGLU

    passes: list[tuple[bool, bool]] = []
    compute = SwiGLU.forward

    def forward(self: Any, values: torch.Tensor) -> torch.Tensor:
        passes.append((torch.is_grad_enabled(), self.training))
        self.history = torch.maximum(self.get_fp8_meta_tensors() or torch.zeros(()), values.detach().abs().max())
        return compute(self, values)

    SwiGLU.fp8_meta = {}
    SwiGLU.get_fp8_meta_tensors = lambda self: vars(self).get("history")
    SwiGLU.reset_fp8_meta_tensors = lambda self, tensors=None: vars(self).update(history=tensors)
    SwiGLU.forward = forward
    policy = make_policy(ParallelConfig(), PrecisionConfig(fp8="delayed"), torch.float32)
    modules = [module for model in policy._models for module in model.modules() if isinstance(module, SwiGLU)]

    def histories() -> list[float]:
        return [float(module.history) for module in modules]

    policy.score(rollouts())
    seen = {"first passes": passes[: len(modules)], "calibrated": histories()}
    first = len(passes)
    policy.score(rollouts(), which="reference")
    seen["scored"], seen["without gradients"] = histories(), not any(grad for grad, _ in passes[first:])
    algorithm, batch = train_batch(policy)
    policy.train_step(batch, algorithm.loss)
    return {**seen, "trained": histories(), "later passes": passes[first:]}


def test_delayed_scaling_gets_scales_before_the_first_log_prob_and_only_training_moves_them() -> None:
    seen = run_ranks(delayed_scaling, 1)[0]
    assert seen["first passes"] == [(True, False)] * 4, "with gradients, or TransformerEngine would not set a scale"
    assert seen["scored"] == seen["calibrated"] and seen["without gradients"]
    assert min(seen["calibrated"]) > 0
    assert seen["trained"] > seen["scored"], "another row of the batch has a larger value"
