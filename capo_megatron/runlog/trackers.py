"""Optional metric trackers. Their packages are imported only if they are asked for, before training starts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from capo_megatron.config import LogConfig
from capo_megatron.config.dialect import parse
from capo_megatron.errors import ConfigError
from capo_megatron.runlog.files import writing


class Tracker(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require_packages(config: LogConfig) -> None:
    """Raise ConfigError if the package of a tracker that the config asks for cannot be imported."""
    asked = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for package, module in modules.items():
        try:
            if asked[package]:
                import_module(module)
        except ImportError as error:
            got, off = ("true", "false") if package == "tensorboard" else (config.wandb, "null")
            raise ConfigError(
                f"log.{package}={got}: needs the package {package}, which cannot be imported ({error}). "
                f"pip install {package}, or set log.{package}={off}."
            ) from error


def make_trackers(config: LogConfig, output: Path, resolved: str) -> list[Tracker]:
    """The trackers that the config asks for, whose packages are there; `resolved` is the whole config as YAML.

    Raises ConfigError if one refuses to start.
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
        from torch.utils.tensorboard import SummaryWriter

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
        import wandb

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
