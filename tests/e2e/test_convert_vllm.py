"""What comes out of a conversion, served by vLLM. Runs where vLLM is installed, also its build for CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from capo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from capo_megatron.weights.huggingface import save_hf
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes

SIZES = {
    "vocab_size": 301,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "head_dim": 64,  # vLLM's attention on CPUs wants it so
}
SHAPES = {
    "qwen2": ModelShape(**SIZES | {"hidden_size": 256}, tie_word_embeddings=True),
    "qwen3": ModelShape(**SIZES, model_type="qwen3"),
    "llama": ModelShape(**SIZES, model_type="llama", rope_scaling_factor=8.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_vllm_serves_the_tokens_that_transformers_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    vllm = pytest.importorskip("vllm")
    shape = SHAPES[kind]
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, size in hf_shapes(shape).items():
        centre, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.2)
        weights[name] = torch.randn(size, generator=generator) * spread + centre
    save_hf(tmp_path / "hf", shape, weights.items())
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=200_000)

    prompts = [[5, 17, 200], [300, 1, 2, 3, 4], [42]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    wanted = []
    for prompt in prompts:
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
        )
        wanted.append(found[0, len(prompt) :].tolist())
    engine = vllm.LLM(
        model=str(tmp_path / "back"), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64
    )
    options = vllm.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    served = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in served] == wanted
    assert len({token for answer in wanted for token in answer}) > 5, "the model always says the same"
