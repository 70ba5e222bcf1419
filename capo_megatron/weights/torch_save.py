"""A tensor as `torch.save` writes it, a zip file: its values, and the frame of a few kilobytes around them.

Only frames pass through torch here, and one of a kind once: tensors of one dtype and shape are framed alike, layer by
layer. The values are read and written as bytes.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from io import FileIO
from math import prod
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from capo_megatron.weights.sources import dtype_name

_MOST_KEPT = 2**16  # bytes of a frame that are remembered; others are no frames of torch's


class Frame(NamedTuple):
    """What torch.save writes around values."""

    head: bytes
    nbytes: int  # of the values
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


def frame_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """The frame of a tensor of this dtype and shape."""
    values = torch.empty(sizes, dtype=dtype)  # memory that is never touched
    recorder = _Recorder()
    with torch.serialization.skip_data():
        save_without_checksums(values, recorder)
    assert recorder.skipped == values.nbytes, f"{recorder.skipped} bytes were left out, not {values.nbytes}"
    return Frame(bytes(recorder.head), values.nbytes, bytes(recorder.tail))


def save_without_checksums(value: Any, file: Any) -> None:
    """As torch.save, in half the processor time. The checksums left out are zip's, which torch does not read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, file)
    finally:
        torch.serialization.set_crc32_options(before)


class Frames:
    """The frames that were met in files, by which others are found again without torch."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, tuple[int, ...], int], Frame] = {}

    def values_start(self, file: FileIO, dtype: torch.dtype, sizes: tuple[int, ...], offset: int, length: int) -> int:
        """Where in a file the values of the tensor begin that was saved into `length` bytes from `offset` on.

        Raises one of many exceptions if torch.save did not write it, if it is another tensor, or if it is damaged.
        """
        known = self._known.get((dtype, sizes, length))
        if known is not None and known == _frame_at(file, offset, length, len(known.head), known.nbytes):
            return offset + len(known.head)
        start = _parse(file, dtype, sizes, offset, length)
        nbytes = prod(sizes) * dtype.itemsize
        if length - nbytes <= _MOST_KEPT:
            self._known[dtype, sizes, length] = _frame_at(file, offset, length, start - offset, nbytes)
        return start


def _frame_at(file: FileIO, offset: int, length: int, head: int, nbytes: int) -> Frame:
    """The frame in a file of which the first part is `head` bytes long."""
    behind = head + nbytes
    before = os.pread(file.fileno(), head, offset)
    return Frame(before, nbytes, os.pread(file.fileno(), length - behind, offset + behind))


class _Recorder:
    """A file that keeps what is written before and behind the bytes that are skipped."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.skipped = 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        (self.tail if self.skipped else self.head).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and not self.skipped, "torch.save left out more than the values"
        self.skipped = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.head) + self.skipped + len(self.tail)

    def flush(self) -> None:
        pass


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: FileIO, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = file.fileno(), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._length - self._at))
        got = os.pread(self._descriptor, count, self._offset + self._at)
        buffer[: len(got)] = got
        self._at += len(got)
        return len(got)

    def bytes_at(self, position: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, self._offset + position)


def _parse(file: FileIO, dtype: torch.dtype, sizes: tuple[int, ...], offset: int, length: int) -> int:
    """Where in a file the values begin, from the frame around them: torch reads what is in it, zipfile where."""
    window = _Window(file, offset, length)
    with torch.serialization.skip_data():  # shape and strides only
        tensor = torch.load(cast(BinaryIO, window), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
        raise ValueError(f"it is not of {dtype_name(dtype)} {sizes}, as .metadata says")
    if not tensor.is_contiguous() or tensor.storage_offset() != 0:
        raise ValueError("its values do not lie one after another")
    window.seek(0)
    records = [record for record in zipfile.ZipFile(window).infolist() if record.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("its values are not where torch.save puts them")
    if records[0].file_size < tensor.nbytes:
        raise ValueError(f"{records[0].file_size} bytes of values, {tensor.nbytes} are needed")
    begin = records[0].header_offset
    name_length, extra_length = struct.unpack("<HH", window.bytes_at(begin + 26, 4))  # of the record's local header
    return int(offset + begin + 30 + name_length + extra_length)
