"""The one table between Hugging Face's and Megatron-core's parameters, and what is done through it.

A Megatron parameter is made of one or more Hugging Face tensors (its parts). Tensor parallelism cuts every part into
equal pieces along one dimension; a rank packs its pieces into its parameter:

    ONE      the piece itself
    STACKED  the pieces one below the other: gate and up of the feed-forward layer
    GROUPED  per key-value group its query heads, its key head, its value head: Megatron's QKV order

Because packing is local to a rank, the same table cuts a checkpoint for a rank (`load_hf`) and puts the ranks' pieces
together again (`stream_hf`) for any layout. A new family of models is a new table.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.mcore.hf_files import WeightSource
from capo_megatron.mcore.model import ModelShape
from capo_megatron.mcore.runtime import Layout

BUCKET_BYTES = 256 * 2**20  # gathered at one time by `stream_hf`; a larger tensor travels alone


class Packing(Enum):
    ONE = "one"
    STACKED = "stacked"
    GROUPED = "grouped"


class Home(Enum):
    """Where in the model a parameter lives."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    END = "end"


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor: its name (`{layer}` counts from 0 over the whole model) and its shape."""

    name: str
    shape: Callable[[ModelShape], tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made of its parts.

    `names` are what the parameter is called inside its home: the local layer's name first, then TransformerEngine's.
    """

    home: Home
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    cut: int | None = None  # dimension of every part along which tensor parallelism cuts; None: every rank has it whole
    packing: Packing = Packing.ONE
    vocabulary: bool = False  # rows are padded to `ModelShape.padded_vocab`

    def piece_shapes(self, shape: ModelShape, tensor: int) -> list[list[int]]:
        """The shapes of one rank's pieces."""
        pieces = [list(part.shape(shape)) for part in self.parts]
        for piece in pieces:
            if self.vocabulary:
                piece[0] = shape.padded_vocab(tensor)
            if self.cut is not None:
                piece[self.cut] //= tensor
        return pieces

    def local_shape(self, shape: ModelShape, tensor: int) -> tuple[int, ...]:
        """The shape of one rank's parameter."""
        pieces = self.piece_shapes(shape, tensor)
        return (sum(piece[0] for piece in pieces), *pieces[0][1:])

    def pack(self, pieces: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """One rank's parameter from its pieces."""
        if self.packing is Packing.GROUPED:
            rows = _group_rows(shape)
            groups = pieces[-1].shape[0] // shape.head_dim
            grouped = [
                piece.reshape(groups, count, *piece.shape[1:]) for piece, count in zip(pieces, rows, strict=True)
            ]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]

    def unpack(self, parameter: Tensor, shape: ModelShape) -> Sequence[Tensor]:
        """The pieces in one rank's parameter."""
        if self.packing is Packing.GROUPED:
            rows = _group_rows(shape)
            grouped = parameter.reshape(-1, sum(rows), *parameter.shape[1:]).split(rows, dim=1)
            return [piece.flatten(0, 1) for piece in grouped]
        return parameter.chunk(len(self.parts))

    def join(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        """The whole parts, unpadded, from the parameters of all tensor-parallel ranks."""
        if self.cut is None:
            return [shards[0]]
        pieces = [self.unpack(shard, shape) for shard in shards]
        parts = [torch.cat([of_rank[index] for of_rank in pieces], dim=self.cut) for index in range(len(self.parts))]
        return [part[: shape.vocab_size] for part in parts] if self.vocabulary else parts


def _group_rows(shape: ModelShape) -> list[int]:
    """Rows of query, key and value in one key-value group."""
    return [shape.num_attention_heads // shape.num_key_value_heads * shape.head_dim, shape.head_dim, shape.head_dim]


def _vocabulary(shape: ModelShape) -> tuple[int, ...]:
    return shape.vocab_size, shape.hidden_size


def _hidden(shape: ModelShape) -> tuple[int, ...]:
    return (shape.hidden_size,)


def _query_bias(shape: ModelShape) -> tuple[int, ...]:
    return (shape.num_attention_heads * shape.head_dim,)


def _group_bias(shape: ModelShape) -> tuple[int, ...]:
    return (shape.num_key_value_heads * shape.head_dim,)


def _query(shape: ModelShape) -> tuple[int, ...]:
    return *_query_bias(shape), shape.hidden_size


def _group(shape: ModelShape) -> tuple[int, ...]:
    return *_group_bias(shape), shape.hidden_size


def _up(shape: ModelShape) -> tuple[int, ...]:
    return shape.intermediate_size, shape.hidden_size


def _transposed(of: Callable[[ModelShape], tuple[int, ...]]) -> Callable[[ModelShape], tuple[int, ...]]:
    return lambda shape: of(shape)[::-1]


_LAYER = "model.layers.{layer}."
EMBEDDING = Part("model.embed_tokens.weight", _vocabulary)
HEAD = Part("lm_head.weight", _vocabulary)
QWEN2 = (
    Rule(Home.EMBEDDING, ("embedding.word_embeddings.weight",), (EMBEDDING,), cut=0, vocabulary=True),
    Rule(
        Home.LAYER,
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (Part(_LAYER + "input_layernorm.weight", _hidden),),
    ),
    Rule(
        Home.LAYER,
        ("self_attention.linear_qkv.weight",),
        (
            Part(_LAYER + "self_attn.q_proj.weight", _query),
            Part(_LAYER + "self_attn.k_proj.weight", _group),
            Part(_LAYER + "self_attn.v_proj.weight", _group),
        ),
        cut=0,
        packing=Packing.GROUPED,
    ),
    Rule(
        Home.LAYER,
        ("self_attention.linear_qkv.bias",),
        (
            Part(_LAYER + "self_attn.q_proj.bias", _query_bias),
            Part(_LAYER + "self_attn.k_proj.bias", _group_bias),
            Part(_LAYER + "self_attn.v_proj.bias", _group_bias),
        ),
        cut=0,
        packing=Packing.GROUPED,
    ),
    Rule(
        Home.LAYER,
        ("self_attention.linear_proj.weight",),
        (Part(_LAYER + "self_attn.o_proj.weight", _transposed(_query)),),
        cut=1,
    ),
    Rule(
        Home.LAYER,
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        (Part(_LAYER + "post_attention_layernorm.weight", _hidden),),
    ),
    Rule(
        Home.LAYER,
        ("mlp.linear_fc1.weight",),
        (Part(_LAYER + "mlp.gate_proj.weight", _up), Part(_LAYER + "mlp.up_proj.weight", _up)),
        cut=0,
        packing=Packing.STACKED,
    ),
    Rule(
        Home.LAYER,
        ("mlp.linear_fc2.weight",),
        (Part(_LAYER + "mlp.down_proj.weight", _transposed(_up)),),
        cut=1,
    ),
    Rule(Home.END, ("decoder.final_layernorm.weight",), (Part("model.norm.weight", _hidden),)),
    Rule(Home.END, ("output_layer.weight",), (HEAD,), cut=0, vocabulary=True),
)


@dataclass(frozen=True)
class Slot:
    """One Megatron parameter of the whole model: its rule and the pipeline rank, chunk and layer that hold it."""

    rule: Rule
    pp_rank: int
    chunk: int
    layer: int | None = None  # counted over the whole model
    index: int | None = None  # counted within the chunk

    @property
    def names(self) -> list[str]:
        """What the parameter may be called in its chunk."""
        prefix = "" if self.index is None else f"decoder.layers.{self.index}."
        return [prefix + name for name in self.rule.names]

    @property
    def parts(self) -> list[str]:
        """The Hugging Face names of its parts."""
        return [part.name.format(layer=self.layer) for part in self.rule.parts]


def slots(shape: ModelShape, layout: Layout) -> list[Slot]:
    """Every parameter of the model in the order of computation, once each: a tied head is the embedding."""
    last = (layout.pipeline - 1, layout.virtual - 1)
    found = [Slot(rule, 0, 0) for rule in QWEN2 if rule.home is Home.EMBEDDING]
    for chunk in range(layout.virtual):
        for pp_rank in range(layout.pipeline):
            for index, layer in enumerate(layout.layers(chunk, shape.num_hidden_layers, pp_rank)):
                found += [Slot(rule, pp_rank, chunk, layer, index) for rule in QWEN2 if rule.home is Home.LAYER]
    tied = shape.tie_word_embeddings
    found += [Slot(rule, *last) for rule in QWEN2 if rule.home is Home.END and not (tied and rule.parts == (HEAD,))]
    return found


@functools.cache
def hf_shapes(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """The Hugging Face name and shape of every tensor of the model, in the order of computation."""
    one_rank = Layout(1, 1, 1, False, 1, 0)
    found = {
        name: part.shape(shape)
        for slot in slots(shape, one_rank)
        for name, part in zip(slot.parts, slot.rule.parts, strict=True)
    }
    return MappingProxyType(found)


def load_hf(chunks: Sequence[GPTModel], shape: ModelShape, layout: Layout, source: WeightSource) -> None:
    """Fill this rank's parameters from Hugging Face tensors, reading only the rows and columns it needs.

    Raises CheckpointError if a tensor is missing, has another shape, or is not part of such a model. Nothing is
    changed then.
    """
    _check_source(shape, source)
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


def _check_source(shape: ModelShape, source: WeightSource) -> None:
    expected = hf_shapes(shape)
    found = source.names()
    for name, wanted in expected.items():
        if name not in found:
            raise CheckpointError(f"{source.where(name)}: tensor {name} is missing. {shape.name} needs it.")
        if source.shape(name) != wanted:
            raise CheckpointError(
                f"{source.where(name)}: tensor {name} has shape {source.shape(name)}, but {shape.name} needs {wanted}."
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
        return source.read(slot.parts[0])
    pieces = []
    for name, local in zip(slot.parts, rule.piece_shapes(shape, layout.tensor), strict=True):
        size = local[rule.cut]
        start = layout.tp_rank * size
        stop = min(start + size, shape.vocab_size) if rule.vocabulary else start + size
        piece = source.read(name, rule.cut, min(start, stop), stop)
        if piece.shape[rule.cut] < size:
            padding = piece.new_zeros(size - piece.shape[0], *piece.shape[1:])
            piece = torch.cat([piece, padding])
        pieces.append(piece)
    return rule.pack(pieces, shape)


@dataclass(frozen=True)
class RandomSource:
    """Seeded random weights: every tensor is drawn by itself, so they do not depend on the layout."""

    model: ModelShape
    seed: int

    def names(self) -> set[str]:
        return set(hf_shapes(self.model))

    def shape(self, name: str) -> tuple[int, ...]:
        return hf_shapes(self.model)[name]

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
