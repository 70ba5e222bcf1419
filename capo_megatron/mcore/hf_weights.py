"""Weights between Hugging Face tensors and the ranks' parameters, both ways, through the table of `hf_table`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.mcore.hf_files import WeightSource
from capo_megatron.mcore.hf_table import EMBEDDING, HEAD, Home, Rule, Slot, hf_shapes, slots
from capo_megatron.mcore.model import ModelShape
from capo_megatron.mcore.runtime import Layout

BUCKET_BYTES = 256 * 2**20  # gathered at one time by `stream_hf`; a larger tensor travels alone


_DTYPES = ("F32", "BF16", "F16", "F64")  # others would be truncated, or need scales that are not read


def load_hf(chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, source: WeightSource) -> None:
    """Fill this rank's parameters from Hugging Face tensors, reading only the rows and columns it needs.

    Raises CheckpointError if a tensor is missing, has another shape or no floating-point dtype, or is not part of such
    a model: nothing is changed then. Also if one holds NaN or infinity, which only reading it can tell.
    """
    check_source(shape, source)
    mine = [slot for slot in slots(shape, layout) if slot.pp_rank == layout.pp_rank]
    if shape.tie_word_embeddings and layout.is_last_stage and layout.pipeline > 1:
        copy = Rule(Home.END, ("output_layer.weight",), (EMBEDDING,), cut=0, vocabulary=True)
        mine.append(Slot(copy, layout.pp_rank, layout.virtual - 1))
    filled = set()
    for slot in mine:
        parameter = _parameter(chunks, slot)
        parameter.data.copy_(_read(slot, shape, layout, source))
        filled.add(parameter)
    assert filled == {parameter for chunk in chunks for parameter in chunk.parameters()}, "a parameter has no rule"


def check_source(shape: ModelShape, source: WeightSource) -> None:
    expected = hf_shapes(shape)
    found = source.names()
    for name, wanted in expected.items():
        if name not in found:
            raise CheckpointError(f"{source.where(name)}: tensor {name} is missing. {shape.name} needs it.")
        if source.shape(name) != wanted:
            raise CheckpointError(
                f"{source.where(name)}: tensor {name} has shape {source.shape(name)}, but {shape.name} needs {wanted}."
            )
        if source.dtype(name) not in _DTYPES:
            raise CheckpointError(
                f"{source.where(name)}: tensor {name} has dtype {source.dtype(name)}, expected {' or '.join(_DTYPES)}. "
                "Use weights that are not quantised."
            )
    # Old exports carry the rotary frequencies; a tied model may carry a second copy of its embedding.
    extra = {name for name in found - expected.keys() if not name.endswith("rotary_emb.inv_freq")} - {HEAD.name}
    if extra:
        name = min(extra)
        raise CheckpointError(
            f"{source.where(name)}: tensor {name} ({len(extra)} such) has no place in {shape.name} with "
            f"{shape.num_hidden_layers} layers. The weights belong to another model than config.json."
        )


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
        return _finite(source, slot.parts[0], source.read(slot.parts[0]))
    pieces = []
    for name, local in zip(slot.parts, rule.piece_shapes(shape, layout.tensor), strict=True):
        size = local[rule.cut]
        start = layout.tp_rank * size
        stop = min(start + size, shape.vocab_size) if rule.vocabulary else start + size
        piece = _finite(source, name, source.read(name, rule.cut, min(start, stop), stop))
        if piece.shape[rule.cut] < size:
            padding = piece.new_zeros(size - piece.shape[0], *piece.shape[1:])
            piece = torch.cat([piece, padding])
        pieces.append(piece)
    return rule.pack(pieces, shape)


def _finite(source: WeightSource, name: str, tensor: Tensor) -> Tensor:
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"{source.where(name)}: tensor {name}: {bad} of the {tensor.numel()} values read are NaN or infinite. "
            "Download it again, or export the model from an earlier checkpoint."
        )
    return tensor


@dataclass(frozen=True)
class RandomSource:
    """Seeded random weights: every tensor is drawn by itself, so they do not depend on the layout."""

    model: ModelShape
    seed: int

    def names(self) -> set[str]:
        return set(hf_shapes(self.model))

    def shape(self, name: str) -> tuple[int, ...]:
        return hf_shapes(self.model)[name]

    def dtype(self, name: str) -> str:
        return "F32"

    def where(self, name: str) -> str:
        return f"seed {self.seed}"

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        shape = self.shape(name)
        if name.endswith("norm.weight"):
            whole = torch.ones(shape)
        elif name.endswith("bias"):
            whole = torch.zeros(shape)
        else:
            key = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
            whole = torch.empty(shape).normal_(0.0, self.model.initializer_range, generator=generator)
        return whole if dim is None else whole.narrow(dim, start, (shape[dim] if stop is None else stop) - start)


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
        flat = torch.cat([_parameter(chunks, slot).detach().flatten() for slot in bucket])
        if layout.tensor == 1:
            gathered = flat
        else:
            dist.all_gather_into_tensor(gathered, flat, group=layout.tensor_group)
    if layout.pipeline > 1:
        source = layout.rank_at(layout.tp_rank, layout.dp_rank, owner)
        dist.broadcast(gathered, source, group=layout.pipeline_group)
    return gathered.view(layout.tensor, local_size)
