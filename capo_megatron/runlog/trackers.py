"""Optional metric trackers. Their packages are imported only if they are asked for, before training starts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from capo_megatron.config import LogConfig
from capo_megatron.config.dialect import parse
from capo_megatron.errors import ConfigError
from capo_megatron.runlog.files import writing


class Tracker(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def make_trackers(config: LogConfig, output: Path, resolved: str) -> list[Tracker]:
    """The trackers that the config asks for; `resolved` is the whole config as YAML.

    Raises ConfigError if a package is missing or refuses to start.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(output / "tensorboard"))
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config.wandb, config.wandb_run or output.resolve().name, output, resolved))
    return trackers


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class TensorBoard:
    """Event files under `output`/tensorboard. The first step written hides later steps of an earlier start."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"log.tensorboard=true: needs the package tensorboard, which cannot be imported ({error}). "
                "pip install tensorboard, or set log.tensorboard=false."
            ) from error
        self._make, self._folder = SummaryWriter, folder
        self._writer: SummaryWriter | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with writing(self._folder):
            if self._writer is None:
                self._writer = self._make(log_dir=str(self._folder), purge_step=step)
            for name, value in _finite(metrics).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A W&B run whose id follows from the output folder, so that a restart continues the same run."""

    def __init__(self, project: str, name: str, output: Path, resolved: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb={project}: needs the package wandb, which cannot be imported ({error}). "
                "pip install wandb, or set log.wandb=null."
            ) from error
        identity = hashlib.blake2b(str(output.resolve()).encode(), digest_size=8).hexdigest()
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=identity,
                resume="allow",
                dir=str(output),
                config=parse(resolved, "resolved.yaml"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"log.wandb={project}: {' '.join(str(error).split())}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **_finite(metrics)})

    def close(self) -> None:
        self._run.finish()
