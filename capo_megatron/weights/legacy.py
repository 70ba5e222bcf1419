"""Megatron-LM's older checkpoints, one file per model-parallel rank, read at any tensor and pipeline parallelism.

    mp_rank_TT/model_optim_rng.pt          T: tensor-parallel rank
    mp_rank_TT_PPP/model_optim_rng.pt      P: pipeline rank, if there are several

A file holds a pickled dictionary: `model` (or `model0`, `model1`, ... with virtual stages) has the parameters of that
rank under Megatron-core's names, layers counted within the rank. Files are read by torch's weights-only loader, which
builds tensors, numbers and containers, and runs nothing; `trust_pickle` lifts that.
"""

from __future__ import annotations

import argparse
import pickle
import re
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import dtype_name
from capo_megatron.weights.table import Place, places, tied_head

FILE = "model_optim_rng.pt"
_KEPT_BYTES = 2**28  # of values that are read before files are mapped anew: what was read would stay in memory
_PREFIXES = ("module.", "module.", "model.")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")


def is_legacy(folder: Path) -> bool:
    """Whether such a checkpoint lies in `folder`."""
    return any(folder.glob("mp_rank_*/" + FILE))


@dataclass(frozen=True)
class _Piece:
    """One rank's part of a parameter: which file, which of its models, under which name."""

    file: Path
    model: str
    name: str


class LegacyCheckpoint:
    """The files of all ranks. Raises CheckpointError if one is missing or cannot be read."""

    def __init__(self, folder: Path, trust_pickle: bool = False) -> None:
        self.folder, self._trust = Path(folder), trust_pickle
        ranks: dict[tuple[int, int], Path] = {}
        for file in sorted(self.folder.glob("mp_rank_*/" + FILE)):
            found = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?", file.parent.name)
            if found is None or found[3] is not None:
                raise CheckpointError(
                    f"{file.parent}: not a rank of a dense model: expected mp_rank_TT or mp_rank_TT_PPP. "
                    "Expert parallelism is not supported."
                )
            ranks[int(found[1]), int(found[2] or 0)] = file
        if not ranks:
            raise CheckpointError(f"{self.folder}: no mp_rank_*/{FILE} in it. Point to the folder of an iteration.")
        self.tensor = 1 + max(tensor for tensor, _ in ranks)
        self.pipeline = 1 + max(stage for _, stage in ranks)
        for stage in range(self.pipeline):
            for tensor in range(self.tensor):
                if (tensor, stage) not in ranks:
                    name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if self.pipeline > 1 else "")
                    raise CheckpointError(
                        f"{self.folder / name}: missing: there are ranks up to tensor {self.tensor - 1}, pipeline "
                        f"{self.pipeline - 1}. Copy the checkpoint again."
                    )
        self._files = ranks
        self._open: dict[Path, Mapping[str, Any]] = {}
        self._read = 0
        self._lock = threading.RLock()
        self.virtual = len(self._models(ranks[0, 0]))
        self.iteration = self._load(ranks[0, 0]).get("iteration")

    def pieces(self) -> dict[tuple[int | None, str], list[_Piece]]:
        """Per layer (None: outside of layers) and name inside it, the pieces of all tensor-parallel ranks."""
        found: dict[tuple[int | None, str], list[_Piece]] = {}
        first = 0
        for chunk in range(self.virtual):
            for stage in range(self.pipeline):
                layers = 0
                for tensor in range(self.tensor):
                    file = self._files[tensor, stage]
                    models = self._models(file)
                    if len(models) != self.virtual:
                        raise CheckpointError(f"{file}: {len(models)} virtual stages, others have {self.virtual}.")
                    for name in self._load(file)[models[chunk]]:
                        layer, inside = _place_of(name)
                        layers = max(layers, 0 if layer is None else layer + 1)
                        key = (None if layer is None else first + layer, inside)
                        found.setdefault(key, []).append(_Piece(file, models[chunk], name))
                first += layers
        return found

    def read(self, piece: _Piece) -> Tensor:
        """The values of a piece."""
        with self._lock:
            if self._read > _KEPT_BYTES:
                self._open.clear()
                self._read = 0
            tensor = self.peek(piece)
            self._read += tensor.nbytes
            return tensor

    def peek(self, piece: _Piece) -> Tensor:
        """A piece whose values are not looked at."""
        with self._lock:
            tensor = self._load(piece.file)[piece.model][piece.name]
        assert isinstance(tensor, Tensor), "_load checks it"
        return tensor

    def _models(self, file: Path) -> list[str]:
        found = self._load(file)
        names = sorted((name for name in found if re.fullmatch(r"model\d*", name)), key=lambda name: int(name[5:] or 0))
        if not names:
            raise CheckpointError(f"{file}: no model in it, only {', '.join(sorted(map(str, found))[:5])}.")
        return names

    def _load(self, file: Path) -> Mapping[str, Any]:
        if file not in self._open:
            self._open[file] = _flat_models(file, _read_file(file, self._trust))
        return self._open[file]


