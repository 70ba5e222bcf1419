"""FP8 weights through vLLM's own loader: what it holds, samples and scores after each refit.

Its FP8 kernels are for GPUs (and for CPUs with AMX). Here one stands in that computes the same with plain numbers;
config, names, shapes, loading and the way back from a kernel's format are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from transformers import Qwen2ForCausalLM
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils import deep_gemm

from capo_megatron.config import VllmConfig
from capo_megatron.errors import RolloutError
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.seams import SamplingParams, Solo
from capo_megatron.weights.blockwise import dequantise, quantise, rounded
from capo_megatron.weights.shape import ModelShape
from tests.unit.tiny_qwen2 import ModelPolicy, NumberTokenizer, Prompts, tiny_model, weights_of
from tests.vllm_engine.engines import VOCABULARY, long_problems

SHAPE = ModelShape(VOCABULARY, 256, 2, 4, 2, 384, 256, tie_word_embeddings=False)
ROUNDING = 3e-2
PARAMS = SamplingParams(12, temperature=0.7)


class PlainKernel(Fp8BlockScaledMMLinearKernel):
    """Multiplies in float32 what the FP8 numbers stand for. Keeps the weight transposed, and its scales spread."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        params: Any = self._get_layer_params(layer)
        spread = params.weight_scale_inv.repeat_interleave(128, 1).t().contiguous()
        replace_parameter(layer, "weight", params.weight.t().contiguous())
        replace_parameter(layer, "weight_scale_inv", spread)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        spread = layer.weight_scale_inv.repeat_interleave(128, 1)
        product = rounded_inputs(x.float()) @ (layer.weight.float() * spread)
        return (product if bias is None else product + bias).to(x.dtype)

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise AssertionError("apply_weights does all")


def rounded_inputs(x: Tensor) -> Tensor:
    """Inputs in FP8, with a scale for 128 numbers of a token."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def model_of(seed: int) -> Qwen2ForCausalLM:
    changes = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": VOCABULARY, "initializer_range": 0.04}
    return tiny_model(seed, **changes, tie_word_embeddings=False).bfloat16()


def policy_of(seed: int, version: int) -> ModelPolicy:
    return ModelPolicy(model_of(seed), version, PARAMS.temperature)


@cache
def engine() -> VllmEngine:
    options = VllmConfig(weights="fp8", bucket_mib=1, batch_size=64)
    return VllmEngine(SHAPE, NumberTokenizer(), "bfloat16", options)


@pytest.fixture(autouse=True)
def kernel_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels: Any = linear._POSSIBLE_FP8_BLOCK_KERNELS
    monkeypatch.setitem(kernels, current_platform._enum, [PlainKernel])
    yield


def test_what_vllm_makes_of_weights_for_deepgemm_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = deep_gemm.per_block_cast_to_fp8
    monkeypatch.setattr(deep_gemm, "per_block_cast_to_fp8", whole._torchdynamo_orig_callable)  # compiling takes a while
    weight = torch.randn(300, 384, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    weight[128:256, :128] *= 1e-4
    values, scale = quantise(weight)
    before = dequantise(values, scale)
    requant_weight_ue8m0_inplace(values, scale)
    assert torch.equal(dequantise(values, scale), before)


def test_vllm_has_the_layers_products_in_fp8_and_nothing_else() -> None:
    def dtypes(model: torch.nn.Module) -> dict[str, str]:
        return {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in model.named_parameters()}

    found = engine()._llm.apply_model(dtypes)[0]
    in_fp8 = {name.rpartition(".")[0].rpartition(".")[2] for name, dtype in found.items() if dtype == "float8_e4m3fn"}
    assert in_fp8 == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    others = {name for name, dtype in found.items() if dtype == "bfloat16"}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.qkv_proj.bias"} <= others


def test_every_refit_arrives_and_stays_near_the_policy() -> None:
    ours, proof = engine(), Probe(4, 1e-1, ROUNDING, rounded)
    for version in range(3):
        ours.load_weights(weights_of(model_of(version)), version)
        assert not differing(sketches(rounded(weights_of(model_of(version)))), ours.sketches(), 1e-2)
        metrics = proof.prove(ours, policy_of(version, version), Prompts(long_problems(20)), PARAMS, Solo(), 0)
        print(f"\nversion {version}: {metrics}")
        assert metrics["refit/gap_median"] > 1 + 1e-4, "nothing was in FP8"


def test_old_weights_are_told_from_rounding() -> None:
    ours, proof = engine(), Probe(4, 1e-1, ROUNDING, rounded)
    for version in (0, 1):
        ours.load_weights(weights_of(model_of(version)), version)
        proof.prove(ours, policy_of(version, version), Prompts(long_problems(20)), PARAMS, Solo(), 0)
    ours.load_weights(weights_of(model_of(1)), 2)
    with pytest.raises(RolloutError, match="The engine still has the weights of version 1"):
        proof.prove(ours, policy_of(2, 2), Prompts(long_problems(20)), PARAMS, Solo(), 0)
    ours.load_weights(weights_of(model_of(2)), 2)
    strict = Probe(4, 1e-6, ROUNDING, rounded)
    with pytest.raises(RolloutError, match="The weights are equal, so it is what is computed with them"):
        strict.prove(ours, policy_of(2, 2), Prompts(long_problems(20)), PARAMS, Solo(), 0)


def test_a_weight_that_did_not_come_leaves_no_usable_engine() -> None:
    ours, weights = engine(), weights_of(model_of(0))
    with pytest.raises(RolloutError, match=rf"1 missing: {weights[1][0]}"):
        ours.load_weights(weights[:1] + weights[2:], 1)
    assert ours.version == -1
    ours.load_weights(weights, 2)
    assert len(ours.generate(long_problems(1), 1, SamplingParams(4))[0][0].ids) == 4
