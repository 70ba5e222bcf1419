"""Tokens per second of both rollout engines, in turn, on the same prompts.

    make .venv-vllm/.installed
    .venv-vllm/bin/python tests/bench/rollout.py [--models laptop MODEL] [--batches 8 32 64] [--tokens 64] [--rounds 3]

`laptop` is a Qwen2 of 4 layers, hidden 128 and 2 heads of 64 (vLLM's attention on CPUs wants them so), with random
weights. MODEL is a Hugging Face directory of an architecture that both know, e.g. SmolLM2-135M's. Every response has
exactly `tokens` tokens. The median of the rounds after a first one, and the ratio.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig

from capo_megatron.config import VllmConfig
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.rollout.vllm import VllmEngine
from capo_megatron.seams import SamplingParams
from capo_megatron.types import Problem
from capo_megatron.weights.checkpoint import open_checkpoint
from capo_megatron.weights.shape import ModelShape, hf_config, read_shape
from capo_megatron.weights.sources import RandomSource, WeightSource
from capo_megatron.weights.table import hf_shapes

LAPTOP = ModelShape(151, 128, 4, 2, 2, 256, 512, tie_word_embeddings=True)
PROMPT = 32  # tokens


class NoText:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["laptop"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name in options.models:
        shape = LAPTOP if name == "laptop" else read_shape(name)
        source: WeightSource = RandomSource(shape, 0) if name == "laptop" else open_checkpoint(name).source
        engines = both(shape, source, max(options.batches))
        print(f"{name}: {options.tokens} tokens after {PROMPT}, float32, {torch.get_num_threads()} threads")
        for batch in options.batches:
            compare(engines, shape, batch, options)


def both(shape: ModelShape, source: WeightSource, batch: int) -> dict[str, Any]:
    described = hf_config(shape, "float32")
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    engines = {
        "transformers": TransformersEngine(config, NoText(), torch.float32, batch),
        "vllm": VllmEngine(shape, NoText(), "float32", VllmConfig(batch_size=batch)),
    }
    for engine in engines.values():
        engine.load_weights(((name, source.read(name)) for name in hf_shapes(shape)), 0)
    return engines


def compare(engines: dict[str, Any], shape: ModelShape, batch: int, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, shape.vocab_size, (batch, PROMPT), generator=generator).tolist()
    problems = [Problem(f"p{index}", "", tuple(prompt), "") for index, prompt in enumerate(prompts)]
    speed: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(options.rounds + 1):
        for name, engine in engines.items():
            engine.forget()
            began = time.perf_counter()
            found = engine.generate(problems, 1, SamplingParams(options.tokens, seed=number))
            tokens = sum(len(sample.ids) for group in found for sample in group)
            speed[name].append(tokens / (time.perf_counter() - began))
    ours = {name: median(values[1:]) for name, values in speed.items()}
    each = "   ".join(f"{name} {value:8.0f} tokens/s" for name, value in ours.items())
    print(f"  batch {batch:3}   {each}   vllm / transformers {ours['vllm'] / ours['transformers']:.2f}", flush=True)


if __name__ == "__main__":
    main()
