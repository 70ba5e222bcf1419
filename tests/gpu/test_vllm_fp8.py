"""The vLLM engine with FP8 weights on a GPU; with -s it prints the gaps.

    python -m pytest -m gpu tests/gpu/test_vllm_fp8.py

vLLM's kernels for it, what they make of weights after loading, CUDA graphs and sleep are met here alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capo_megatron.config import ParallelConfig, VllmConfig
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.seams import SamplingParams
from capo_megatron.weights.blockwise import rounded
from capo_megatron.weights.shape import ModelShape
from tests.parallel.launch import run_ranks
from tests.unit.tiny_qwen2 import ModelPolicy, NumberTokenizer, Prompts, tiny_model, weights_of
from tests.vllm_engine.engines import VOCABULARY, long_problems

SMALLEST = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=(0, 0))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SMALLEST < (8, 9), reason="needs a GPU with FP8")]
RANKS = pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]
)
EAGER = pytest.mark.parametrize("eager", [True, False], ids=["eager", "CUDA graphs"])
ROUNDING = 3e-2


def model_of(seed: int) -> Any:
    changes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    wide = {**changes, "vocab_size": VOCABULARY, "initializer_range": 0.02, "tie_word_embeddings": False}
    return tiny_model(seed, **wide).bfloat16()


def refits(ranks: int, eager: bool) -> list[dict[str, Any]]:
    """What each of a few refits leaves, between which the engine sleeps."""
    from capo_megatron.mcore import runtime

    team = runtime.start(ParallelConfig(), seed=0)
    shape = ModelShape(VOCABULARY, 512, 2, 8, 4, 1024, 256, tie_word_embeddings=False)
    options = VllmConfig(weights="fp8", tensor=ranks, memory_fraction=0.1, bucket_mib=1, batch_size=64, eager=eager)
    engine = VllmEngine(shape, NumberTokenizer(), "bfloat16", options, team.rank, team.size)
    probe, params, found = Probe(4, 1e9, ROUNDING, rounded), SamplingParams(12, 0.7), []
    for version in range(4):
        model = model_of(version)
        engine.wake()
        engine.load_weights(weights_of(model), version)
        policy = ModelPolicy(model, version, params.temperature)
        metrics = probe.prove(engine, policy, Prompts(long_problems(20)), params, team, 0)
        wrong = differing(sketches(rounded(weights_of(model))), engine.sketches(), ROUNDING)
        found.append({"wrong": wrong, **metrics})
        engine.sleep()
    return found


@RANKS
@EAGER
def test_every_refit_arrives_and_stays_near_the_policy(ranks: int, eager: bool) -> None:
    """Also after sleep, which drops weights and scales, and with CUDA graphs, which keep the addresses of both."""
    for found in run_ranks(refits, ranks, ranks, eager, timeout_s=600.0)[0]:
        print(f"\nFP8 weights, {ranks} GPUs, eager={eager}: {found}")
        assert found["wrong"] == []
        assert 1 + 1e-4 < found["refit/gap_median"] < 1 + 1e-1, "1 would mean that nothing was in FP8"
