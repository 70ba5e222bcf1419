"""Tensors under their Hugging Face names, whatever they lie in, and whether they are those of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import EMBEDDING, HEAD, hf_shapes

# As safetensors names them. Others would be truncated, or need scales that are not read.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = 2**14  # of the embedding that are compared at a time
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, read on demand."""

    def names(self) -> set[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def dtype(self, name: str) -> str:
        """The dtype of one tensor as safetensors names it, e.g. BF16, without reading it."""

    def where(self, name: str) -> str:
        """Where this tensor is, or would be, for messages."""

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        """One tensor, or its part [start, stop) along `dim`, on the CPU."""


@dataclass(frozen=True)
class DictSource:
    """Tensors in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return dtype_name(self.tensors[name].dtype)

    def where(self, name: str) -> str:
        return "weights in memory"

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if dim is None else tensor[span(dim, start, stop)]


def dtype_name(dtype: torch.dtype) -> str:
    """A floating-point dtype as safetensors names it; others by their own name."""
    return _NAMES.get(dtype, str(dtype))


def span(dim: int, start: int, stop: int | None) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(start, stop),)


def identity(shape: ModelShape, source: WeightSource) -> str:
    """A hash of the smaller weights of the first and the last layer: the same for the same model in any format."""
    ends = tuple(f"model.layers.{layer}." for layer in (0, shape.num_hidden_layers - 1))
    small = ("norm.weight", "bias", "k_proj.weight", "v_proj.weight")
    digest = xxhash.xxh3_128()
    for name in sorted(name for name in hf_shapes(shape) if name.startswith(ends) and name.endswith(small)):
        digest.update(source.read(name).float().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
        if source.dtype(name) not in DTYPES:
            raise CheckpointError(
                f"{source.where(name)}: tensor {name} has dtype {source.dtype(name)}, expected {' or '.join(DTYPES)}. "
                "Use weights that are not quantised."
            )
    if shape.tie_word_embeddings and HEAD.name in found:
        _check_tied_head(shape, source)
    # Old exports carry the rotary frequencies; a tied model may carry a second copy of its embedding.
    extra = {name for name in found - expected.keys() if not name.endswith("rotary_emb.inv_freq")} - {HEAD.name}
    if extra:
        name = min(extra)
        raise CheckpointError(
            f"{source.where(name)}: tensor {name} ({len(extra)} such) has no place in {shape.name} with "
            f"{shape.num_hidden_layers} layers. The weights belong to another model than config.json."
        )


def _check_tied_head(shape: ModelShape, source: WeightSource) -> None:
    """Raise CheckpointError if a tied model carries another head than its embedding: one of both would be lost."""
    rows = shape.vocab_size
    same = source.shape(HEAD.name) == source.shape(EMBEDDING.name)
    for start in range(0, rows if same else 0, _ROWS):
        one, other = (source.read(part.name, 0, start, min(start + _ROWS, rows)) for part in (HEAD, EMBEDDING))
        same = same and torch.equal(one, other)
    if not same:
        raise CheckpointError(
            f"{source.where(HEAD.name)}: tensor {HEAD.name} differs from {EMBEDDING.name}, but config.json has "
            "tie_word_embeddings=true. Set it to false, or remove the tensor."
        )


def finite(source: WeightSource, name: str, tensor: Tensor) -> Tensor:
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"{source.where(name)}: tensor {name}: {bad} of the {tensor.numel()} values read are NaN or infinite. "
            "Download it again, or export the model from an earlier checkpoint."
        )
    return tensor
