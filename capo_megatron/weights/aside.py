"""A folder that appears under its name whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from capo_megatron.agreement import on_first_rank
from capo_megatron.errors import CheckpointError
from capo_megatron.seams import Team

_Outcome = TypeVar("_Outcome")


@contextmanager
def aside(destination: Path, nbytes: int, team: Team, say: Callable[[str], None]) -> Iterator[Path]:
    """A folder beside `destination` that takes its name in the end, or is removed. Collective."""
    destination = Path(os.path.normpath(destination.absolute()))
    folder = destination.parent / f".{destination.name}.partial"
    lock: list[int] = []
    on_first_rank(team, lambda: lock.append(on_disk(destination, lambda: _begin(destination, folder, nbytes, say))))
    try:
        yield folder
        on_first_rank(team, lambda: on_disk(destination, lambda: _take_name(folder, destination)))
    finally:
        if team.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock[0])


def _begin(destination: Path, folder: Path, nbytes: int, say: Callable[[str], None]) -> int:
    """Make the folder and lock it; the lock ends with the process, however that ends."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists. Nothing was changed. Remove it or choose another folder.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        os.close(_lock(folder))
        shutil.rmtree(folder)
        say(f"{folder}: removed, it was left by a conversion that was interrupted; starting from the beginning")
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes:
        raise CheckpointError(
            f"{destination.parent}: {free / 1e9:,.2f} GB free, {nbytes / 1e9:,.2f} GB are needed. Nothing was written. "
            "Free disk space or choose another folder."
        )
    folder.mkdir()
    return _lock(folder)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another conversion is writing it. Wait for it, or stop it.") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _take_name(folder: Path, destination: Path) -> None:
    if destination.exists():
        raise CheckpointError(f"{destination}: was made by somebody else meanwhile. Nothing was changed.")
    folder.rename(destination)


def on_disk(destination: Path, action: Callable[[], _Outcome]) -> _Outcome:
    """What `action` returns; if the disk is full or a folder closed to us, an error that says so."""
    try:
        return action()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        advice = "Free disk space or choose another folder" if full else "Mend it or choose another folder"
        raise CheckpointError(f"{destination}: not written: {what}. {advice}.") from error
