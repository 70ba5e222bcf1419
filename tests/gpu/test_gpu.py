"""What only hardware can show. Run on a machine with a GPU: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capo_megatron.config import ParallelConfig, TrainConfig
from capo_megatron.weights.checkpoint import open_checkpoint
from capo_megatron.weights.convert import hf_to_megatron
from capo_megatron.weights.shape import ModelShape
from tests.parallel.launch import run_ranks
from tests.parallel.test_convert_layouts import SHAPES
from tests.parallel.test_policy_parity import COMBINATIONS, random_weights, run, train_batch
from tests.unit.test_convert import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no TransformerEngine")
# bfloat16 keeps 8 bits of mantissa; log-probs of a few nats then differ by about 1e-2 between kernels.
BFLOAT16 = 3e-2


def score_and_step(device: str, dtype: str) -> dict[str, Any]:
    """Log-probs of a random model, and the report of one CAPO step."""
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.model import DTYPES
    from capo_megatron.mcore.policy import MegatronPolicy
    from capo_megatron.weights.sources import DictSource

    ranks = runtime.start(ParallelConfig(), seed=1, device=device)
    shape = ModelShape(1031, 256, 4, 4, 2, 512, initializer_range=0.1)
    policy = MegatronPolicy(shape, ranks, TrainConfig(lr=1e-4), dtype=DTYPES[dtype], total_steps=3)
    policy.load(DictSource(random_weights(shape)))
    policy.freeze_reference()
    algorithm, batch = train_batch(policy)
    report = policy.train_step(batch, algorithm.loss)
    return {
        "logprobs": policy.score(batch.rollouts, which="reference").logprobs.numpy(),
        "grad_norm": report.grad_norm,
        "skipped": report.skipped,
    }


@needs_te
def test_transformer_engine_gives_the_log_probs_of_the_local_layers() -> None:
    """The CPU runs local layers, the GPU TransformerEngine's."""
    here = run_ranks(score_and_step, 1, "cpu", "float32")[0]
    there = run_ranks(score_and_step, 1, "cuda", "bfloat16")[0]
    assert there["skipped"] is None
    np.testing.assert_allclose(there["logprobs"], here["logprobs"], atol=BFLOAT16, rtol=BFLOAT16)
    assert abs(there["grad_norm"] / here["grad_norm"] - 1) < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig()])
def test_nccl_layouts_give_the_numbers_of_one_gpu(parallel: ParallelConfig) -> None:
    want = run_ranks(run, 1, ParallelConfig(), 10_000, COMBINATIONS)[0]
    for found in run_ranks(run, 2, parallel, 64, COMBINATIONS):
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got["logprobs"], expected["logprobs"], atol=1e-4)
            np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-3, atol=1e-5)


def test_checkpoint_and_random_states_survive_on_a_gpu(tmp_path: Path) -> None:
    for want, got in run_ranks(_round_trip, 1, str(tmp_path)):
        assert got == pytest.approx(want, rel=1e-4)


@needs_te
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_converted_model_loads_into_transformer_engines_layers(tmp_path: Path, shape: ModelShape) -> None:
    make(tmp_path / "hf", shape, torch.float32)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    want, got = run_ranks(_logits_of_both, 1, tmp_path)[0]
    np.testing.assert_allclose(got, want, atol=1e-2 * abs(want).max())  # TF32 products keep 10 bits


def _logits_of_both(folder: Path) -> tuple[Any, Any]:
    from capo_megatron.mcore.logits import logits

    tokens = torch.arange(24).view(2, 12)
    found = (logits(open_checkpoint(folder / name), tokens, "cuda") for name in ("hf", "megatron"))
    want, got = (one.numpy() for one in found)
    return want, got


def _round_trip(folder: str) -> list[Any]:
    from tests.parallel.test_checkpoint import bfloat16_round_trip

    return bfloat16_round_trip(folder, ParallelConfig())
