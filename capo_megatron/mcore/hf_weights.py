"""Weights between Hugging Face tensors and the ranks' parameters, both ways, through `weights.table`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from capo_megatron.mcore import fp8
from capo_megatron.mcore.runtime import Layout
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import RandomSource, WeightSource, check_source, finite
from capo_megatron.weights.table import EMBEDDING, Home, Place, Rule, places

BUCKET_BYTES = 2**24  # that travel together: large enough for the network, small beside what a refit holds anyway


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the model and on the ranks: the pipeline rank and chunk that hold it."""

    place: Place
    pp_rank: int
    chunk: int
    index: int | None = None  # its layer, counted within the chunk

    @property
    def rule(self) -> Rule:
        return self.place.rule

    @property
    def parts(self) -> list[str]:
        """The Hugging Face names of its parts."""
        return self.place.parts

    @property
    def names(self) -> list[str]:
        """What the parameter may be called in its chunk."""
        prefix = "" if self.index is None else f"decoder.layers.{self.index}."
        return [prefix + name for name in self.rule.names]


def slots(shape: ModelShape, layout: Layout) -> list[Slot]:
    """Every parameter of the model in the order of computation, once each: a tied head is the embedding."""
    per_chunk = shape.num_hidden_layers // (layout.pipeline * layout.virtual)
    found = []
    for place in places(shape):
        if place.layer is None:
            first = place.rule.home is Home.EMBEDDING
            found.append(Slot(place, *((0, 0) if first else (layout.pipeline - 1, layout.virtual - 1))))
        else:
            stage, index = divmod(place.layer, per_chunk)
            found.append(Slot(place, stage % layout.pipeline, stage // layout.pipeline, index))
    return found


def load_hf(chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, source: WeightSource) -> None:
    """Fill this rank's parameters from Hugging Face tensors, reading only the rows and columns it needs.

    Raises CheckpointError if a tensor is missing, has another shape or no floating-point dtype, or is not part of such
    a model: nothing is changed then. Also if one holds NaN or infinity, which only reading it can tell.
    """
    check_source(shape, source)
    filled = set()
    for slot in _local(shape, layout):
        parameter = _parameter(chunks, slot)
        fp8.assign(parameter, _read(slot, shape, layout, source))
        filled.add(parameter)
    assert filled == {parameter for chunk in chunks for parameter in chunk.parameters()}, "a parameter has no rule"


def read_local(
    chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, source: WeightSource
) -> list[dict[str, Tensor]]:
    """What `load_hf` puts into each chunk, by the parameters' names, in host memory and as the source has it."""
    names = {parameter: name for chunk in chunks for name, parameter in chunk.named_parameters()}
    found: list[dict[str, Tensor]] = [{} for _ in chunks]
    for slot in _local(shape, layout):
        found[slot.chunk][names[_parameter(chunks, slot)]] = _read(slot, shape, layout, source)
    return found


def _local(shape: ModelShape, layout: Layout) -> list[Slot]:
    """The parameters of this rank; the last stage of a tied model has its own copy of the embedding."""
    mine = [slot for slot in slots(shape, layout) if slot.pp_rank == layout.pp_rank]
    if shape.tie_word_embeddings and layout.is_last_stage and layout.pipeline > 1:
        copy = Rule(Home.END, ("output_layer.weight",), (EMBEDDING,), cut=0, vocabulary=True)
        mine.append(Slot(Place(copy), layout.pp_rank, layout.virtual - 1))
    return mine


def _parameter(chunks: Sequence[GPTModel], slot: Slot) -> torch.nn.Parameter:
    for name in slot.names:
        owner, _, leaf = name.rpartition(".")
        try:
            parameter = getattr(chunks[slot.chunk].get_submodule(owner), leaf)
        except AttributeError:
            continue
        if isinstance(parameter, torch.nn.Parameter):
            return parameter
    raise AssertionError(f"chunk {slot.chunk} has no parameter called {' or '.join(slot.names)}")


def _read(slot: Slot, shape: ModelShape, layout: Layout, source: WeightSource) -> Tensor:
    rule = slot.rule
    if rule.cut is None:
        return finite(source, slot.parts[0], source.read(slot.parts[0]))
    pieces = []
    for name, local in zip(slot.parts, rule.piece_shapes(shape, layout.tensor), strict=True):
        size = local[rule.cut]
        start = layout.tp_rank * size
        stop = min(start + size, shape.vocab_size) if rule.vocabulary else start + size
        piece = finite(source, name, source.read(name, rule.cut, min(start, stop), stop))
        if piece.shape[rule.cut] < size:
            padding = piece.new_zeros(size - piece.shape[0], *piece.shape[1:])
            piece = torch.cat([piece, padding])
        pieces.append(piece)
    return rule.pack(pieces, shape)


def init_random(chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, seed: int) -> None:
    """Fill this rank's parameters with seeded random values, the same model on every layout.

    Weights are normal with standard deviation `initializer_range`, norms 1, biases 0.
    """
    load_hf(chunks, shape, layout, RandomSource(shape, seed))


def stream_hf(chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, whole and unpadded, on every rank, in the order of computation.

    Collective: every rank must take all of them. Tensors have the model's dtype and device and share no memory with
    its parameters. Small parameters travel together: one all-gather over the tensor-parallel ranks and one broadcast
    over the pipeline per `BUCKET_BYTES`.
    """
    like = next(parameter for chunk in chunks for parameter in chunk.parameters())
    for bucket in _buckets(shape, layout, like.element_size()):
        shards = _gather_bucket(bucket, chunks, shape, layout, like)
        offset = 0
        for slot in bucket:
            local = slot.rule.local_shape(shape, layout.tensor)
            size = torch.Size(local).numel()
            of_ranks = [shard[offset : offset + size].view(local) for shard in shards]
            offset += size
            yield from zip(slot.parts, map(Tensor.contiguous, slot.rule.join(of_ranks, shape)), strict=True)


def _buckets(shape: ModelShape, layout: Layout, element_size: int) -> Iterator[list[Slot]]:
    """Runs of parameters on the same pipeline rank that fit into one bucket."""
    bucket: list[Slot] = []
    filled = 0
    for slot in slots(shape, layout):
        size = torch.Size(slot.rule.local_shape(shape, layout.tensor)).numel() * layout.tensor * element_size
        if bucket and (slot.pp_rank != bucket[0].pp_rank or filled + size > BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(slot)
        filled += size
    yield bucket


def _gather_bucket(
    bucket: list[Slot], chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, like: Tensor
) -> Tensor:
    """[tensor, elements]: the parameters of the bucket, flat, of every tensor-parallel rank."""
    owner = bucket[0].pp_rank
    local_size = sum(torch.Size(slot.rule.local_shape(shape, layout.tensor)).numel() for slot in bucket)
    gathered = torch.empty(layout.tensor * local_size, dtype=like.dtype, device=like.device)
    if owner == layout.pp_rank:
        flat = torch.cat([fp8.plain(_parameter(chunks, slot).detach()).flatten() for slot in bucket])
        if layout.tensor == 1:
            gathered = flat
        else:
            dist.all_gather_into_tensor(gathered, flat, group=layout.tensor_group)
    if layout.pipeline > 1:
        source = layout.rank_at(layout.tp_rank, layout.dp_rank, owner)
        dist.broadcast(gathered, source, group=layout.pipeline_group)
    return gathered.view(layout.tensor, local_size)
