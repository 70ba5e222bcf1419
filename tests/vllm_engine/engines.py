"""vLLM engines on tiny models, beside the Hugging Face model that they should equal."""

from __future__ import annotations

from functools import cache

import torch
from transformers import Qwen2ForCausalLM

from capo_megatron.config import VllmConfig
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.types import Problem
from capo_megatron.weights.shape import ModelShape
from tests.unit.tiny_qwen2 import NumberTokenizer, tiny_model

VOCABULARY = 151
# vLLM's attention on CPUs wants heads of 64; a prompt of 100 tokens fills blocks of the prefix cache.
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "vocab_size": VOCABULARY, "num_hidden_layers": 3}
UNTIED_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # of `wide_model`, untied, as a config has it


def wide_model(seed: int = 0, tied: bool = True) -> Qwen2ForCausalLM:
    """With a tied head two query heads share a key-value head; untied they have one each, so that q can pass for k."""
    heads = 1 if tied else 2
    return tiny_model(seed, **WIDE, num_key_value_heads=heads, tie_word_embeddings=tied, initializer_range=0.1)


@cache
def engine(tied: bool) -> VllmEngine:
    """The process's only engine of its kind: starting one takes ten seconds."""
    return VllmEngine(
        ModelShape(VOCABULARY, 128, 3, 2, 1 if tied else 2, 48, 256, tie_word_embeddings=tied),
        NumberTokenizer(),
        "float32",
        VllmConfig(bucket_mib=1, batch_size=64),
    )


def long_problems(count: int) -> list[Problem]:
    """Problems with prompts of 150, 151, ... random tokens."""
    generator = torch.Generator().manual_seed(5)
    return [
        Problem(f"problem-{i}", "", tuple(torch.randint(0, VOCABULARY, (150 + i,), generator=generator).tolist()), "")
        for i in range(count)
    ]
