"""What the equations demand of the tensors and options they are handed."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from capo_megatron.errors import ConfigError, ShapeError


def float_dtype(*values: Tensor) -> torch.dtype:
    """The widest floating dtype among the tensors; torch's default if all hold integers or flags."""
    floating = [value.dtype for value in values if value.is_floating_point()]
    if not floating:
        return torch.get_default_dtype()
    widest = floating[0]
    for dtype in floating[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def wide(value: Tensor) -> Tensor:
    """The same numbers in float32 or wider; differentiable."""
    return value.to(torch.promote_types(float_dtype(value), torch.float32))


def tensor(name: str, value: Tensor) -> None:
    """Raise ShapeError for anything else, e.g. a list or an array."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor.")


def real(name: str, value: Tensor, ndim: int) -> Tensor:
    """`value` in float32 or wider. Raises ShapeError unless it holds real numbers in `ndim` dimensions."""
    tensor(name, value)
    if value.ndim != ndim:
        raise ShapeError(f"{name}: shape {tuple(value.shape)}, expected {ndim} dimension(s).")
    if value.is_complex():
        raise ShapeError(f"{name}: dtype {value.dtype}, expected real numbers.")
    return wide(value)


def same(name: str, value: Tensor, like: Tensor) -> None:
    """Raise ShapeError unless `value` has the shape and device of `like`."""
    tensor(name, value)
    tensor(f"what {name} belongs to", like)
    if value.shape != like.shape:
        raise ShapeError(f"{name}: shape {tuple(value.shape)}, expected {tuple(like.shape)}.")
    if value.device != like.device:
        raise ShapeError(f"{name}: on {value.device}, expected {like.device} like the other tensors.")


def flags(name: str, value: Tensor, like: Tensor) -> Tensor:
    """`value` as bool; of numbers, those above 0.5 are True."""
    same(name, value, like)
    if value.dtype == torch.bool:
        return value
    finite_rows(name, value, torch.ones_like(value, dtype=torch.bool))
    return value > 0.5


def members(valid: Tensor | None, like: Tensor) -> Tensor:
    """[N] bool: the rows that count; all of them without `valid`."""
    return torch.ones_like(like, dtype=torch.bool) if valid is None else flags("valid", valid, like)


def token_mask(mask: Tensor, like: Tensor | None) -> Tensor:
    """[N, T] bool. Raises ShapeError for other shapes and for values other than 0 and 1."""
    tensor("mask", mask)
    if like is not None:
        same("mask", mask, like)
    if mask.ndim != 2:
        raise ShapeError(f"mask: shape {tuple(mask.shape)}, expected [N, T].")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ShapeError("mask: holds values other than 0 and 1.")
    return mask.bool()


def group_index(group: Tensor, like: Tensor) -> Tensor:
    """[N] int64: the groups renumbered from 0 in the order of their ids."""
    same("group", group, like)
    if group.is_floating_point() or group.is_complex():
        raise ShapeError(f"group: dtype {group.dtype}, expected integer ids.")
    return torch.unique(group.long(), return_inverse=True)[1]


def finite_rows(name: str, value: Tensor, rows: Tensor, advice: str = "") -> None:
    """Raise ShapeError, naming the place, unless `value` is finite wherever `rows` is True."""
    bad = ~value.isfinite() & rows
    if bad.any():
        index = bad.nonzero()[0]
        place = f"row {int(index[0])}" + (f", column {int(index[1])}" if value.ndim == 2 else "")
        raise ShapeError(f"{name}: {value[tuple(index)].item()} in {place}; it must be finite. {advice}".rstrip())


def within(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{name}={value}: must lie between {low:g} and {high:g}.")


def positive(name: str, value: float) -> None:
    """Raise ConfigError unless value > 0."""
    if not value > 0:
        raise ConfigError(f"{name}={value}: must be larger than 0.")


def choice(name: str, value: str, literal: Any) -> None:
    """Raise ConfigError unless the Literal type has this value."""
    if value not in get_args(literal):
        raise ConfigError(f"{name}={value!r}: unknown. Choose one of {', '.join(get_args(literal))}.")
