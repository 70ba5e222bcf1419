"""Megatron's dist-checkpoints (backend `torch_dist`), read and written tensor by tensor, without Megatron.

    .metadata       pickle: every tensor's global shape and dtype, its chunks, and the bytes in which each chunk lies
    __R_N.distcp    chunks one after another, each as `torch.save` writes it; R counts ranks, N the files of a rank
    common.pt       what is not sharded          metadata.json    the names of the backends

What is pickled is never executed: `.metadata` is read into inert records, and of a chunk only its header is unpickled,
by torch's weights-only loader. The values are then read as bytes, and only those that are asked for.

A layer's parameter lies in one tensor with all layers on its first axis, which is how Megatron-core names homogeneous
layers; `decoder.layers.<n>.` of others is read, too.
"""

from __future__ import annotations

import json
import pickle
import struct
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights import metadata
from capo_megatron.weights.metadata import METADATA, Chunk, Stored
from capo_megatron.weights.raw import read_rows
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import dtype_name
from capo_megatron.weights.table import Home, Packing, Place, places, tied_head
from capo_megatron.weights.torch_save import Frames

BACKENDS = "metadata.json"
COMMON = "common.pt"
_PREFIXES = ("", "model.", "module.", "model.module.")  # before the model's tensors: Megatron-LM's and ours; NeMo's
_ROOTS = ("embedding.", "decoder.", "output_layer.", "mtp.")  # with which the names of a GPTModel's tensors begin


@dataclass
class DistCheckpoint:
    """The tensors of a dist-checkpoint. Raises CheckpointError if it is missing, damaged, or in another backend."""

    folder: Path
    tensors: Mapping[str, Stored] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self._check_backend()
        self.tensors = self._read_metadata()
        self._check_files()
        self._frames = Frames()

    def read(self, name: str, box: Sequence[tuple[int, int]]) -> Tensor:
        """The part [start, stop) along every axis of a tensor."""
        stored = self.tensors[name]
        for chunk in stored.chunks:  # the usual case, without a copy
            inside = [(start - begin, stop - begin) for (start, stop), begin in zip(box, chunk.offsets, strict=True)]
            if all(a >= 0 and b <= size for (a, b), size in zip(inside, chunk.sizes, strict=True)):
                return self._read_chunk(name, stored, chunk, inside)
        found = torch.empty([stop - start for start, stop in box], dtype=stored.dtype)
        covered = 0
        for chunk in stored.chunks:
            part = [
                (max(start, begin), min(stop, begin + size))
                for (start, stop), begin, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in part):
                continue
            inside = [(start - begin, stop - begin) for (start, stop), begin in zip(part, chunk.offsets, strict=True)]
            target = found[tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(part, box, strict=True))]
            target.copy_(self._read_chunk(name, stored, chunk, inside))
            covered += target.numel()
        if covered != found.numel():
            raise CheckpointError(
                f"{self.folder / METADATA}: tensor {name}: its chunks hold {covered} of {found.numel()} values, or "
                "hold some twice. The checkpoint is damaged: copy it again."
            )
        return found

    def where(self, name: str) -> str:
        """The files in which a tensor lies, or would lie."""
        files = sorted({chunk.file for chunk in self.tensors[name].chunks}) if name in self.tensors else []
        return str(self.folder / files[0]) if len(files) == 1 else str(self.folder)

    def _read_chunk(self, name: str, stored: Stored, chunk: Chunk, inside: Sequence[tuple[int, int]]) -> Tensor:
        """A box of a chunk; whole rows are read of the first axis that is longer than 1."""
        start = self._values_of(name, stored, chunk)
        axis = next((index for index, size in enumerate(chunk.sizes) if size != 1), len(chunk.sizes) - 1)
        if not chunk.sizes:
            return read_rows(self.folder / chunk.file, start, stored.dtype, ())
        rows = read_rows(self.folder / chunk.file, start, stored.dtype, chunk.sizes[axis:], *inside[axis])
        narrowed = rows[(slice(None), *(slice(*span) for span in inside[axis + 1 :]))]
        return narrowed.reshape(*[1] * axis, *narrowed.shape)

    def _values_of(self, name: str, stored: Stored, chunk: Chunk) -> int:
        """Where in its file the values of a chunk begin."""
        path = self.folder / chunk.file
        try:
            with FileIO(path) as file:
                return self._frames.values_start(file, stored.dtype, chunk.sizes, chunk.offset, chunk.length)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{path}: tensor {name}: damaged ({_first_line(error)}). Copy the checkpoint again."
            ) from error

    def _check_backend(self) -> None:
        path = self.folder / BACKENDS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            backend = found["sharded_backend"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder}: no {BACKENDS}: not a Megatron dist-checkpoint. Point to the folder that has one."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error}). Copy the checkpoint again.") from error
        if backend != "torch_dist":
            raise CheckpointError(
                f"{path}: the format {backend!r} is not supported, only 'torch_dist'. Save it again with "
                "--ckpt-format torch_dist."
            )

    def _read_metadata(self) -> dict[str, Stored]:
        path = self.folder / METADATA
        try:
            with path.open("rb") as file:
                return metadata.read(file)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file: the checkpoint is incomplete. Copy it again.") from None
        except _UNREADABLE as error:
            raise CheckpointError(f"{path}: damaged ({_first_line(error)}). Copy the checkpoint again.") from error

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self.tensors.values():
            for chunk in stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if Path(name).name != name or not path.is_file():
                raise CheckpointError(f"{path}: no such file, but {METADATA} names it. Copy the checkpoint again.")
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(f"{path}: truncated: {size} bytes, {end} are needed. Copy the checkpoint again.")


