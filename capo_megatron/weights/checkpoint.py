"""Any checkpoint behind one face: what model it holds, where its tensors are, what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from capo_megatron.errors import CheckpointError, ConfigError
from capo_megatron.weights.distributed import BACKENDS, DistCheckpoint, MegatronSource
from capo_megatron.weights.huggingface import INDEX, SINGLE, DirectorySource, check_companions
from capo_megatron.weights.legacy import LegacyCheckpoint, LegacySource, is_legacy
from capo_megatron.weights.manifest import Checked, Manifest
from capo_megatron.weights.shape import ModelShape, hf_config, read_config, read_shape
from capo_megatron.weights.sources import DTYPES, WeightSource, check_source

Kind = Literal["huggingface", "megatron", "legacy"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of any format, opened: its tables have been read and found whole, its values not yet."""

    folder: Path
    kind: Kind
    shape: ModelShape
    source: WeightSource
    config: Mapping[str, Any]  # what its config.json says, or would say
    companions: Path | None  # folder with the tokenizer's files
    manifest: Manifest | None

    @property
    def dtype(self) -> str:
        """What most of its tensors are, as safetensors names it."""
        found = [self.source.dtype(name) for name in self.source.names()]
        return max(sorted(set(found)), key=found.count)

    @property
    def torch_dtype(self) -> str:
        """What config.json should call its dtype: what its own one does, or what most of its tensors are."""
        own = self.config.get("dtype") or self.config.get("torch_dtype") if self.companions == self.folder else None
        return own if isinstance(own, str) else torch_name(self.dtype)

    def checked(self) -> WeightSource:
        """Its tensors, compared with the manifest, if it has one, as they are read."""
        self.check_files()
        return self.source if self.manifest is None else Checked(self.source, self.manifest)

    def check_files(self) -> None:
        """Raise CheckpointError if one of the files that the manifest names has changed, or cannot be carried along."""
        if self.manifest is not None:
            self.manifest.check_files(self.folder, () if self.companions == self.folder else ("config.json",))
        if self.companions is not None:
            check_companions(self.companions)


def open_checkpoint(path: str | Path, config: str | Path | None = None, trust_pickle: bool = False) -> Checkpoint:
    """The checkpoint at `path`: a Hugging Face directory, a Megatron checkpoint, or the newest one of a run.

    `config` names a Hugging Face directory whose config.json and tokenizer belong to a Megatron checkpoint that has
    none. Raises CheckpointError if there is no checkpoint, or it is not whole, or of another model than its config.
    """
    with readable(Path(path)):
        folder = locate(Path(path))
        kind = kind_of(folder)
        if kind == "huggingface" and config is not None:
            raise CheckpointError(f"{folder}: has its own config.json. --config is for checkpoints without one.")
        shape, described, companions = _described(folder, kind, None if config is None else Path(config))
        source = _source(folder, kind, shape, trust_pickle)
        check_source(shape, source)
        manifest = Manifest.read(folder)
        if manifest is not None:
            manifest.check_tables(folder, shape, source)
        found = Checkpoint(folder, kind, shape, source, described, companions, manifest)
        return found if described else replace(found, config=hf_config(shape, torch_name(found.dtype)))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Files that cannot be read become a CheckpointError that names them."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"{error.filename or path}: cannot be read ({reason}). Mend it or copy it again."
        ) from error


def torch_name(dtype: str) -> str:
    """BF16 -> bfloat16."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def locate(path: Path) -> Path:
    """The folder of a checkpoint, from it, or from a run's folder or Megatron-LM's: then its newest one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Point to a Hugging Face directory or a Megatron checkpoint.")
    for folder, pointer in (
        (path, "latest"),
        (path / "checkpoints", "latest"),
        (path, "latest_checkpointed_iteration.txt"),
    ):
        if (folder / pointer).is_file():
            return _pointed(folder, folder / pointer)
    if (path / "weights" / BACKENDS).is_file():  # NeMo 2
        return path / "weights"
    return path


def _pointed(folder: Path, pointer: Path) -> Path:
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if pointer.name != "latest":
        name = name if name == "release" else f"iter_{name.zfill(7)}" if name.isdecimal() else name
    if not name or Path(name).name != name or not (folder / name).is_dir():
        raise CheckpointError(f"{pointer}: names {name!r}, and there is no such folder. Point to a checkpoint itself.")
    return folder / name


def kind_of(folder: Path) -> Kind:
    """The format of a checkpoint. Raises CheckpointError if there is none."""
    if (folder / BACKENDS).is_file():
        return "megatron"
    if is_legacy(folder):
        return "legacy"
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file() or (folder / "config.json").is_file():
        return "huggingface"
    raise CheckpointError(
        f"{folder}: no checkpoint in it: neither {SINGLE} or {INDEX}, nor {BACKENDS}, nor mp_rank_* folders."
    )


def _source(folder: Path, kind: Kind, shape: ModelShape, trust_pickle: bool) -> WeightSource:
    if kind == "huggingface":
        return DirectorySource(folder)
    if kind == "megatron":
        return MegatronSource(DistCheckpoint(folder), shape)
    return LegacySource(LegacyCheckpoint(folder, trust_pickle), shape)


# --- what model a checkpoint is of ------------------------------------------------------------------------------------


def _described(folder: Path, kind: Kind, config: Path | None) -> tuple[ModelShape, Mapping[str, Any], Path | None]:
    """The shape, config.json and companions of a checkpoint: as asked for, its own, or its run's."""
    if config is not None:
        return read_shape(config), read_config(config / "config.json"), config
    if kind == "huggingface" or (folder / "config.json").is_file():
        return read_shape(folder), read_config(folder / "config.json"), folder
    if (folder / "state.json").is_file():
        return _of_run(folder)
    raise CheckpointError(
        f"{folder}: it does not say what model it is of. Name a Hugging Face directory with the model's config.json "
        "and tokenizer: --config DIR."
    )


def _of_run(folder: Path) -> tuple[ModelShape, Mapping[str, Any], Path | None]:
    """Of a checkpoint that `train` wrote: its shape, and the tokenizer of the directory that the run began with."""
    path = folder / "state.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        known = {spec.name for spec in fields(ModelShape)}
        shape = ModelShape(**{key: value for key, value in model.items() if key in known}, name=folder.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise CheckpointError(f"{path}: not the description of a checkpoint ({error}). Copy it again.") from error
    origins = _origins(folder.parent.parent)
    companions = next((origin for origin in origins if origin.is_dir()), None)
    for origin in origins:
        with suppress(CheckpointError):
            if replace(read_shape(origin), max_position_embeddings=shape.max_position_embeddings).is_like(shape):
                found = read_config(origin / "config.json")
                return shape, {**found, "max_position_embeddings": shape.max_position_embeddings}, companions
    return shape, {}, companions


def _origins(run: Path) -> list[Path]:
    """Folders that may hold the tokenizer and config.json of a run's model."""
    try:
        found = yaml.safe_load((run / "resolved.yaml").read_text(encoding="utf-8"))
        model, warmup = found.get("model") or {}, found.get("warmup") or {}
    except (OSError, yaml.YAMLError, AttributeError, UnicodeDecodeError):
        return []
    named = (model.get("tokenizer"), model.get("path"), warmup.get("path"))
    paths = [Path(name) for name in named if isinstance(name, str)]
    return [path for given in paths for path in ((given,) if given.is_absolute() else (given, run.parent / given))]
