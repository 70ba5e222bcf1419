"""`.metadata` of a dist-checkpoint: a pickle of torch's records, read without executing and written without importing.

torch.distributed.checkpoint, where the records are at home, takes as long to import as a gigabyte takes to convert.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from enum import Enum
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch

METADATA = ".metadata"


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int  # in the file
    length: int


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# --- reading ----------------------------------------------------------------------------------------------------------


def read(file: BinaryIO) -> dict[str, Stored]:
    """The tensors that `.metadata` tells of. Raises one of many exceptions if it is damaged."""
    metadata = _InertUnpickler(file).load()
    storage: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata["storage_data"].items():
        storage[index["fqn"], tuple(index.state.get("offset") or ())] = info
    found = {}
    for name, entry in metadata["state_dict_metadata"].items():
        if "chunks" not in entry.state:  # not a tensor, e.g. a module's extra state
            continue
        chunks = []
        for box in entry["chunks"]:
            offsets, sizes = tuple(box["offsets"]), tuple(box["sizes"])
            info = storage[name, offsets]
            if info.state.get("transform_descriptors"):
                raise ValueError(f"tensor {name} is compressed, which is not supported")
            chunks.append(Chunk(offsets, sizes, str(info["relative_path"]), int(info["offset"]), int(info["length"])))
        dtype, shape = entry["properties"].state[0], tuple(entry["size"])
        numbers = [*shape, *(number for chunk in chunks for number in (*chunk.offsets, *chunk.sizes))]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        if not isinstance(dtype, torch.dtype) or not whole or any(len(chunk.sizes) != len(shape) for chunk in chunks):
            raise ValueError(f"tensor {name} is described wrongly")
        found[str(name)] = Stored(dtype, shape, tuple(chunks))
    return found


class _Read:
    """What an object of `.metadata` holds, without being one."""

    state: Any = MappingProxyType({})

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _InertUnpickler(pickle.Unpickler):
    """Reads the objects of a checkpoint's `.metadata` as records; anything else in it is an error."""

    _RECORDS = frozenset(
        ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
         "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "SavePlan", "WriteItem",
         "WriteItemType", "TensorWriteData", "_get_layout", "device", "PosixPath", "Path")
    )  # fmt: skip
    _MODULES = ("torch", "torch.serialization", "torch.distributed.checkpoint.", "pathlib")
    _CONTAINERS = MappingProxyType({("torch", "Size"): tuple, ("collections", "OrderedDict"): dict})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._CONTAINERS:
            return self._CONTAINERS[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name in self._RECORDS and module.startswith(self._MODULES):
            return _Read
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into it")


# --- writing ----------------------------------------------------------------------------------------------------------


def write(folder: Path, tensors: Mapping[str, Stored], extra: Iterable[tuple[str, Chunk]]) -> None:
    """Write `.metadata` of these tensors, and of what is no tensor (`extra`: name and place)."""
    entries: dict[str, _Record] = {}
    storage: dict[_Record, _Record] = {}
    for name, stored in tensors.items():
        entries[name] = TensorStorageMetadata(
            properties=TensorProperties(stored.dtype),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                for chunk in stored.chunks
            ],
        )
        for index, chunk in enumerate(stored.chunks):
            storage[MetadataIndex(fqn=name, index=index, offset=torch.Size(chunk.offsets))] = _place(chunk)
    for name, chunk in extra:
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(fqn=name, index=None)] = _place(chunk)
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data=None,
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=None, save_id=None, load_id=None, modules=[]),
    )
    (folder / METADATA).write_bytes(_under_torchs_names(metadata))


def _place(chunk: Chunk) -> _StorageInfo:
    return _StorageInfo(relative_path=chunk.file, offset=chunk.offset, length=chunk.length)


class _Record:
    """An object whose pickle, but for its class, is that of torch's record of the same name."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


class Metadata(_Record):
    pass


class MetadataIndex(_Record):
    pass


class TensorStorageMetadata(_Record):
    pass


class BytesStorageMetadata(_Record):
    pass


class ChunkStorageMetadata(_Record):
    pass


class StorageMeta(_Record):
    pass


class _MEM_FORMAT_ENCODING(Enum):
    TORCH_CONTIGUOUS_FORMAT = 0


class TensorProperties(_Record):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.dtype, torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False)


class _StorageInfo(_Record):
    pass


_DCP = "torch.distributed.checkpoint"
_HOMES: Mapping[type, str] = {
    Metadata: f"{_DCP}.metadata",
    MetadataIndex: f"{_DCP}.metadata",
    TensorStorageMetadata: f"{_DCP}.metadata",
    BytesStorageMetadata: f"{_DCP}.metadata",
    ChunkStorageMetadata: f"{_DCP}.metadata",
    TensorProperties: f"{_DCP}.metadata",
    _MEM_FORMAT_ENCODING: f"{_DCP}.metadata",
    StorageMeta: f"{_DCP}.metadata",
    _StorageInfo: f"{_DCP}.filesystem",
}


def _under_torchs_names(metadata: Metadata) -> bytes:
    """Its pickle, in which classes stand as lines of module and name: this module's lines are made torch's."""
    pickled = io.BytesIO()
    pickle.dump(metadata, pickled, protocol=2)  # later ones put lengths before what is renamed here
    text = pickled.getvalue()
    for record, home in _HOMES.items():
        mine, torchs = (f"c{module}\n{record.__name__}\n".encode() for module in (__name__, home))
        text = text.replace(mine, torchs)
    return text