def _read_file(file: Path, trust_pickle: bool) -> Any:
    try:
        mapped = zipfile.is_zipfile(file)  # as torch.save writes since 1.6
        if trust_pickle:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=mapped)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if found is None and not zipfile.is_zipfile(file):
            raise CheckpointError(f"{file}: not a file that torch.save wrote. Copy it again.") from error
        what = f"{found[1]} objects" if found else "more than tensors and numbers"
        raise CheckpointError(
            f"{file}: holds {what}, which only unpickling could read. That runs code which the file's author chose. "
            "If you trust it: --trust-pickle."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160].rstrip(".")
        raise CheckpointError(f"{file}: damaged or truncated ({reason}). Copy it again.") from error


def _flat_models(file: Path, found: Any) -> dict[str, Any]:
    """The file's dictionary, its models' parameters under full names without a wrapper's prefix."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds a {type(found).__name__}, expected a dictionary.")
    flat: dict[str, Any] = {name: value for name, value in found.items() if isinstance(name, str)}
    for name, model in found.items():
        if isinstance(name, str) and re.fullmatch(r"model\d*", name):
            if not isinstance(model, dict):
                raise CheckpointError(f"{file}: {name} is a {type(model).__name__}, expected a dictionary of tensors.")
            tensors = {key: value for key, value in model.items() if isinstance(value, Tensor)}
            odd = [key for key, value in tensors.items() if not isinstance(key, str) or not _is_plain(value)]
            if odd:
                raise CheckpointError(f"{file}: {name}: {odd[0]!r} is not a plain tensor under a name. Copy it again.")
            nested = [key for key, value in model.items() if isinstance(value, dict)]
            if nested:
                raise CheckpointError(
                    f"{file}: {name} nests {nested[0]!r}: a checkpoint from before Megatron-core, which is not "
                    "supported. Load it in Megatron-LM with --use-mcore-models and save it again."
                )
            flat[name] = {_unwrapped(key): value for key, value in tensors.items() if "_extra_state" not in key}
    return flat


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dim() > 0


def _unwrapped(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _place_of(name: str) -> tuple[int | None, str]:
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


class LegacySource:
    """A model's tensors under their Hugging Face names, out of an mp_rank checkpoint."""

    def __init__(self, checkpoint: LegacyCheckpoint, shape: ModelShape) -> None:
        """Raises CheckpointError if the checkpoint does not hold this model."""
        self._checkpoint, self._model = checkpoint, shape
        self._last = threading.local()  # what each thread joined of a parameter, whose parts are asked for in turn
        self._found: dict[str, tuple[Place, int, list[_Piece]]] = {}
        pieces = checkpoint.pieces()
        for place in (*places(shape), *tied_head(shape)):
            key = next(((place.layer, name) for name in place.rule.names if (place.layer, name) in pieces), None)
            if key is None:
                continue  # `names` leaves it out
            mine = self._checked(place, pieces.pop(key))
            for index, name in enumerate(place.parts):
                self._found[name] = (place, index, mine)
        if pieces:
            (layer, name), extra = min(pieces.items(), key=lambda item: item[0][1])
            full = name if layer is None else f"decoder.layers.{layer}.{name}"
            raise CheckpointError(
                f"{extra[0].file}: tensor {full} ({len(pieces)} such) has no place in {shape.name} with "
                f"{shape.num_hidden_layers} layers. The weights belong to another model than its config.json."
            )

    def names(self) -> set[str]:
        return set(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        place, index, _ = self._found[name]
        return place.rule.parts[index].shape(self._model)

    def dtype(self, name: str) -> str:
        return dtype_name(self._checkpoint.peek(self._found[name][2][0]).dtype)

    def where(self, name: str) -> str:
        return str(self._found[name][2][0].file if name in self._found else self._checkpoint.folder)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        place, index, pieces = self._found[name]
        if getattr(self._last, "place", None) is not place:
            self._last.place = self._last.parts = None  # what goes makes room for what comes
            self._last.parts, self._last.place = self._join(place, pieces), place
        whole: Tensor = self._last.parts[index]
        return whole if dim is None else whole[(slice(None),) * dim + (slice(start, stop),)].contiguous()

    def _join(self, place: Place, pieces: list[_Piece]) -> list[Tensor]:
        parts = place.rule.join([self._checkpoint.read(piece) for piece in pieces], self._model)
        return (
            parts if place.rule.cut is not None else [part.clone() for part in parts]
        )  # the others are copies already

    def _checked(self, place: Place, pieces: list[_Piece]) -> list[_Piece]:
        """The pieces of one parameter, one per tensor-parallel rank, of the right shape."""
        rule, tensor = place.rule, self._checkpoint.tensor
        wanted = rule.local_shape(self._model, tensor)
        for piece in pieces:
            found = tuple(self._checkpoint.peek(piece).shape)
            enough = rule.vocabulary and found[1:] == wanted[1:] and found[0] * tensor >= self._model.vocab_size
            if found != wanted and not enough:
                raise CheckpointError(
                    f"{piece.file}: tensor {piece.name} has shape {found}, but {self._model.name} needs {wanted}."
                )
        if len(pieces) != tensor:
            raise CheckpointError(
                f"{pieces[0].file}: tensor {pieces[0].name} is held by {len(pieces)} of {tensor} tensor-parallel ranks."
            )
        return pieces
