"""Whether two checkpoints hold the same model, bit for bit, whatever their formats and layouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.checkpoint import Checkpoint
from capo_megatron.weights.huggingface import Spec
from capo_megatron.weights.manifest import Hasher
from capo_megatron.weights.reading import BLOCK_BYTES
from capo_megatron.weights.sources import WeightSource
from capo_megatron.weights.table import hf_shapes


class Difference(NamedTuple):
    """A tensor in which two checkpoints differ."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What comparing two checkpoints found."""

    tensors: int
    nbytes: int  # of one of them
    seconds: float
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        speed = f"{self.nbytes / 1e9:,.2f} GB in {self.seconds:.1f} s"
        if not self.differences:
            return f"equal bit for bit: {self.tensors:,} tensors, {speed}"
        return f"{len(self.differences):,} of {self.tensors:,} tensors differ ({speed})"


def compare(a: Checkpoint, b: Checkpoint, progress: Callable[[int, int], None] = lambda _, __: None) -> Comparison:
    """Compare every tensor of `a` and `b`. `progress` hears (bytes done, bytes in all).

    Raises CheckpointError if they are not of the same sizes, or if one of them is not what its manifest says.
    """
    began = time.monotonic()
    _check_same_sizes(a, b)
    for one in (a, b):
        one.check_files()
    names = list(hf_shapes(a.shape))
    sizes = {name: _nbytes(a.source, name) for name in names}
    total, done = sum(sizes.values()), 0
    differences = []
    for name in names:
        reason = _difference(a, b, name)
        if reason is not None:
            differences.append(Difference(name, reason))
        done += sizes[name]
        progress(done, total)
    return Comparison(len(names), total, time.monotonic() - began, tuple(differences))


def _check_same_sizes(a: Checkpoint, b: Checkpoint) -> None:
    ours, theirs = a.shape.identity(), b.shape.identity()
    for key, value in ours.items():
        if theirs[key] != value:
            raise CheckpointError(
                f"{b.folder}: {key} is {theirs[key]}, in {a.folder} it is {value}. They are different models."
            )


def _nbytes(source: WeightSource, name: str) -> int:
    return Spec(source.dtype(name), source.shape(name)).nbytes


def _difference(a: Checkpoint, b: Checkpoint, name: str) -> str | None:
    """How a tensor differs, None if it does not."""
    hashers = (Hasher(), Hasher())
    rows = a.source.shape(name)[0]
    step = max(1, BLOCK_BYTES // max(1, _nbytes(a.source, name) // rows))
    unequal, largest = 0, 0.0
    same_kind = a.source.dtype(name) == b.source.dtype(name)
    rounded = True  # the wider one is the narrower one after rounding
    for start in range(0, rows, step):
        pair = [one.source.read(name, 0, start, min(start + step, rows)) for one in (a, b)]
        for hasher, values in zip(hashers, pair, strict=True):
            hasher.add(values)
        if same_kind and _bits(pair[0]).equal(_bits(pair[1])):
            continue
        gap = (pair[0].double() - pair[1].double()).abs()
        unequal += int((_bits(pair[0]) != _bits(pair[1])).sum()) if same_kind else int(gap.ne(0).sum())
        largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
        rounded = rounded and not same_kind and _equal_when_rounded(*pair)
    for one, hasher in zip((a, b), hashers, strict=True):
        if one.manifest is not None:
            one.manifest.check(name, hasher.digest, one.source.where(name))
    if same_kind:
        return f"{unequal:,} values differ, by {largest:.3g} at most" if unequal else None
    kinds = f"{a.source.dtype(name)} and {b.source.dtype(name)}"
    return f"{kinds}, equal when rounded" if rounded else f"{kinds}; they differ by {largest:.3g} at most"


def _bits(values: Tensor) -> Tensor:
    """The values as integers, so that NaN equals itself and 0 differs from -0."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _equal_when_rounded(a: Tensor, b: Tensor) -> bool:
    narrow = min(a, b, key=lambda values: values.element_size())
    wide = b if narrow is a else a
    return _bits(wide.to(narrow.dtype)).equal(_bits(narrow))
