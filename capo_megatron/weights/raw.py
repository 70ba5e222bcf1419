"""Bytes of tensors in files: read where they lie into fresh memory, so that nothing of a file stays mapped."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError

_MOST = 2**30  # that one system call reads; Linux gives up to 2 GiB
_PIECE = 2**17  # that one writes: page caches take pieces that a processor's cache holds up to four times faster


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's values in row order, without a copy where they lie so."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def read_rows(
    path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...], start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows [start, stop) of the tensor of this shape whose first byte is at `offset`.

    Raises CheckpointError if the file ends before they do, or cannot be read.
    """
    row = prod(shape[1:])
    rows = len(range(shape[0])[start:stop]) if shape else 1
    size = (rows, *shape[1:]) if shape else ()
    values = torch.empty(rows * row * dtype.itemsize, dtype=torch.uint8)
    _fill(path, offset + start * row * dtype.itemsize, values.numpy().data)
    return values.view(dtype).view(size)


def write_at(descriptor: int, values: Tensor, offset: int) -> int:
    """Write the values into a file from `offset` on; the offset behind them."""
    data = as_bytes(values)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _PIECE], offset + done)
    return offset + done


def _fill(path: Path, offset: int, into: memoryview) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(into):
                got = os.preadv(descriptor, [into[done : done + _MOST]], offset + done)
                if got == 0:
                    raise CheckpointError(
                        f"{path}: truncated: {os.fstat(descriptor).st_size} bytes, at least {offset + len(into)} "
                        "were expected. Copy it again."
                    )
                done += got
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Copy it again.") from error
