"""How much memory a run will take, estimated from shapes alone: nothing is allocated, no rank is started."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from capo_megatron.config import RolloutConfig, TrainConfig
from capo_megatron.mcore.hf_weights import slots
from capo_megatron.mcore.runtime import Layout
from capo_megatron.weights.shape import ModelShape

GIB = 2**30


def parameters(shape: ModelShape, layout: Layout) -> int:
    """Parameters on this rank; the last stage of a tied model holds its own copy of the embedding."""
    mine = (slot for slot in slots(shape, layout) if slot.pp_rank == layout.pp_rank)
    count = sum(prod(slot.rule.local_shape(shape, layout.tensor)) for slot in mine)
    copied = shape.tie_word_embeddings and layout.is_last_stage and layout.pipeline > 1
    return count + copied * shape.padded_vocab(layout.tensor) // layout.tensor * shape.hidden_size


def estimate(
    shape: ModelShape,
    layout: Layout,
    dtype: torch.dtype,
    train: TrainConfig,
    rollout: RolloutConfig,
    longest: int,
    distributed: bool,
) -> list[str]:
    """Lines for a person: bytes of the fullest rank, by what they are for.

    Weights, gradients and optimizer are exact. Activations are those of one micro-batch per pipeline stage in flight,
    counting the tensors that backward needs in each layer; attention scores are left out, as a fused attention does.
    `longest` is the length of a sequence, at most: the keys and values of a decoding batch grow up to it.
    """
    ranks = [replace(layout, rank=layout.rank_at(0, 0, stage)) for stage in range(layout.pipeline)]
    fullest = max(ranks, key=lambda place: parameters(shape, place))
    count, whole = parameters(shape, fullest), parameters(shape, Layout(1, 1, 1, False, 1, 0))
    model = {
        "weights": count * dtype.itemsize,
        "gradients (float32)": count * 4,
        "optimizer (float32 weights, two moments)": count
        * (12 if dtype != torch.float32 else 8)
        // (layout.data if distributed else 1),
    }
    training = {
        "activations of a micro-batch": _activations(shape, layout, dtype, train),
        "logits in flight": train.logprob_chunk_tokens * shape.padded_vocab(layout.tensor) // layout.tensor * 4,
    }
    elsewhere = rollout.placement == "separate"
    sampling = {} if elsewhere else _sampling(shape, dtype, rollout, whole, layout, longest)
    trains = [f"at a time     {_size(sum((model | training).values())):>10}  while it trains"]
    apart = [
        *trains,
        f"              {_size(sum((model | sampling).values())):>10}  while it samples",
    ]
    both = [f"at a time     {_size(sum((model | training | sampling).values())):>10}  while it trains and samples"]
    return [
        f"parameters    {_number(whole)} in all, {_number(count)} on the fullest of {layout.world:,} ranks",
        *(f"memory        {_size(size):>10}  {name}" for name, size in (model | training | sampling).items()),
        *(trains if elsewhere else both if rollout.async_steps else apart),
        f"host memory   {_size(2 * count * dtype.itemsize):>10}  for the reference, and the policy's weights meanwhile",
    ]


def _sampling(
    shape: ModelShape, dtype: torch.dtype, rollout: RolloutConfig, whole: int, layout: Layout, longest: int
) -> dict[str, int]:
    """What the engine takes on a rank, by what it is for."""
    cut = rollout.vllm.tensor if rollout.engine == "vllm" else 1
    most = rollout.vllm.batch_size if rollout.engine == "vllm" else rollout.batch_size
    responses = min(most, -(-rollout.prompts * rollout.samples * cut // layout.world))
    kept = responses * longest * _cached(shape) * dtype.itemsize // min(cut, shape.num_key_value_heads)
    of_weights = f"1/{cut} of the weights" if cut > 1 else "its own whole copy of the weights"
    # vLLM takes as much cache as its share of the GPU leaves: these are what it needs to decode all of them together.
    return {
        f"engine: {of_weights}": whole * dtype.itemsize // cut,
        f"engine: keys and values of {responses:,} responses of {longest:,} tokens": kept,
    }


def _number(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"


def _cached(shape: ModelShape) -> int:
    """Numbers that the engine keeps for each token it has seen: a key and a value per layer and key-value head."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim


def _activations(shape: ModelShape, layout: Layout, dtype: torch.dtype, train: TrainConfig) -> int:
    """Bytes kept for backward: of each token and layer the norms, and what attention and feed-forward take and give."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    inside = (heads * shape.head_dim * 2 + 4 * shape.intermediate_size) // layout.tensor
    around = 5 * shape.hidden_size // (layout.tensor if layout.sequence else 1)
    layers = shape.num_hidden_layers // layout.pipeline
    kept = shape.hidden_size * layers + inside + around if train.recompute == "full" else (inside + around) * layers
    in_flight = layout.pipeline  # the first stage of 1F1B holds one micro-batch per stage
    return kept * train.micro_batch_tokens * dtype.itemsize * in_flight
