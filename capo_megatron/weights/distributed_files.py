"""Megatron's dist-checkpoints written tensor by tensor, without Megatron: the other half of `distributed`."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capo_megatron.weights import metadata
from capo_megatron.weights.distributed import BACKENDS, COMMON
from capo_megatron.weights.metadata import Chunk, Stored
from capo_megatron.weights.raw import SharedFile
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import Place, places
from capo_megatron.weights.torch_save import Frame, frame_of, save_without_checksums

FILE_BYTES = 5 * 10**9  # after which a rank begins another file
_ALIGNED = 64  # bytes, within a chunk by torch.save as well: values can then be used where a file is mapped
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
        self._frames: dict[tuple[torch.dtype, tuple[int, ...]], Frame] = {}
        self._lock = threading.Lock()
        self.written: list[Written] = []
        self.extra: list[tuple[str, Chunk]] = []

    def begin(self, header: Header) -> Hole:
        """Lay out what torch.save writes of such a tensor, all but its values."""
        with self._lock:
            frame = self._frame(header.dtype, header.sizes)
            file, begin = self._next_place()
            file.write_all(frame.head)
            file.seek(frame.nbytes, os.SEEK_CUR)
            file.write_all(frame.tail)
            chunk = Chunk(header.offsets, header.sizes, Path(str(file.name)).name, begin, frame.length)
            self.written.append(Written(header.name, header.dtype, chunk))
            self._holes.append(Hole(file, begin + len(frame.head), frame.nbytes))
            return self._holes[-1]

    def add_extra(self, shape: ModelShape) -> None:
        """Write what Megatron asks for beside tensors: the extra state of every layer's modules, which is none."""
        layers = shape.num_hidden_layers
        nothing = io.BytesIO()
        save_without_checksums([None], nothing)
        names = [
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
            for layer in range(layers)
            for module in _WITH_EXTRA_STATE
        ]
        for name in [*names, "decoder.final_layernorm._extra_state/shard_0_1"]:
            file, begin = self._next_place()
            file.write_all(nothing.getvalue())
            place = Chunk((), (), Path(str(file.name)).name, begin, file.tell() - begin)
            self.extra.append((name, place))

    def _frame(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
        if (dtype, sizes) not in self._frames:
            self._frames[dtype, sizes] = frame_of(dtype, sizes)
        return self._frames[dtype, sizes]

    def _next_place(self) -> tuple[SharedFile, int]:
        """The file for the next chunk, which stands where the chunk begins."""
        if not self._files or self._files[-1].tell() > FILE_BYTES:
            self._files.append(SharedFile(self._folder / f"__{self._rank}_{len(self._files)}.distcp", "w"))
        file = self._files[-1]
        return file, file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files:
            file.close()
        left = sum(hole.left for hole in self._holes)
        assert kind is not None or left == 0, f"{left} bytes were announced, not written"


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
    tensors = {}
    for name, size in stored_shapes(shape).items():
        mine = [entry for entry in written if entry.name == name]
        assert len({entry.dtype for entry in mine}) == 1, f"{name} in several dtypes"
        tensors[name] = Stored(mine[0].dtype, size, tuple(entry.chunk for entry in mine))
    metadata.write(folder, tensors, extra)
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0}, common)
    (folder / COMMON).write_bytes(common.getvalue())
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    (folder / BACKENDS).write_text(json.dumps(backends))
