"""The command `engine`: the ranks of a config's rollout engine, without its trainer. See `rollout.remote`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from capo_megatron.assemble import ranks
from capo_megatron.config import ParallelConfig, RunConfig, load
from capo_megatron.launch import started_here
from capo_megatron.mcore import versions
from capo_megatron.model import Model
from capo_megatron.rollout import vllm
from capo_megatron.rollout.channel import Desk, secret
from capo_megatron.rollout.server import EngineServer
from capo_megatron.warmup import Say


def load_alone(target: Path, overrides: Sequence[str], world: int) -> RunConfig:
    """A run's config, for the ranks of one of its engine servers alone: without the trainer's layout.

    `target` is the YAML file, or the run's folder. Raises ConfigError.
    """
    if started_here() or os.environ.get("RANK", "0") != "0":
        logging.getLogger("capo_megatron.config").setLevel(logging.ERROR)  # another process has shown the warnings
    given = load(target / "resolved.yaml" if target.is_dir() else target, overrides)
    rollout = replace(given.rollout, placement="colocated", separate=type(given.rollout.separate)(), async_steps=0)
    config = replace(given, rollout=rollout, parallel=ParallelConfig())
    config.check(world, training=False)
    return config


def run_engine(config: RunConfig, listen: str, say: Say) -> None:
    """Serve one run after another, on the ranks that were started, until this process is ended."""
    key = secret()
    if config.rollout.engine == "vllm":
        vllm.check_installed()
    if config.rollout.in_fp8:
        vllm.check_fp8_device(versions.capability())
    model = Model.accept(config)
    with ExitStack() as open_parts:
        desk = None
        if int(os.environ.get("RANK", "0")) == 0:  # from now on a trainer may call, and waits
            desk = Desk(listen, key)
            open_parts.callback(desk.close)
        team = open_parts.enter_context(ranks(config))
        engine = model.local_engine(team)
        if desk is not None:
            say(f"engine: {config.rollout.engine} on {team.size} ranks listens at port {desk.port}")
        server = EngineServer(
            engine, team.beside(), team.device, model.engine_identity(), config.probe_tolerance, config.rounding
        )
        server.serve(desk)
