"""A few numbers per weight, by which engine and policy find out whether they hold the same, without moving weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from capo_megatron.seams import Sketch


def sketch(weight: Tensor) -> Sketch:
    """Two projections of a weight [out, in] or [n], and a length to judge their differences by. In float32."""
    weight = weight.detach().float()
    return project(weight @ direction(weight.shape[1], 0).to(weight.device) if weight.dim() == 2 else weight)


def project(values: Tensor) -> Sketch:
    """The sketch of a weight whose product [out] with `direction(in, 0)` this is, or which this is itself."""
    values = values.detach().float().cpu()
    first, second = (float(values @ direction(len(values), which)) for which in (1, 2))
    return first, second, float(values.norm())


@lru_cache(maxsize=64)
def direction(size: int, which: int) -> Tensor:
    """[size] float32: the `which`-th of a few random rows of signs, the same everywhere.

    No dtype rounds them, FP8 neither. And a projection is about as long as what is projected, however many numbers that
    has: projections on a direction of length 1 would shrink, and those of different large weights be all alike.
    """
    generator = torch.Generator().manual_seed(which)
    return torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0


def sketches(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Sketch]:
    """Hugging Face name -> sketch. Reads the weights to their end, which may be collective."""
    return {name: sketch(weight) for name, weight in weights}


def same(one: Sketch, other: Sketch, tolerance: float) -> bool:
    """Whether two sketches may be of one weight, `tolerance` being what rounding does to it, relative."""
    scale = max(one[2], other[2])
    return all(abs(a - b) <= tolerance * scale for a, b in zip(one, other, strict=True))


def differing(ours: Mapping[str, Sketch], theirs: Mapping[str, Sketch], tolerance: float) -> list[str]:
    """The names of weights that are not the same in both."""
    return [name for name in ours if name not in theirs or not same(ours[name], theirs[name], tolerance)]
