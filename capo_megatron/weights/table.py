"""The one table between Hugging Face's and Megatron-core's parameters.

A Megatron parameter is made of one or more Hugging Face tensors (its parts). Tensor parallelism cuts every part into
equal pieces along one dimension; a rank packs its pieces into its parameter:

    ONE      the piece itself
    STACKED  the pieces one below the other: gate and up of the feed-forward layer
    GROUPED  per key-value group its query heads, its key head, its value head: Megatron's QKV order

Because packing is local to a rank, the same table cuts a checkpoint for a rank and puts the ranks' pieces together
again, for any layout. A new family of models is a new table, see `TABLES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from capo_megatron.weights.shape import ModelShape


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


def _head(shape: ModelShape) -> tuple[int, ...]:
    return (shape.head_dim,)


_LAYER = "model.layers.{layer}."
EMBEDDING = Part("model.embed_tokens.weight", _vocabulary)
HEAD = Part("lm_head.weight", _vocabulary)

_EMBEDDING = Rule(Home.EMBEDDING, ("embedding.word_embeddings.weight",), (EMBEDDING,), cut=0, vocabulary=True)
_INPUT_NORM = Rule(
    Home.LAYER,
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    (Part(_LAYER + "input_layernorm.weight", _hidden),),
)
_QKV = Rule(
    Home.LAYER,
    ("self_attention.linear_qkv.weight",),
    (
        Part(_LAYER + "self_attn.q_proj.weight", _query),
        Part(_LAYER + "self_attn.k_proj.weight", _group),
        Part(_LAYER + "self_attn.v_proj.weight", _group),
    ),
    cut=0,
    packing=Packing.GROUPED,
)
_QKV_BIAS = Rule(
    Home.LAYER,
    ("self_attention.linear_qkv.bias",),
    (
        Part(_LAYER + "self_attn.q_proj.bias", _query_bias),
        Part(_LAYER + "self_attn.k_proj.bias", _group_bias),
        Part(_LAYER + "self_attn.v_proj.bias", _group_bias),
    ),
    cut=0,
    packing=Packing.GROUPED,
)
_QUERY_NORM = Rule(
    Home.LAYER, ("self_attention.q_layernorm.weight",), (Part(_LAYER + "self_attn.q_norm.weight", _head),)
)
_KEY_NORM = Rule(Home.LAYER, ("self_attention.k_layernorm.weight",), (Part(_LAYER + "self_attn.k_norm.weight", _head),))
_ATTENTION_OUT = Rule(
    Home.LAYER,
    ("self_attention.linear_proj.weight",),
    (Part(_LAYER + "self_attn.o_proj.weight", _transposed(_query)),),
    cut=1,
)
_MLP = (
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
)
_END = (
    Rule(Home.END, ("decoder.final_layernorm.weight",), (Part("model.norm.weight", _hidden),)),
    Rule(Home.END, ("output_layer.weight",), (HEAD,), cut=0, vocabulary=True),
)

LLAMA = (_EMBEDDING, _INPUT_NORM, _QKV, _ATTENTION_OUT, *_MLP, *_END)
QWEN2 = (_EMBEDDING, _INPUT_NORM, _QKV, _QKV_BIAS, _ATTENTION_OUT, *_MLP, *_END)
QWEN3 = (_EMBEDDING, _INPUT_NORM, _QKV, _QUERY_NORM, _KEY_NORM, _ATTENTION_OUT, *_MLP, *_END)
TABLES: Mapping[str, tuple[Rule, ...]] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}  # by model_type


@dataclass(frozen=True)
class Place:
    """One Megatron parameter of the whole model: its rule and its layer, counted over the whole model."""

    rule: Rule
    layer: int | None = None

    @property
    def parts(self) -> list[str]:
        """The Hugging Face names of its parts."""
        return [part.name.format(layer=self.layer) for part in self.rule.parts]


def places(shape: ModelShape) -> list[Place]:
    """Every parameter of the model in the order of computation, once each: a tied head is the embedding."""
    table = TABLES[shape.model_type]
    found = [Place(rule) for rule in table if rule.home is Home.EMBEDDING]
    for layer in range(shape.num_hidden_layers):
        found += [Place(rule, layer) for rule in table if rule.home is Home.LAYER]
    tied = shape.tie_word_embeddings
    return found + [Place(rule) for rule in table if rule.home is Home.END and not (tied and rule.parts == (HEAD,))]


def tied_head(shape: ModelShape) -> list[Place]:
    """The copy of the embedding that a checkpoint of a tied model may hold as its head."""
    return [Place(rule) for rule in TABLES[shape.model_type] if shape.tie_word_embeddings and rule.parts == (HEAD,)]


@functools.cache
def hf_shapes(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """The Hugging Face name and shape of every tensor of the model, in the order of computation."""
    found = {
        name: part.shape(shape)
        for place in places(shape)
        for name, part in zip(place.parts, place.rule.parts, strict=True)
    }
    return MappingProxyType(found)
