"""The vLLM engine on a GPU: refits of a sleeping engine, its tokens and log-probs.

    python -m pytest -m gpu tests/gpu/test_vllm.py

On several GPUs also: torchrun --nproc-per-node 2 -m pytest -m gpu tests/gpu/test_vllm.py, which cuts one engine in two.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from capo_megatron.config import ParallelConfig, VllmConfig
from capo_megatron.mcore import runtime
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.seams import SamplingParams
from capo_megatron.weights.shape import ModelShape
from tests.unit.tiny_qwen2 import ModelPolicy, NumberTokenizer, Prompts, weights_of
from tests.vllm_engine.engines import VOCABULARY, long_problems, wide_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


@cache
def engine() -> tuple[VllmEngine, runtime.Runtime]:
    pytest.importorskip("vllm")
    team = runtime.start(ParallelConfig(), seed=0)
    shape = ModelShape(VOCABULARY, 128, 3, 2, 2, 48, 256, tie_word_embeddings=False)
    options = VllmConfig(tensor=RANKS, memory_fraction=0.1, bucket_mib=1, batch_size=64)
    return VllmEngine(shape, NumberTokenizer(), "float32", options, team.rank, team.size), team


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sleeping_engine_wakes_with_the_new_weights(temperature: float) -> None:
    ours, team = engine()
    probe, params = Probe(4, 1e-2, 1e-4), SamplingParams(12, temperature)
    for version in range(3):
        model = wide_model(version, tied=False)
        ours.wake()
        ours.load_weights(weights_of(model), version)
        policy = ModelPolicy(model, version, temperature)
        metrics = probe.prove(ours, policy, Prompts(long_problems(20)), params, team, 0)
        assert metrics["refit/gap_median"] < 1 + 1e-3
        assert not differing(sketches(weights_of(model)), ours.sketches(), 1e-4)
        ours.sleep()


def test_sleep_gives_the_memory_back() -> None:
    ours, _ = engine()
    ours.wake()
    ours.load_weights(weights_of(wide_model(0, tied=False)), 0)
    awake = torch.cuda.mem_get_info()[0]
    ours.sleep()
    freed = torch.cuda.mem_get_info()[0] - awake
    total = torch.cuda.mem_get_info()[1]
    assert freed > 0.05 * total, f"{freed / 2**30:.2f} GiB"
