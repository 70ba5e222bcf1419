"""A grading process: reads an item, grades it, replies; `python -m capo_megatron.rewards.worker FD PARENT_PID`.

Started by `pool`, which also kills it. It limits its own memory, and it does not outlive its parent: idle it sees the
connection end, busy it is ended by a kernel timer soon after the item's time is up.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from types import TracebackType

from capo_megatron.errors import RewardError
from capo_megatron.rewards import scorers

_GRACE_S = 5.0  # how long after an item's time the parent, if it is alive, has to kill this process itself
_LOOK_S = 5.0  # between two looks at whether the parent is alive


class _Foreign:
    """Keeps what foreign code raised, so that it can be reported: what it means is for the parent to say."""

    error: Exception | None = None

    def __enter__(self) -> _Foreign:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            return False
        self.error = error
        return True

    def report(self) -> tuple[str, str]:
        if isinstance(self.error, RewardError):
            return "broken", str(self.error)
        return "raised", "".join(traceback.format_exception(self.error, limit=-3)).strip()


def main(connection: Connection, parent: int) -> None:
    kind, timeout_s, memory_mib = marshal.loads(connection.recv_bytes())
    _isolate(memory_mib)
    with _Foreign() as loading:
        scorer = scorers.load(kind)
    _send(connection, loading.report() if loading.error else ("ready", ""))
    while not loading.error and (item := _next_item(connection, parent)) is not None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
        with _Foreign() as grading:
            reply = ("graded", scorer(item))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, grading.report() if grading.error else reply)


def _isolate(memory_mib: int) -> None:
    os.dup2(2, 1)  # what foreign code prints must not land in the parent's output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside long integer arithmetic
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _next_item(connection: Connection, parent: int) -> object | None:
    """The next item, or None when the parent is gone. Its end of the connection may live on in a process it forked."""
    while not select.select([connection], [], [], _LOOK_S)[0]:
        if os.getppid() != parent:
            return None
    return marshal.loads(connection.recv_bytes())


def _send(connection: Connection, reply: tuple[str, object]) -> None:
    connection.send_bytes(marshal.dumps(reply))  # type: ignore[arg-type]


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        sys.exit(0)  # the parent is gone
    except MemoryError:
        os._exit(1)  # without touching memory again; the parent sees the connection end
