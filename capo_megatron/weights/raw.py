"""Bytes of tensors in files: mapped where they lie, for as long as the tensor lives, so that nothing is copied."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError

_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which Python does not name
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
    first, nbytes = offset + start * row * dtype.itemsize, rows * row * dtype.itemsize
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor).st_size
            if found < first + nbytes:
                raise CheckpointError(
                    f"{path}: truncated: {found} bytes, at least {first + nbytes} were expected. Copy it again."
                )
            mapped = _map(descriptor, first, nbytes) if nbytes and first % dtype.itemsize == 0 else None
            values = _read(path, descriptor, first, nbytes) if mapped is None else mapped
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Copy it again.") from error
    return values.view(dtype).view(size)


class SharedFile(FileIO):
    """A file that several threads write tensors into, each somewhere else."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._turn = threading.Lock()  # the kernel lets them take turns anyway, and wastes half the time on it

    def put(self, values: Tensor, offset: int) -> int:
        """Write values from `offset` on, wherever the file stands; the offset behind them."""
        data = as_bytes(values)
        done = 0
        with self._turn:
            while done < len(data):
                done += os.pwrite(self.fileno(), data[done : done + _PIECE], offset + done)
        return offset + done

    def write_all(self, data: bytes) -> None:
        """Write these bytes where the file stands; `write` may stop short of the last."""
        done = 0
        while done < len(data):
            done += self.write(data[done:])


def _map(descriptor: int, first: int, nbytes: int) -> Tensor | None:
    """Bytes of a file without a copy, unmapped with the tensor; None where the system cannot.

    All of them are fetched now: a disk that fails later than this would end the process (SIGBUS) without a word.
    """
    before = first % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(descriptor, before + nbytes, access=mmap.ACCESS_COPY, offset=first - before)
        mapped.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno == errno.EFAULT:  # it could not be read
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        return None  # an older kernel, or a file system without mappings
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=before)


def _read(path: Path, descriptor: int, first: int, nbytes: int) -> Tensor:
    """Bytes of a file in fresh memory."""
    values = torch.empty(nbytes, dtype=torch.uint8)
    into = values.numpy().data
    done = 0
    while done < nbytes:
        got = os.preadv(descriptor, [into[done : done + _MOST]], first + done)
        if got == 0:
            raise CheckpointError(f"{path}: became shorter while it was read. Copy it again.")
        done += got
    return values
