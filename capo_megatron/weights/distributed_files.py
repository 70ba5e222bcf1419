"""Megatron's dist-checkpoints written tensor by tensor, without Megatron: the other half of `distributed`."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from capo_megatron.weights.distributed import BACKENDS, COMMON, METADATA, Chunk, Stored, values_start
from capo_megatron.weights.raw import SharedFile
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import Place, places

FILE_BYTES = 5 * 10**9  # after which a rank begins another file
# Modules of a layer that keep something beside their parameters, which Megatron asks for whenever it loads: None.
# The norms are TransformerEngine's.
_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


class Written(NamedTuple):
    """A chunk that was written, of the tensor of this name."""

    name: str
    dtype: torch.dtype
    chunk: Chunk


class Header(NamedTuple):
    """What a chunk will be: a box of the tensor `name` that begins at `offsets`."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Hole:
    """The place of a chunk's values in a file."""

    def __init__(self, file: SharedFile, start: int, nbytes: int) -> None:
        self._file, self._at, self._end = file, start, start + nbytes

    def fill(self, values: Tensor) -> None:
        """Write the next values."""
        assert self._at + values.nbytes <= self._end, "more values than the chunk has"
        self._at = self._file.put(values, self._at)

    @property
    def left(self) -> int:
        return self._end - self._at


class ChunkFiles:
    """The `.distcp` files of one rank in the making. Several threads may begin and fill chunks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._files: list[SharedFile] = []
        self._holes: list[Hole] = []
        self._lock = threading.Lock()
        self.written: list[Written] = []
        self.extra: list[tuple[str, Chunk]] = []

    def begin(self, header: Header) -> Hole:
        """Lay out what torch.save writes of such a tensor, all but its values."""
        values = torch.empty(header.sizes, dtype=header.dtype)  # memory that is never touched
        with self._lock, torch.serialization.skip_data():
            chunk, file = self._save(values, header.offsets, header.sizes)
            self.written.append(Written(header.name, header.dtype, chunk))
            stored = Stored(header.dtype, header.sizes, (chunk,))
            start = values_start(file, stored, chunk)
            self._holes.append(Hole(file, start, values.nbytes))
            return self._holes[-1]

    def add_extra(self, shape: ModelShape) -> None:
        """Write what Megatron asks for beside tensors: the extra state of every layer's modules, which is none."""
        layers = shape.num_hidden_layers
        names = [
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
            for layer in range(layers)
            for module in _WITH_EXTRA_STATE
        ]
        for name in [*names, "decoder.final_layernorm._extra_state/shard_0_1"]:
            self.extra.append((name, self._save([None], (), ())[0]))

    def _save(self, value: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Chunk, SharedFile]:
        if not self._files or self._files[-1].tell() > FILE_BYTES:
            self._files.append(SharedFile(self._folder / f"__{self._rank}_{len(self._files)}.distcp", "w+"))
        file = self._files[-1]
        begin = file.tell()
        _save_without_checksums(value, file)
        return Chunk(offsets, sizes, Path(str(file.name)).name, begin, file.tell() - begin), file

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files:
            file.close()
        left = sum(hole.left for hole in self._holes)
        assert kind is not None or left == 0, f"{left} bytes were announced, not written"


class _Whole:
    """A file whose writes are never short, and whose failure is kept: torch would make another one of it."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.failure = error
            raise
        return len(memoryview(data).cast("B"))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        pass


def _save_without_checksums(value: Any, file: FileIO) -> None:
    """As torch.save, in half the processor time. The checksums left out are zip's, which torch does not read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    whole = _Whole(file)
    try:
        torch.save(value, cast(BinaryIO, whole))
    except RuntimeError as error:
        raise whole.failure or error from None
    finally:
        torch.serialization.set_crc32_options(before)


def stored_name(place: Place) -> str:
    """The tensor of a dist-checkpoint in which a parameter lies, under TransformerEngine's name as Megatron has it."""
    return ("decoder.layers." if place.layer is not None else "") + place.rule.names[-1]


def stored_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor of a dist-checkpoint. Vocabularies are not padded: Megatron pads on loading."""
    found = {}
    for place in places(shape):
        size = place.rule.local_shape(shape, 1)
        size = (shape.vocab_size, *size[1:]) if place.rule.vocabulary else size
        found[stored_name(place)] = (shape.num_hidden_layers, *size) if place.layer is not None else size
    return found


def write_metadata(
    folder: Path, shape: ModelShape, written: Sequence[Written], extra: Sequence[tuple[str, Chunk]]
) -> None:
    """Write what makes a dist-checkpoint of the ranks' chunks."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, size in stored_shapes(shape).items():
        mine = [entry for entry in written if entry.name == name]
        assert len({entry.dtype for entry in mine}) == 1, f"{name} in several dtypes"
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=mine[0].dtype),
            size=torch.Size(size),
            chunks=[ChunkStorageMetadata(torch.Size(e.chunk.offsets), torch.Size(e.chunk.sizes)) for e in mine],
        )
        for index, (_, _, chunk) in enumerate(mine):
            place = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            storage[MetadataIndex(name, torch.Size(chunk.offsets), index)] = place
    for name, chunk in extra:
        tensors[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(state_dict_metadata=tensors, storage_data=storage, storage_meta=StorageMeta())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0}, common)
    (folder / COMMON).write_bytes(common.getvalue())
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    (folder / BACKENDS).write_text(json.dumps(backends))
