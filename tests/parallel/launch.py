"""Start several ranks for one test: `run_ranks(function, size, *args)`.

The ranks are forked from a server that has imported torch, Megatron-core and transformers once for the whole test
session, so a start costs a fraction of a second instead of ten. They find each other as under torchrun: through a
store that the parent holds on a free port.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "safetensors.torch",
    "transformers.models.qwen2.modeling_qwen2",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
)


class RankFailed(AssertionError):
    """A rank raised or died; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`function(*args)` on `size` ranks at once, and what each returned, in rank order.

    `function` must be importable (module level) and starts the process group itself, e.g. with `runtime.start`: the
    environment is that of torchrun. Raises RankFailed with the first failing rank's traceback, or after `timeout_s`.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ranks: list[BaseProcess] = []
    ends: list[Connection] = []
    work = pickle.dumps((function, args))  # by value: each shared tensor would take a file descriptor, of 256
    try:
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            environment = _environment(rank, size, store.port)
            process = context.Process(target=_rank, args=(sender, environment, timeout_s, work))
            process.start()
            sender.close()
            ranks.append(process)
            ends.append(receiver)
        results = _collect(ends, time.monotonic() + timeout_s)
        for process in ranks:
            process.join(timeout=5.0)
        return results
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists: no rank has to open the port
        "OMP_NUM_THREADS": "1",
    }


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in time; their stacks are on stderr.")
        for end in ready:
            rank = waiting.pop(end)
            try:
                failed, value = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a traceback.") from None
            if failed:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank(sender: Connection, environment: dict[str, str], timeout_s: float, work: bytes) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0), file=sys.stderr)
    try:
        function, args = pickle.loads(work)
        message = pickle.dumps((False, function(*args)))
    except BaseException:
        message = pickle.dumps((True, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(message)
    sender.close()
    # Tearing gloo down takes seconds when a peer is gone; nothing here is worth waiting for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
