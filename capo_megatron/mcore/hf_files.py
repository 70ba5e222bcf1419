"""Hugging Face model directories: reading tensors lazily, writing a whole model atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.mcore.model import ModelShape

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, read on demand."""

    def names(self) -> set[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def dtype(self, name: str) -> str:
        """The dtype of one tensor as safetensors names it, e.g. BF16, without reading it."""

    def where(self, name: str) -> str:
        """Where this tensor is, or would be, for messages."""

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        """One tensor, or its part [start, stop) along `dim`, on the CPU."""


@dataclass(frozen=True)
class DictSource:
    """Tensors in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return _dtype_name(self.tensors[name].dtype)

    def where(self, name: str) -> str:
        return "weights in memory"

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if dim is None else tensor[_span(dim, start, stop)]


def _dtype_name(dtype: torch.dtype) -> str:
    """A floating-point dtype as safetensors names it; others by their own name."""
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return names.get(dtype, str(dtype))


def _span(dim: int, start: int, stop: int | None) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(start, stop),)


@dataclass
class DirectorySource:
    """The safetensors files of a directory: one `model.safetensors`, or several with an index.

    Files are mapped into memory on first use. Raises CheckpointError if files are missing, damaged, or disagree.
    """

    directory: Path
    _files: dict[str, str] = field(init=False, default_factory=dict)  # tensor -> file
    _open: dict[str, Any] = field(init=False, default_factory=dict)  # file -> handle

    def __post_init__(self) -> None:
        self.directory = Path(self.directory)
        if (self.directory / INDEX).exists():
            self._files = self._read_index()
            for file in sorted(set(self._files.values())):
                missing = {name for name, where in self._files.items() if where == file} - set(
                    self._handle(file).keys()
                )
                if missing:
                    raise CheckpointError(
                        f"{self.directory / file}: tensor {min(missing)} is missing, {INDEX} names it."
                    )
        elif (self.directory / SINGLE).exists():
            self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        elif not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such folder. Point to a Hugging Face directory.")
        else:
            raise CheckpointError(
                f"{self.directory}: no {SINGLE} and no {INDEX}. "
                "Point to a Hugging Face directory with safetensors weights."
            )

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(self._files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._handle(self._files[name]).get_slice(name).get_dtype())

    def where(self, name: str) -> str:
        return str(self.directory / self._files[name]) if name in self._files else str(self.directory)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        handle = self._handle(self._files[name])
        return handle.get_tensor(name) if dim is None else handle.get_slice(name)[_span(dim, start, stop)]

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

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: damaged or truncated ({error}), {path.stat().st_size} bytes. Download it again."
                ) from error
        return self._open[file]


def save_hf(
    directory: str | Path,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_dir: str | Path | None = None,
) -> Path:
    """Write a Hugging Face directory: config.json, safetensors and, if given, the files of a tokenizer.

    Written beside `directory` and renamed: it appears whole or not at all, replacing an older one. All of `tensors` are
    taken even if writing fails, so that a collective stream never strands the other ranks. Raises CheckpointError if
    the files cannot be written.
    """
    directory = Path(directory)
    aside = directory.with_name(f".{directory.name}.partial")
    stream = iter(tensors)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        dtype = _write_tensors(aside, stream)
        _write_config(aside, shape, dtype, Path(tokenizer_dir) if tokenizer_dir else None)
        _replace(aside, directory)
    except (OSError, SafetensorError) as error:
        for _ in stream:
            pass
        raise CheckpointError(
            f"{directory}: cannot write the model ({error}). Free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Write the shards and, if there are several, their index. Returns the tensors' dtype by its Hugging Face name."""
    shards: list[list[str]] = []
    total = 0
    dtype = ""
    for shard in _shards(tensors):
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for number, name in enumerate([SINGLE] if len(shards) == 1 else names):
        written = (folder / f"part-{number}").rename(folder / name)
        written.chmod(folder.stat().st_mode & 0o666)  # as any new file here: safetensors lets its owner alone read it
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def _write_config(folder: Path, shape: ModelShape, dtype: str, tokenizer_dir: Path | None) -> None:
    # Without a version, transformers warns of a broken tokenizer whenever it loads a large one from there.
    config = hf_config(shape, dtype) | {"transformers_version": transformers.__version__}
    if tokenizer_dir is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_dir / name).exists():
                shutil.copyfile(tokenizer_dir / name, folder / name)
        if (tokenizer_dir / "config.json").exists():
            found = _special_ids(tokenizer_dir / "config.json")
            config |= {key: found[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in found}
    _write_json(folder / "config.json", config)


def _special_ids(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise OSError(f"{path} holds a {type(found).__name__}, expected an object")
    return found


def hf_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The config.json of such a model. The rotary base is written both where old and where new readers look for it."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": shape.initializer_range,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _replace(new: Path, directory: Path) -> None:
    """Put `new` in the place of `directory`."""
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
