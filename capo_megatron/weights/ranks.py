"""Ranks that share a conversion: those that torchrun has started, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from capo_megatron.seams import Solo, Team


@dataclass(frozen=True)
class _Ranks:
    """A team over the default process group."""

    rank: int
    size: int

    def gather(self, item: Any) -> list[Any]:
        import torch.distributed as dist

        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def barrier(self) -> None:
        self.gather(None)


@contextmanager
def start() -> Iterator[Team]:
    """The ranks that torchrun's environment tells of, for as long as the block runs. They talk over gloo."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Solo()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield _Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
