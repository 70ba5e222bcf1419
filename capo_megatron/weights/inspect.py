"""What is in a checkpoint, as lines for a person. Reads tables only, no values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.checkpoint import kind_of, locate, readable
from capo_megatron.weights.distributed import COMMON, DistCheckpoint, Stored, model_prefix
from capo_megatron.weights.huggingface import INDEX, DirectorySource
from capo_megatron.weights.legacy import LegacyCheckpoint
from capo_megatron.weights.manifest import MANIFEST, Manifest
from capo_megatron.weights.shape import read_config
from capo_megatron.weights.sources import DTYPES, dtype_name


class Row(NamedTuple):
    """A tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: str  # in how many parts it lies, and where


def inspect(path: str | Path, trust_pickle: bool = False) -> list[str]:
    """Lines that tell what is in a checkpoint: format, model, step, layout, tensors, bytes.

    Raises CheckpointError if there is none, or its tables are damaged.
    """
    with readable(Path(path)):
        return _inspect(locate(Path(path)), trust_pickle)


def _inspect(folder: Path, trust_pickle: bool) -> list[str]:
    kind = kind_of(folder)
    if kind == "huggingface":
        about, rows = _huggingface(folder)
    elif kind == "megatron":
        about, rows = _megatron(folder)
    else:
        about, rows = _legacy(folder, trust_pickle)
    manifest = Manifest.read(folder)
    if manifest is not None:
        about["hashes"] = f"{len(manifest.tensors):,} tensors in {MANIFEST}"
    total = sum(row.nbytes for row in rows)
    model = f"{len(rows):,} tensors, {sum(prod(row.shape) for row in rows):,} values, {_size(total)}"
    lines = [f"{name:<10} {value}" for name, value in {"path": str(folder), **about, "model": model}.items()]
    return [*lines, "", *_table(rows)]


def _huggingface(folder: Path) -> tuple[dict[str, str], list[Row]]:
    source = DirectorySource(folder)
    found = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    files = {source.where(name) for name in source.names()}
    about = {
        "format": f"Hugging Face, {len(files)} {'file' if len(files) == 1 else f'files with {INDEX}'}",
        "config": _config(found),
    }
    rows = []
    for name in sorted(source.names(), key=_by_number):
        shape, dtype = source.shape(name), source.dtype(name)
        known = DTYPES.get(dtype)
        width = known.itemsize if known is not None else 1
        rows.append(Row(name, dtype, shape, prod(shape) * width, Path(source.where(name)).name))
    return about, rows


def _megatron(folder: Path) -> tuple[dict[str, str], list[Row]]:
    checkpoint = DistCheckpoint(folder)
    prefix = model_prefix(checkpoint.tensors)
    ours = {name: stored for name, stored in checkpoint.tensors.items() if _is_model(name, prefix)}
    beside = [stored for name, stored in checkpoint.tensors.items() if name not in ours]
    files = {chunk.file for stored in checkpoint.tensors.values() for chunk in stored.chunks}
    about = {"format": f"Megatron dist-checkpoint, {len(files)} {'file' if len(files) == 1 else 'files'} and {COMMON}"}
    about |= _state(folder)
    if (folder / "config.json").is_file():
        about["config"] = _config(read_config(folder / "config.json"))
    if prefix:
        about["prefix"] = prefix
    if beside:
        about["beside"] = f"{len(beside):,} tensors of the optimizer and others, {_size(sum(s.nbytes for s in beside))}"
    rows = [
        Row(name, dtype_name(stored.dtype), stored.shape, stored.nbytes, _chunks(stored))
        for name, stored in sorted(ours.items())
    ]
    return about, rows


def _is_model(name: str, prefix: str | None) -> bool:
    return prefix is not None and name.startswith(tuple(prefix + root for root in ("embedding.", "decoder.", "output")))


def _chunks(stored: Stored) -> str:
    sizes = {chunk.sizes for chunk in stored.chunks}
    return f"{len(stored.chunks)} x {' or '.join(map(_shape, sorted(sizes)))}"


def _state(folder: Path) -> dict[str, str]:
    """What a training checkpoint says of itself."""
    path = folder / "state.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        layout = ", ".join(f"{name} {size}" for name, size in found["layout"].items())
        versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        return {"step": str(found["step"]), "layout": layout, "versions": versions, "config": _config(found["model"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the description of a checkpoint ({error}). Copy it again.") from error


def _legacy(folder: Path, trust_pickle: bool) -> tuple[dict[str, str], list[Row]]:
    checkpoint = LegacyCheckpoint(folder, trust_pickle)
    about = {
        "format": "Megatron-LM, mp_rank folders",
        "layout": f"tensor {checkpoint.tensor}, pipeline {checkpoint.pipeline}, virtual {checkpoint.virtual}",
    }
    if checkpoint.iteration is not None:
        about["step"] = str(checkpoint.iteration)
    rows = []
    for (layer, inside), pieces in checkpoint.pieces().items():
        tensors = [checkpoint.peek(piece) for piece in pieces]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        rows.append(
            Row(
                inside if layer is None else f"decoder.layers.{layer}.{inside}",
                dtype_name(tensors[0].dtype),
                tuple(tensors[0].shape),
                sum(tensor.nbytes for tensor in tensors),
                f"{len(pieces)} x {' or '.join(map(_shape, sorted(shapes)))}",
            )
        )
    return about, sorted(rows, key=lambda row: _by_number(row.name))


def _config(found: Mapping[str, Any]) -> str:
    keys = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "rope_theta", "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    rope = found.get("rope_parameters")
    known = {"rope_theta": rope.get("rope_theta")} if isinstance(rope, dict) else {}
    values = {**{key: found[key] for key in keys if key in found}, **known}
    return ", ".join(f"{key} {values[key]}" for key in keys if key in values) or "none"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _table(rows: Iterable[Row]) -> list[str]:
    cells = [(row.name, row.dtype, _shape(row.shape), _size(row.nbytes), row.pieces) for row in rows]
    cells.insert(0, ("tensor", "dtype", "shape", "bytes", "lies in"))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        "  ".join(cell.rjust(width) if column == 3 else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        .rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    ]  # fmt: skip


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes} B"
