"""A hash of every tensor, written beside the weights, by which a bit that flips later is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.huggingface import write_json
from capo_megatron.weights.raw import as_bytes
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import WeightSource
from capo_megatron.weights.table import hf_shapes

MANIFEST = "capo_manifest.json"
_HASH = "xxh3_128"
_AGAIN = "Convert the model again, or delete this file to do without its checks."


class Entry(NamedTuple):
    """What a tensor was when it was written, under its Hugging Face name."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    hash: str  # of its values in row order, hexadecimal


@dataclass(frozen=True)
class Manifest:
    """The tensors and the small files of a converted model.

    The hashes are of Hugging Face tensors, whatever the format: the same model has the same hashes in all of them.
    """

    tensors: Mapping[str, Entry]
    files: Mapping[str, str] = field(default_factory=dict)  # name -> hash, of the files that hold no tensors

    def check(self, name: str, digest: str, where: str) -> None:
        """Raise CheckpointError unless this is the hash of tensor `name`."""
        if name in self.tensors and self.tensors[name].hash != digest:
            raise CheckpointError(
                f"{where}: tensor {name} is not what was written: its hash is {digest}, {MANIFEST} says "
                f"{self.tensors[name].hash}. A bit has flipped, or a file was replaced: convert the model again."
            )

    def check_tables(self, folder: Path, shape: ModelShape, source: WeightSource) -> None:
        """Raise CheckpointError unless it speaks of exactly the tensors of this model, as they are."""
        expected = hf_shapes(shape)
        for name in self.tensors.keys() ^ expected.keys():
            what = "does not name" if name in expected else "names"
            raise CheckpointError(f"{folder / MANIFEST}: it {what} tensor {name}. {_AGAIN}")
        for name, entry in self.tensors.items():
            found = (source.dtype(name), source.shape(name))
            if found != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{folder / MANIFEST}: it says that {name} is {entry.dtype} {entry.shape}, but it is {found[0]} "
                    f"{found[1]}. {_AGAIN}"
                )

    def check_files(self, folder: Path, unless: Sequence[str] = ()) -> None:
        """Raise CheckpointError if one of the small files has changed or is gone, but for those in `unless`."""
        for name, wanted in self.files.items():
            if name in unless:
                continue
            path = folder / name
            found = file_hash(path) if path.is_file() else "none: there is no such file"
            if found != wanted:
                raise CheckpointError(
                    f"{path}: is not what was written: its hash is {found}, {MANIFEST} says {wanted}. Convert the "
                    f"model again; or, if you changed this file, delete its line in {MANIFEST}."
                )

    def write(self, folder: Path) -> None:
        tensors = {name: entry._asdict() for name, entry in self.tensors.items()}
        write_json(folder / MANIFEST, {"format": 1, "hash": _HASH, "tensors": tensors, "files": dict(self.files)})

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`, None if there is none. Raises CheckpointError if it is damaged."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if (found["format"], found["hash"]) != (1, _HASH):
                raise ValueError(f"format {found['format']} with {found['hash']} is not known")
            tensors = {
                name: Entry(entry["dtype"], tuple(entry["shape"]), entry["hash"])
                for name, entry in found["tensors"].items()
            }
            files = {str(name): str(value) for name, value in found["files"].items() if Path(name).name == name}
            return cls(tensors, files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error}). {_AGAIN}") from error


class Hasher:
    """The hash of a tensor that comes in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, values: Tensor) -> None:
        self._state.update(as_bytes(values))

    @property
    def digest(self) -> str:
        return self._state.hexdigest()


def file_hash(path: Path) -> str:
    return xxhash.xxh3_128(path.read_bytes()).hexdigest()


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    """The hashes of those of these files that exist."""
    return {name: file_hash(folder / name) for name in names if (folder / name).is_file()}


@dataclass(frozen=True)
class Checked:
    """A source whose tensors are compared with a manifest as they are read; a part of one costs reading the whole."""

    source: WeightSource
    manifest: Manifest

    def names(self) -> set[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def dtype(self, name: str) -> str:
        return self.source.dtype(name)

    def where(self, name: str) -> str:
        return self.source.where(name)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        whole = self.source.read(name)
        hasher = Hasher()
        hasher.add(whole)
        self.manifest.check(name, hasher.digest, self.where(name))
        return whole if dim is None else torch.narrow(whole, dim, start, _length(whole.shape[dim], start, stop))


def _length(size: int, start: int, stop: int | None) -> int:
    return (size if stop is None else min(stop, size)) - start
