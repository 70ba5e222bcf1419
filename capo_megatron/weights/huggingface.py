"""Hugging Face model directories: tensors read piece by piece, and whole models written piece by piece."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights.raw import SharedFile, read_rows
from capo_megatron.weights.shape import ModelShape, hf_config, read_config
from capo_megatron.weights.sources import DTYPES, dtype_name
from capo_megatron.weights.table import hf_shapes

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "generation_config.json",
    "LICENSE",
    "NOTICE",
)
_TEMPLATES = "additional_chat_templates"  # a folder that tokenizers with several templates have
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


# --- reading ----------------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    offset: int  # of its first byte
    dtype: str
    shape: tuple[int, ...]


@dataclass
class DirectorySource:
    """The safetensors files of a directory: one `model.safetensors`, or several with an index.

    Only what is asked for is read, and it does not stay in memory. Raises CheckpointError if files are missing,
    damaged, or disagree.
    """

    directory: Path
    _tensors: dict[str, _Stored] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.directory = Path(self.directory)
        if (self.directory / INDEX).exists():
            files = self._read_index()
            found = {file: _tensors_of(self.directory / file) for file in sorted(set(files.values()))}
            for name, file in files.items():
                if name not in found[file]:
                    raise CheckpointError(f"{self.directory / file}: tensor {name} is missing, {INDEX} names it.")
                self._tensors[name] = found[file][name]
        elif (self.directory / SINGLE).exists():
            self._tensors = _tensors_of(self.directory / SINGLE)
        elif not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such folder. Point to a Hugging Face directory.")
        else:
            raise CheckpointError(
                f"{self.directory}: no {SINGLE} and no {INDEX}. "
                "Point to a Hugging Face directory with safetensors weights."
            )

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def where(self, name: str) -> str:
        return str(self._tensors[name].file if name in self._tensors else self.directory)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        stored = self._tensors[name]
        dtype = DTYPES[stored.dtype]
        if dim == 0 and stored.shape:
            return read_rows(stored.file, stored.offset, dtype, stored.shape, start, stop)
        whole = read_rows(stored.file, stored.offset, dtype, stored.shape)
        return whole if dim is None else whole[(slice(None),) * dim + (slice(start, stop),)].clone()

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
            files = {str(name): str(file) for name, file in found}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors index ({error!r}). Download it again.") from error
        for file in sorted(set(files.values())):
            if not (self.directory / file).exists():
                raise CheckpointError(
                    f"{self.directory / file}: no such file, but {INDEX} names it. Download it again."
                )
        return files


def _tensors_of(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file, whose header the library has checked against the file's length."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path}: damaged or truncated ({error}), {size} bytes. Download it again.") from error
    header.pop("__metadata__", None)
    return {
        name: _Stored(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


# --- writing ----------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """What a tensor will be."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


def plan_shards(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, list[str]]:
    """Which file holds which tensors, in order: no more than `shard_bytes` each, unless one tensor alone is larger."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


class ShardFile:
    """A safetensors file in the making. Several threads may write, each another tensor."""

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in specs.items():
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (end, end + spec.nbytes)}
            end += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # readers map the file: tensors begin aligned
        self._file = SharedFile(path, "w")
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        first = 8 + len(raw)
        self._next = {name: first + header[name]["data_offsets"][0] for name in specs}
        self._ends = {name: first + header[name]["data_offsets"][1] for name in specs}

    def write(self, name: str, values: Tensor) -> None:
        """Write the next values of a tensor."""
        self._next[name] = self._file.put(values, self._next[name])

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        assert kind is not None or self._next == self._ends, "some of the values were not written"


def write_index(folder: Path, shards: Mapping[str, Sequence[str]], specs: Mapping[str, Spec]) -> None:
    """Write the index of several files; one needs none."""
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def check_companions(origin: Path) -> None:
    """Raise CheckpointError if a file that would be carried along cannot be read."""
    for name in TOKENIZER_FILES:
        path = origin / name
        if path.is_symlink() or path.exists():
            try:
                if not path.is_file():
                    raise CheckpointError(f"{path}: not a file. Mend or remove it.")
                path.open("rb").close()
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Mend or remove it.") from error


def write_companions(folder: Path, config: Mapping[str, Any], origin: Path | None) -> None:
    """Write config.json and what else `origin` has beside its weights: tokenizer, generation config."""
    if origin is not None:
        for name in TOKENIZER_FILES:
            if (origin / name).exists():
                shutil.copyfile(origin / name, folder / name)
        if (origin / _TEMPLATES).is_dir():
            shutil.copytree(origin / _TEMPLATES, folder / _TEMPLATES)
    write_json(folder / "config.json", config)


def save_hf(
    directory: str | Path,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_dir: str | Path | None = None,
) -> Path:
    """Write a Hugging Face directory: config.json, safetensors and, if given, the files of a tokenizer.

    `tensors` are those of `hf_shapes(shape)`, in its order. Written beside `directory` and renamed: it appears whole or
    not at all, replacing an older one. All of `tensors` are taken even if writing fails, so that a collective stream
    never strands the other ranks. Raises CheckpointError if the files cannot be written.
    """
    directory = Path(directory)
    aside = directory.with_name(f".{directory.name}.partial")
    stream = iter(tensors)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        dtype = _write_tensors(aside, shape, stream)
        origin = Path(tokenizer_dir) if tokenizer_dir else None
        write_companions(aside, hf_config(shape, dtype) | _special_ids(origin), origin)
        _replace(aside, directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot write the model ({error}). Free space or choose another folder."
        ) from error
    finally:
        for _ in stream:
            pass
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _write_tensors(folder: Path, shape: ModelShape, tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Write the shards and, if there are several, their index. Returns the tensors' dtype by its torch name."""
    first = next(tensors)
    dtype = first[1].dtype
    specs = {name: Spec(dtype_name(dtype), size) for name, size in hf_shapes(shape).items()}
    shards = plan_shards(specs, SHARD_BYTES)
    following = itertools.chain([first], tensors)
    for file, names in shards.items():
        with ShardFile(folder / file, {name: specs[name] for name in names}) as shard:
            for name in names:
                found, tensor = next(following)
                assert (found, tuple(tensor.shape)) == (name, specs[name].shape), f"expected {name}, got {found}"
                shard.write(name, tensor.detach().cpu())
    write_index(folder, shards, specs)
    return str(dtype).removeprefix("torch.")


def _special_ids(origin: Path | None) -> dict[str, Any]:
    if origin is None or not (origin / "config.json").exists():
        return {}
    found = read_config(origin / "config.json")
    return {key: found[key] for key in _SPECIAL_IDS if key in found}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(new: Path, directory: Path) -> None:
    """Put `new` in the place of `directory`."""
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
