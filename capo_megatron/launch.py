"""Ranks on this machine: starting them as torchrun would, telling how they ended, and which of them speaks."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ENDED_BY = 128  # plus a signal's number: the exit code of what it ended
_STOP_S = "3600"  # that ranks have to finish their step and save, before the launcher kills them
_AFTERMATH_S = 10.0  # after which a rank that ends was ended by the launcher
_LAUNCH = "capo-megatron-"  # begins the run id of ranks that are started here
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_PATIENCE_S = 5.0  # how long ranks wait for a word of each other when something went wrong


def start_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run this command on `count` local ranks under torch's elastic launcher; its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the failing rank has said it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _STOP_S)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=f"{_LAUNCH}{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "capo_megatron", *arguments)
    except SignalException as stop:
        return ENDED_BY + stop.sigval
    except ChildFailedError as error:
        began = min(failure.timestamp for failure in error.failures.values())
        found = {rank: (failure.exitcode, failure.timestamp - began) for rank, failure in error.failures.items()}
        return _blame(found, arguments)
    return 0


def _blame(failures: Mapping[int, tuple[int, float]], arguments: Sequence[str]) -> int:
    """The exit code of a run, from the exit code of each rank that failed and the seconds since the first one did."""
    early = {rank: code for rank, (code, seconds) in failures.items() if seconds < _AFTERMATH_S}
    if 2 in early.values():  # one line has been said, whoever was first
        return 2
    killed = [rank for rank, code in early.items() if code < 0 and code != -signal.SIGTERM]
    if not killed:
        code = next(iter(early.values()))
        return code if code > 0 else ENDED_BY - code
    name = signal.Signals(-early[killed[0]]).name
    again = "The same command again starts from the beginning."
    if "train" in arguments[:1]:
        again = "The same command again continues training from the newest checkpoint."
    print(
        f"capo-megatron: rank {killed[0]} was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}; what "
        f"other ranks say is a consequence. {again}",
        file=sys.stderr,
        flush=True,
    )
    return ENDED_BY - early[killed[0]]


def started_here() -> bool:
    """Whether this process is a rank that `start_ranks` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_LAUNCH)


def end_with_the_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher dies, however it dies: a rank then finishes its step and saves.

    Linux only; elsewhere ranks of a launcher that was killed go on to the end, as under plain torchrun.
    """
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != launcher:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


def first_to_say(message: str) -> bool:
    """Whether no other rank has printed this message: all of them usually find the same mistake."""
    store = _rank_store()
    if store is None:  # better too often than not at all
        return True
    store.add(_said(), 1)
    return store.add(_said(message), 1) == 1


def explained_by_another_rank() -> bool:
    """Whether another rank says within a few seconds what ended the run."""
    store = _rank_store()
    if store is None:
        return False
    try:
        store.wait([_said()], timedelta(seconds=_PATIENCE_S))
    except RuntimeError:  # nobody has said anything
        return False
    return True


def _said(message: str = "") -> str:
    """The key under which ranks note that they printed a message, or any."""
    digest = hashlib.sha256(message.encode()).hexdigest() if message else "any"
    return f"capo_megatron/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}"


def _rank_store() -> TCPStore | None:
    """The launcher's store, through which ranks talk even where no process group exists; None if there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from torch.distributed import TCPStore

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
    except (RuntimeError, KeyError, ValueError):  # it is gone or was never there
        return None
