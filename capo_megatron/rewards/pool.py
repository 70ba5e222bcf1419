"""A pool of grading processes that are killed when one item takes too long or too much memory.

Each process is a fresh interpreter (never a fork: the parent runs communication threads) and has one item at a time, so
that a kill costs exactly one item and an item's time starts when a process starts on it. Without signal handlers: works
off the main thread, too.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from capo_megatron.errors import RewardError

_START_S = 120.0  # for a new process to import what it needs, on a busy machine


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float  # monotonic; when it will be killed
    ready: bool = False
    item: int | None = None  # index of what it works on


class WorkerPool:
    """Processes with the scorer of `kind` loaded, of which `workers` work at a time.

    They end with `close`, and by themselves soon after the parent dies. There is one more, so that the work goes on
    while the replacement of a killed process starts.

    Raises RewardError if a process cannot start or load the scorer.
    """

    def __init__(self, kind: str, workers: int, timeout_s: float, memory_mib: int) -> None:
        self._kind = kind
        self._busy_limit = workers
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers + 1):
                self._start()
            while not all(worker.ready for worker in self._workers):
                self._listen([])  # raises if one cannot start
        except BaseException:
            self.close()
            raise

    def run(self, items: Sequence[bytes]) -> list[tuple[str, Any] | None]:
        """The outcome of each marshalled item: ("graded", reply), ("raised", traceback), or None.

        None: the process had to be killed, or died of the item (out of memory, or a fault in a C library). Each costs
        about `timeout_s` and the start of a process, shared among the workers. Raises RewardError if the scorer's
        contract is broken.
        """
        outcomes: list[tuple[str, Any] | None] = [None] * len(items)
        waiting = deque(range(len(items)))
        if items and not self._workers:
            raise RewardError(f"reward.kind={self._kind}: the grading processes have been closed.")
        try:
            while waiting or self._busy():
                self._dispatch(items, waiting)
                self._listen(outcomes)
        except BaseException:
            self.close()  # a later run must not hear replies to this one
            raise
        return outcomes

    def close(self) -> None:
        """Kill all processes. Harmless if repeated."""
        while self._workers:
            self._end(self._workers.pop())

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "capo_megatron.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # so that whatever it starts can be killed with it
            env=_environment(),
        )
        theirs.close()
        ours.send_bytes(marshal.dumps((self._kind, self._timeout_s, self._memory_mib)))
        self._workers.append(_Worker(process, ours, time.monotonic() + _START_S))

    def _busy(self) -> int:
        return sum(worker.item is not None for worker in self._workers)

    def _dispatch(self, items: Sequence[bytes], waiting: deque[int]) -> None:
        for worker in [worker for worker in self._workers if worker.ready and worker.item is None]:
            if not waiting or self._busy() >= self._busy_limit:
                return
            try:
                worker.connection.send_bytes(items[waiting[0]])
            except OSError:  # it died while idle, which is not the item's fault
                self._replace(worker)
                continue
            worker.item = waiting.popleft()
            worker.deadline = time.monotonic() + self._timeout_s

    def _listen(self, outcomes: list[tuple[str, Any] | None]) -> None:
        """Wait for the next reply or deadline and act on it."""
        deadline = min(worker.deadline for worker in self._workers)
        patience = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        heard = wait([worker.connection for worker in self._workers], patience)
        for worker in list(self._workers):
            if worker.connection in heard:
                self._hear(worker, outcomes)
            elif time.monotonic() >= worker.deadline:
                if not worker.ready:
                    raise RewardError(
                        f"reward.kind={self._kind}: a grading process was not ready after {_START_S:.0f} s."
                    )
                self._replace(worker)

    def _hear(self, worker: _Worker, outcomes: list[tuple[str, Any] | None]) -> None:
        try:
            status, value = marshal.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._bury(worker)
            return
        if status == "broken" or (status == "raised" and not worker.ready):
            raise RewardError(value if status == "broken" else f"reward.kind={self._kind}: {value.splitlines()[-1]}")
        if worker.item is not None:
            outcomes[worker.item] = (status, value)
        worker.ready, worker.item, worker.deadline = True, None, math.inf

    def _bury(self, worker: _Worker) -> None:
        if not worker.ready:
            raise RewardError(
                f"reward.kind={self._kind}: a grading process ended with code {worker.process.wait()} as it started. "
                f"If it needs more than reward.memory_mib={self._memory_mib}, raise that; else see its output above."
            )
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._end(worker)
        self._start()

    def _end(self, worker: _Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        worker.connection.close()


def _environment() -> dict[str, str]:
    """The parent's environment and import path, with one thread: thread pools would eat the address space."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    return {**os.environ, **threads, "PYTHONPATH": path}
