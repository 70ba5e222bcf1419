"""How much memory a run will take, estimated from shapes alone: nothing is allocated, no rank is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from capo_megatron.config import TrainConfig
from capo_megatron.mcore.hf_weights import slots
from capo_megatron.mcore.model import ModelShape
from capo_megatron.mcore.runtime import Layout

GIB = 2**30


def parameters(shape: ModelShape, layout: Layout) -> int:
    """Parameters on this rank; the last stage of a tied model holds its own copy of the embedding."""
    mine = (slot for slot in slots(shape, layout) if slot.pp_rank == layout.pp_rank)
    count = sum(prod(slot.rule.local_shape(shape, layout.tensor)) for slot in mine)
    copied = shape.tie_word_embeddings and layout.is_last_stage and layout.pipeline > 1
    return count + copied * shape.padded_vocab(layout.tensor) // layout.tensor * shape.hidden_size


def estimate(shape: ModelShape, layout: Layout, dtype: torch.dtype, train: TrainConfig, distributed: bool) -> list[str]:
    """Lines for a person: bytes of the fullest rank, by what they are for.

    Weights, gradients and optimizer are exact. Activations are those of one micro-batch per pipeline stage in flight,
    counting the tensors that backward needs in each layer; attention scores are left out, as a fused attention does.
    """
    ranks = [replace(layout, rank=layout.rank_at(0, 0, stage)) for stage in range(layout.pipeline)]
    fullest = max(ranks, key=lambda place: parameters(shape, place))
    count = parameters(shape, fullest)
    optimizer_shards = layout.data if distributed else 1
    rows = {
        "weights": count * dtype.itemsize,
        "gradients (float32)": count * 4,
        "optimizer (float32 weights, two moments)": count * (12 if dtype != torch.float32 else 8) // optimizer_shards,
        "activations of a micro-batch": _activations(shape, layout, dtype, train),
        "logits in flight": train.logprob_chunk_tokens * shape.padded_vocab(layout.tensor) // layout.tensor * 4,
    }
    whole = _whole(shape)
    return [
        f"parameters    {count / 1e6:,.1f} M on the fullest of {layout.world} ranks, {whole / 1e6:,.1f} M in all",
        *_lines(rows),
        f"host          {count * dtype.itemsize / GIB:,.2f} GiB for the reference weights, twice while it scores",
        f"engine        {whole * dtype.itemsize / GIB:,.2f} GiB for its own copy of the weights",
    ]


def _whole(shape: ModelShape) -> int:
    return parameters(shape, Layout(1, 1, 1, False, 1, 0))


def _lines(rows: dict[str, int]) -> Iterator[str]:
    for name, size in rows.items():
        yield f"memory        {size / GIB:8,.2f} GiB  {name}"
    yield f"memory        {sum(rows.values()) / GIB:8,.2f} GiB  together, on the fullest rank"


def _activations(shape: ModelShape, layout: Layout, dtype: torch.dtype, train: TrainConfig) -> int:
    """Bytes kept for backward: of each token and layer the norms, and what attention and feed-forward take and give."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    inside = (heads * shape.head_dim * 2 + 4 * shape.intermediate_size) // layout.tensor
    around = 5 * shape.hidden_size // (layout.tensor if layout.sequence else 1)
    layers = shape.num_hidden_layers // layout.pipeline
    kept = shape.hidden_size * layers + inside + around if train.recompute == "full" else (inside + around) * layers
    in_flight = layout.pipeline  # the first stage of 1F1B holds one micro-batch per stage
    return kept * train.micro_batch_tokens * dtype.itemsize * in_flight
