"""A checkpoint's tensors in small blocks: read, converted, checked for NaN, hashed on the way."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.checkpoint import Checkpoint, torch_name
from capo_megatron.weights.huggingface import Spec
from capo_megatron.weights.manifest import Entry, Hasher
from capo_megatron.weights.sources import DTYPES, WeightSource, dtype_name
from capo_megatron.weights.table import places

# Small enough to be allocated again and again without the kernel's help, on which large blocks spend most of the time.
BLOCK_BYTES = 2**22

Progress = Callable[[int, int], None]  # bytes done, bytes in all, of this rank


class Reader:
    """Reads tensors block by block, looks for NaN, converts, and hashes what comes out."""

    def __init__(self, found: Checkpoint, dtype: torch.dtype | None, strict: bool, progress: Progress) -> None:
        self._source, self._manifest = found.source, found.manifest
        self.dtype, self._strict, self._progress = dtype, strict, progress
        self.entries: dict[str, Entry] = {}
        self.complaints: list[str] = []
        self.total = sum(self.nbytes(name) for place in places(found.shape) for name in place.parts)
        self._done, self._expected = 0, self.total
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def spec(self, name: str) -> Spec:
        """What a tensor will be."""
        dtype = self._source.dtype(name) if self.dtype is None else dtype_name(self.dtype)
        return Spec(dtype, self._source.shape(name))

    def nbytes(self, name: str) -> int:
        return self.spec(name).nbytes

    def expect(self, names: Iterable[str]) -> None:
        """These are the tensors that this rank will read."""
        self._expected = sum(map(self.nbytes, names))

    def tensor(self, name: str) -> Reading:
        """A tensor, to be read from its first block to its last."""
        return Reading(self, self._source, name, self.spec(name))

    def whole(self, name: str) -> Tensor:
        """All values of a tensor."""
        tensor = self.tensor(name)
        blocks = list(tensor.blocks())
        tensor.finish()
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def stop(self) -> None:
        """Let every thread that reads fail at its next block."""
        self._stopped.set()

    def advance(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError(errno.EINTR, "stopped")
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._expected)

    def conclude(self, name: str, spec: Spec, read: str, made: str, bad: int) -> None:
        """Note that a tensor was read whole: the hashes of what was read and of what was made of it, and its NaNs."""
        if self._manifest is not None:
            self._manifest.check(name, read, self._source.where(name))
        if bad:
            self._complain(name, bad)
        self.entries[name] = Entry(spec.dtype, spec.shape, made)

    def _complain(self, name: str, bad: int) -> None:
        as_what = "" if self.dtype is None else f" as {torch_name(dtype_name(self.dtype))}"
        text = f"{self._source.where(name)}: tensor {name}: {bad} values are NaN or infinite{as_what}"
        if self._strict:
            raise CheckpointError(f"{text}. Nothing was written. Without --strict it is converted as it is.")
        self.complaints.append(text)


class Reading:
    """One tensor on its way through: blocks in order, and what is known of them in the end."""

    def __init__(self, reader: Reader, source: WeightSource, name: str, spec: Spec) -> None:
        self._reader, self._source, self._name, self._spec = reader, source, name, spec
        self._converted = spec.dtype != source.dtype(name)
        self._before, self._after = Hasher(), Hasher()
        self._bad = 0

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """The values of rows [start, stop), a few at a time."""
        spec = self._spec
        stop = spec.shape[0] if stop is None else stop
        step = max(1, BLOCK_BYTES // max(1, spec.nbytes // spec.shape[0]))
        for row in range(start, stop, step):
            read = self._source.read(self._name, 0, row, min(row + step, stop))
            values = read.to(DTYPES[spec.dtype])
            self._bad += _count_bad(values)
            self._after.add(values)
            if self._converted:
                self._before.add(read)
            yield values
            self._reader.advance(values.nbytes)

    def finish(self) -> None:
        """Raise CheckpointError if what was read is not what the manifest says, or holds NaN and may not."""
        made = self._after.digest
        read = self._before.digest if self._converted else made
        self._reader.conclude(self._name, self._spec, read, made, self._bad)


def _count_bad(values: Tensor) -> int:
    """How many values are NaN or infinite. A sum, which any of them spoils, is thirty times faster than counting."""
    if bool(torch.isfinite(values.sum())):
        return 0
    return values.numel() - int(torch.isfinite(values).sum())