# What reading damaged bytes as a pickle, a zip file or a table may raise.
_UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, ValueError, KeyError,
    TypeError, AttributeError, IndexError, ImportError, MemoryError, OverflowError, NotImplementedError,
)  # fmt: skip


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0][:160] if lines else type(error).__name__).rstrip(".")


class MegatronSource:
    """A model's tensors under their Hugging Face names, out of a dist-checkpoint saved on any layout."""

    def __init__(self, checkpoint: DistCheckpoint, shape: ModelShape) -> None:
        """Raises CheckpointError if the checkpoint does not hold this model."""
        self.checkpoint, self._model = checkpoint, shape
        self._prefix = model_prefix(checkpoint.tensors) or ""
        self._found: dict[str, tuple[str, int | None, Place, int]] = {}  # name -> tensor, its layer, place, part
        self._last = threading.local()  # what each thread read of a packed parameter, whose parts are asked for in turn
        used = set()
        for place in (*places(shape), *tied_head(shape)):
            stored, layer = self._stored(place)
            if stored is None:
                continue  # `names` leaves it out
            used.add(stored)
            self._check_shape(stored, layer, place)
            for index, name in enumerate(place.parts):
                self._found[name] = (stored, layer, place, index)
        self._refuse_unexpected(used)

    def names(self) -> set[str]:
        return set(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        _, _, place, index = self._found[name]
        return place.rule.parts[index].shape(self._model)

    def dtype(self, name: str) -> str:
        return dtype_name(self.checkpoint.tensors[self._found[name][0]].dtype)

    def where(self, name: str) -> str:
        return self.checkpoint.where(self._found[name][0]) if name in self._found else str(self.checkpoint.folder)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        stored, layer, place, index = self._found[name]
        if place.rule.packing is Packing.GROUPED:
            whole = self._unpacked(stored, layer, place)[index]
            return whole if dim is None else whole[(slice(None),) * dim + (slice(start, stop),)].contiguous()
        size = self.shape(name)
        box = [(0, length) for length in size]
        if dim is not None:
            box[dim] = slice(start, stop).indices(size[dim])[:2]
        above = sum(part.shape(self._model)[0] for part in place.rule.parts[:index])
        box[0] = (box[0][0] + above, box[0][1] + above)
        return self._read(stored, layer, box)

    def _unpacked(self, stored: str, layer: int | None, place: Place) -> list[Tensor]:
        """The parts of a packed parameter."""
        if getattr(self._last, "place", None) is not place:
            whole = self._read(stored, layer, [(0, length) for length in place.rule.local_shape(self._model, 1)])
            self._last.parts = [part.contiguous() for part in place.rule.unpack(whole, self._model)]
            self._last.place = place
        parts: list[Tensor] = self._last.parts
        return parts

    def _read(self, stored: str, layer: int | None, box: list[tuple[int, int]]) -> Tensor:
        if layer is None:
            return self.checkpoint.read(stored, box)
        return self.checkpoint.read(stored, [(layer, layer + 1), *box]).squeeze(0)

    def _stored(self, place: Place) -> tuple[str | None, int | None]:
        """The tensor that holds a parameter, and at which layer of it."""
        for name in place.rule.names:
            if place.rule.home is not Home.LAYER:
                candidates: tuple[tuple[str, int | None], ...] = ((self._prefix + name, None),)
            else:
                inside = self._prefix + "decoder.layers."
                candidates = ((inside + name, place.layer), (f"{inside}{place.layer}.{name}", None))
            for candidate, layer in candidates:
                if candidate in self.checkpoint.tensors:
                    return candidate, layer
        return None, None

    def _check_shape(self, stored: str, layer: int | None, place: Place) -> None:
        rule, shape = place.rule, self._model
        found = self.checkpoint.tensors[stored].shape
        wanted = rule.local_shape(shape, 1)
        if rule.vocabulary:
            wanted = (shape.vocab_size, *wanted[1:])
        if layer is not None:
            wanted = (shape.num_hidden_layers, *wanted)
        padded = rule.vocabulary and len(found) == len(wanted) and found[0] >= wanted[0] and found[1:] == wanted[1:]
        if found != wanted and not padded:
            raise CheckpointError(
                f"{self.checkpoint.where(stored)}: tensor {stored} has shape {found}, but {shape.name} needs {wanted}."
            )

    def _refuse_unexpected(self, used: set[str]) -> None:
        extra = {
            name
            for name in self.checkpoint.tensors.keys() - used
            if name.startswith(tuple(self._prefix + root for root in _ROOTS)) and "_extra_state" not in name
        }
        if extra:
            name = min(extra)
            raise CheckpointError(
                f"{self.checkpoint.where(name)}: tensor {name} ({len(extra)} such) has no place in {self._model.name} "
                f"with {self._model.num_hidden_layers} layers. The weights belong to another model than config.json."
            )


def model_prefix(names: Iterable[str]) -> str | None:
    """What stands before the names of the model's tensors; None if there is no model among them."""
    known = set(names)
    return next((prefix for prefix in _PREFIXES if prefix + "embedding.word_embeddings.weight" in known), None)
