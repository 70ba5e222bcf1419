"""Process groups, seeds, the device, and where this rank stands in the layout."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from capo_megatron.config import ParallelConfig
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import cpu, versions
from capo_megatron.seams import Solo, Team


@dataclass(frozen=True)
class Layout:
    """How the model is cut over the ranks, and the place of one of them.

    Ranks count tensor parallelism fastest, then data, then pipeline, as Megatron-core's default order does.
    """

    tensor: int
    pipeline: int
    virtual: int
    sequence: bool
    data: int
    rank: int

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int, rank: int = 0) -> Layout:
        """The layout of `world` ranks. Raises ConfigError if they cannot be laid out so."""
        for name in ("tensor", "pipeline", "virtual"):
            if getattr(parallel, name) < 1:
                raise ConfigError(f"parallel.{name}={getattr(parallel, name)}: must be at least 1.")
        tensor, pipeline = parallel.tensor, parallel.pipeline
        model_ranks = tensor * pipeline
        if world % model_ranks:
            raise ConfigError(
                f"parallel.tensor={tensor} x parallel.pipeline={pipeline} = {model_ranks} ranks do not divide the "
                f"{world} ranks of this run. Start a multiple of {model_ranks} ranks, or lower one of them."
            )
        if parallel.virtual > 1 and pipeline == 1:
            raise ConfigError(
                f"parallel.virtual={parallel.virtual}: virtual stages need parallel.pipeline > 1, got 1. "
                "Set parallel.virtual=1 or raise parallel.pipeline."
            )
        if parallel.sequence and tensor == 1:
            raise ConfigError(
                "parallel.sequence=true: sequence parallelism needs parallel.tensor > 1, got 1. "
                "Set parallel.sequence=false or raise parallel.tensor."
            )
        data = world // model_ranks
        return cls(tensor, pipeline, parallel.virtual, parallel.sequence, data, rank)

    @property
    def world(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor % self.data

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tensor * self.data)

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding (in its first chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the head (in its last chunk)."""
        return self.pp_rank == self.pipeline - 1

    def rank_at(self, tp_rank: int, dp_rank: int, pp_rank: int) -> int:
        """The global rank at these coordinates."""
        return tp_rank + self.tensor * (dp_rank + self.data * pp_rank)

    def layers(self, chunk: int, layer_count: int, pp_rank: int | None = None) -> range:
        """The layers (from 0) in the `chunk`-th model chunk of a pipeline rank (default: this one)."""
        per_chunk = layer_count // (self.pipeline * self.virtual)
        stage = chunk * self.pipeline + (self.pp_rank if pp_rank is None else pp_rank)
        return range(stage * per_chunk, (stage + 1) * per_chunk)

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return _parallel_state().get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return _parallel_state().get_pipeline_model_parallel_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        return _parallel_state().get_data_parallel_group()


@dataclass
class Runtime:
    """A started set of ranks. It is the run's `Team`; `stop` ends it."""

    layout: Layout
    device: torch.device
    owns_world: bool  # False: somebody else made the default process group and will end it

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def size(self) -> int:
        return self.layout.world

    def gather(self, item: Any) -> list[Any]:
        """`item` of every rank, in rank order, on every rank. Collective."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is True on one. Collective."""
        if self.size == 1:
            return flag
        raised = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return bool(raised.item())

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.size > 1:
            dist.barrier()

    def beside(self) -> Team:
        """The same ranks with collectives of their own, for one thread beside the main one. Collective.

        They go over the CPU on every machine: a GPU runs the kernels of two NCCL communicators in an order of its own,
        and two ranks that choose differently wait for each other for ever.
        """
        return Solo() if self.size == 1 else _Beside(self.rank, self.size, dist.new_group(backend="gloo"))

    def stop(self) -> None:
        """Forget the groups, and end the default one if `start` made it. Calling it again does nothing."""
        _parallel_state().destroy_model_parallel()
        if self.owns_world and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Beside:
    """`Runtime.beside`."""

    rank: int
    size: int
    group: Any  # a ProcessGroup

    def gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def barrier(self) -> None:
        self.gather(None)


def start(parallel: ParallelConfig, seed: int, *, device: str | None = None, timeout_s: float = 1800.0) -> Runtime:
    """Join the ranks of this run, build Megatron-core's groups and seed every generator.

    Under torchrun the ranks come from its environment variables; otherwise this process is the only rank. A default
    process group that exists already (e.g. of the "fake" backend) is used as it is. `device` is "cpu" or "cuda"
    (default: "cuda" if there is one).

    Raises ConfigError if the ranks do not fit the layout or megatron-core's version is unknown.
    """
    versions.check()
    place = _device(device)
    if place.type == "cpu":
        cpu.install()
    owns_world = not dist.is_initialized()
    rank, world = _environment() if owns_world else (dist.get_rank(), dist.get_world_size())
    layout = Layout.of(parallel, world, rank)
    if owns_world:
        _join(rank, world, place, timedelta(seconds=timeout_s))
    _build_groups(layout, timeout_s)
    _seed(seed, place)
    return Runtime(layout, place, owns_world)


def _parallel_state() -> Any:
    from megatron.core import parallel_state  # imported late: `Layout` answers questions without Megatron

    return parallel_state


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device=cuda: local rank {index} has no GPU, this machine has {torch.cuda.device_count()}. "
                "Start at most one rank per GPU."
            )
        # Megatron's tensor parallelism counts on kernels starting in the order in which they are launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def world_size() -> int:
    """Ranks of this run, known from torchrun's environment before anything has started."""
    return _environment()[1]


def _environment() -> tuple[int, int]:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _join(rank: int, world: int, device: torch.device, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "nccl"
    # A rank alone needs no port that somebody else could hold.
    store = dist.HashStore() if world == 1 else None
    if store is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            f"WORLD_SIZE={world}: MASTER_ADDR and MASTER_PORT are not set, so the ranks cannot find each other. "
            "Start them with torchrun or --nproc."
        )
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timeout, device_id=bound, **place)


def _build_groups(layout: Layout, timeout_s: float) -> None:
    state = _parallel_state()
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=dist.get_backend() != "fake",
    )
    found = (
        state.get_tensor_model_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
    )
    assert found == (layout.tp_rank, layout.dp_rank, layout.pp_rank), (found, layout)


def _seed(seed: int, device: torch.device) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    # Without CUDA the tracker that keeps one generator per tensor-parallel rank would save and restore the whole CPU
    # generator around each attention; the model has no dropout, so Megatron's own do-nothing tracker stands in for it.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device.type == "cpu", force_reset_rng=True)
