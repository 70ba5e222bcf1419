"""Checkpoints: Megatron dist-checkpoints that are whole or absent, and resume on any layout.

    <output>/checkpoints/
      step_000040/          what megatron.core.dist_checkpointing writes (model, optimizer)
        state.json          step, model shape, layout, versions, and what trainer, prompts and algorithm remember
        rng.safetensors     generator states of every rank
        tensors.safetensors what the trainer remembers in tensors, if it does: a rollout that was sampled ahead
      latest                the name of the newest complete checkpoint

A checkpoint is written under a temporary name and renamed when it is complete and on disk; `latest` is replaced after
that. So whenever the run is killed, `latest` names a complete checkpoint, and a half-written one is never used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import platform
import queue
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from capo_megatron.agreement import on_first_rank
from capo_megatron.errors import CheckpointError
from capo_megatron.mcore import versions
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.seams import Policy, Team
from capo_megatron.weights.shape import ModelShape

_UNFINISHED = ".unfinished"
_TENSORS = "tensors"
# What Megatron's and torch's checkpointing raise for unusable files (the last is a BaseException).
_FAILURES = (OSError, RuntimeError, EOFError, KeyError, pickle.PickleError, CheckpointingException, CheckpointException)


class DistCheckpointStore:
    """Saves and restores a `MegatronPolicy` and the trainer's memory under `<output>/checkpoints`."""

    def __init__(self, output: Path, team: Team, keep: int = 2) -> None:
        self._root = output / "checkpoints"
        self._team = team
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        found = ((_step_of(path.name), path) for path in self._root.glob("step_*"))
        return sorted(step for step, path in found if step is not None and (path / "state.json").is_file())

    def latest(self) -> int | None:
        """The step that `load` would restore, or None."""
        try:
            name = (self._root / "latest").read_text().strip()
        except FileNotFoundError:  # a kill between the first checkpoint and this file, or somebody removed it
            return max(self.steps(), default=None)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self._root / 'latest'}: cannot be read ({error}). Delete or mend it.") from error
        step = _step_of(name)
        if step not in self.steps():
            raise CheckpointError(
                f"{self._root / 'latest'}: names {name!r}, which is not a complete checkpoint. Complete ones: "
                f"{self.steps() or 'none'}. Write one of their folder names into the file, or delete it: the newest."
            )
        return step

    def check(self, shape: ModelShape) -> tuple[int, dict[str, Any]] | None:
        """What `load` would return of the latest checkpoint. Raises CheckpointError if it is of another model."""
        step = self.latest()
        if step is None:
            return None
        header = read_header(self._folder(step))
        _check_same_model(self._folder(step), header, shape.identity())
        return header["step"], header["state"]

    # --- save ----------------------------------------------------------------------------------------------------

    def save(
        self, step: int, policy: Policy, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Path:
        """Write a checkpoint of `step` and return its folder. Collective.

        `state` holds JSON values only; `tensors` are the same on every rank. Raises CheckpointError on every rank if it
        cannot be written (e.g. a full disk); older checkpoints and `latest` are then untouched.
        """
        policy = _ours(policy)
        final = self._folder(step)
        unfinished = final.with_name(final.name + _UNFINISHED)
        sharded = policy.sharded_state_dict(loading=False)
        files = {"rng": _random_states(self._team)} | ({_TENSORS: dict(tensors)} if tensors else {})
        self._together(lambda: self._prepare(unfinished, policy))
        writer = _InProcess("torch_dist", 1, thread_count=1)
        _, reason = self._tried(lambda: dist_checkpointing.save(sharded, str(unfinished), writer))
        if reason is not None:
            self._together(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise CheckpointError(f"{final}: not written: {reason}. Free disk space or choose another output.")
        self._together(lambda: self._finish(unfinished, final, policy.describe(), step, state, files))
        return final

    def _prepare(self, unfinished: Path, policy: MegatronPolicy) -> None:
        for left in self._root.glob("*" + _UNFINISHED):  # by a run that was killed; readers must not touch them
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        unfinished.mkdir(parents=True)
        need, free = policy.checkpoint_bytes(), shutil.disk_usage(unfinished).free
        if free < need:
            shutil.rmtree(unfinished)
            raise CheckpointError(
                f"{unfinished.parent}: {free / 2**20:,.1f} MiB free, a checkpoint needs {need / 2**20:,.1f} MiB. "
                "Nothing was written. Free disk space or choose another output."
            )

    def _finish(
        self,
        unfinished: Path,
        final: Path,
        model: dict[str, Any],
        step: int,
        state: Mapping[str, Any],
        files: Mapping[str, dict[str, torch.Tensor]],
    ) -> None:
        header = {"step": step, **model, "versions": _versions(), "state": state}
        try:
            for name, tensors in files.items():
                save_file(tensors, unfinished / f"{name}.safetensors")
            (unfinished / "state.json").write_text(json.dumps(header, indent=1))
            _flush_to_disk(unfinished)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = f"{final}: not written: {_last_line(error)}"
            raise CheckpointError(f"{reason}. Free disk space or choose another output.") from error
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        pointer = self._root / ("latest" + _UNFINISHED)
        pointer.write_text(final.name)
        pointer.rename(self._root / "latest")
        _flush_to_disk(self._root, recurse=False)
        # Later ones than this are of a run that was taken back; they do not count.
        for old in [saved for saved in self.steps() if saved <= step][: -self._keep]:
            shutil.rmtree(self._folder(old))

    # --- load ----------------------------------------------------------------------------------------------------

    def load(self, policy: Policy, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Restore `step` (default: the latest) into `policy`; its (step, state), None without one. Collective."""
        policy = _ours(policy)
        step = self.latest() if step is None else step
        if step is None:
            return None
        folder = self._folder(step)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such checkpoint. There are: {self.steps() or 'none'}.")
        header = read_header(folder)
        _check_same_model(folder, header, policy.describe()["model"])
        sharded = policy.sharded_state_dict(loading=True)
        loaded, reason = self._tried(lambda: dist_checkpointing.load(sharded, str(folder)))
        if reason is not None:
            raise CheckpointError(f"{folder}: cannot be read: {reason}. {_go_back(folder)}")
        policy.load_sharded_state_dict(loaded)
        if header["layout"] == policy.describe()["layout"]:
            _restore_random_states(folder, self._team)
        return header["step"], header["state"]

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The `tensors` that the checkpoint of `step` was saved with; empty without."""
        path = self._folder(step) / f"{_TENSORS}.safetensors"
        try:
            return load_file(path) if path.exists() else {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}). {_go_back(path.parent)}") from None

    # --- files ---------------------------------------------------------------------------------------------------

    def _folder(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def _tried(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """What `work` returned, and why Megatron could not use the files, the same on every rank. Collective."""
        outcome, reason = None, None
        try:
            with _quiet():
                outcome = work()
        except CheckpointException as error:  # some of the ranks are not told why
            reason = "; ".join(dict.fromkeys(_last_line(cause) for cause, _ in error.failures.values()))
        except _FAILURES as error:
            reason = _last_line(error)
        reasons = [text for text in self._team.gather(reason) if text is not None]
        return outcome, (max(reasons, key=len) or "another rank failed") if reasons else None

    def _together(self, action: Any) -> None:
        """Rank 0 acts on files, everybody waits, and everybody learns of a failure."""

        def act() -> None:
            try:
                action()
            except OSError as error:
                reason = f"{error.filename or self._root}: {error.strerror}. Choose another output or mend it."
                raise CheckpointError(reason) from error

        on_first_rank(self._team, act)


class _InProcess(TorchDistSaveShardedStrategy):
    """Megatron's way to save, in this process.

    Megatron's own would hand the results of writing over through a manager process, which takes seconds to start and
    270 MiB, and lives on for ever when the rank is killed.
    """

    def async_save(self, *arguments: Any, **options: Any) -> Any:
        filesystem_async._results_queue = queue.SimpleQueue()
        return versions.write_here(super().async_save(*arguments, **options))


def _ours(policy: Policy) -> MegatronPolicy:
    if not isinstance(policy, MegatronPolicy):
        raise TypeError(f"DistCheckpointStore saves a MegatronPolicy, got {type(policy).__name__}")
    return policy


def _step_of(name: str) -> int | None:
    """The step whose checkpoint a folder of this name is; None for any other folder, e.g. a copy."""
    found = re.fullmatch(r"step_(\d{6,})", name)
    return int(found[1]) if found else None


def read_header(folder: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint."""
    try:
        header = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no state.json: not a complete checkpoint of this program.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / 'state.json'}: damaged ({error}). {_go_back(folder)}") from None
    kinds = {"step": int, "model": dict, "layout": dict, "state": dict}
    if not isinstance(header, dict) or not all(isinstance(header.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError(f"{folder / 'state.json'}: not the description of a checkpoint. {_go_back(folder)}")
    return header


def _go_back(folder: Path) -> str:
    return f"To resume from an older one, write its name into {folder.with_name('latest')}."


def _check_same_model(folder: Path, header: dict[str, Any], model: dict[str, Any]) -> None:
    for name, value in model.items():
        saved = header["model"].get(name)
        if saved != value:
            raise CheckpointError(
                f"{folder}: saved for a model with {name} {saved}, this one has {value}. Nothing was loaded. "
                "Choose another output, or the model that the checkpoint was saved for."
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron logs what it raises as well, and makes torch warn of what Megatron still uses."""
    log = logging.getLogger("megatron.core.dist_checkpointing")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)
            yield
    finally:
        log.setLevel(before)


def _last_line(error: BaseException) -> str:
    """The cause, from messages that quote whole tracebacks of other ranks."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".") if lines else type(error).__name__


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "megatron-core": megatron.core.__version__}


def _flush_to_disk(folder: Path, recurse: bool = True) -> None:
    for path in [*(folder.rglob("*") if recurse else []), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _random_states(team: Team) -> dict[str, torch.Tensor]:
    """Generator states of every rank, as tensors, so that nothing has to be unpickled."""
    generator = np.random.get_state(legacy=True)
    assert isinstance(generator, tuple)
    _, keys, position, has_gauss, cached = generator
    _, internal, _ = random.getstate()
    mine = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.concatenate([keys.astype(np.int64), [position, has_gauss]])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "python": torch.tensor(internal, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    return {f"{rank}.{name}": value for rank, states in enumerate(team.gather(mine)) for name, value in states.items()}


def _restore_random_states(folder: Path, team: Team) -> None:
    try:
        states = load_file(folder / "rng.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / 'rng.safetensors'}: cannot be read ({error}). {_go_back(folder)}") from None
    mine = {name.split(".", 1)[1]: value for name, value in states.items() if name.split(".", 1)[0] == str(team.rank)}
    lacking = {"torch", "numpy", "numpy_gauss", "python"} - mine.keys()
    if lacking:
        raise CheckpointError(f"{folder / 'rng.safetensors'}: {sorted(lacking)} missing. {_go_back(folder)}")
    torch.set_rng_state(mine["torch"])
    numpy_state = mine["numpy"].numpy()
    keys, (position, has_gauss) = numpy_state[:-2].astype(np.uint32), numpy_state[-2:]
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), float(mine["numpy_gauss"][0])))
    random.setstate((3, tuple(mine["python"].tolist()), None))
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
