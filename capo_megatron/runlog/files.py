"""Files that survive crashes: written aside and renamed, or appended line by line; a failing disk is a CapoError."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from capo_megatron.errors import CapoError, DataError

_REASONS = {
    errno.ENOSPC: "the disk is full. Free some space or choose another output; what is complete stays valid",
    errno.EDQUOT: "your disk quota is used up. Free some space or choose another output; what is complete stays valid",
    errno.EACCES: "permission denied. Choose an output that you may write to",
    errno.EPERM: "permission denied. Choose an output that you may write to",
    errno.EROFS: "the file system is read-only. Choose an output elsewhere",
    errno.EEXIST: "a file is in the way. Remove it or choose another output",
    errno.ENOTDIR: "a file is in the way. Remove it or choose another output",
    errno.EISDIR: "a folder is in the way. Remove it or choose another output",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CapoError that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}. Choose another output")
        raise CapoError(f"{path}: cannot be written: {reason}.") from error


def make_folder(path: Path) -> None:
    """Create a folder and prove that files can be made in it. Raises CapoError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")


def check_writable(folder: Path) -> None:
    """Raise CapoError unless files can be written in `folder`, or it could be made. Leaves nothing behind."""
    with writing(folder):
        place = folder
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place):
            pass


def hold(folder: Path) -> IO[bytes]:
    """Keep other runs out of `folder` until the returned file is closed or this process ends, whatever ends it.

    Raises CapoError if another process holds it. On a file system without locks nobody is kept out.
    """
    path = folder / ".lock"
    with writing(path):
        file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode()
        file.close()
        raise CapoError(
            f"{folder}: process {holder} is writing there, perhaps a rank of a run whose launcher was killed. "
            "Wait for it, end it, or choose another output."
        ) from None
    except OSError:
        return file
    file.truncate(0)
    file.write(encode(f"{os.getpid()} on {socket.gethostname()}"))
    file.flush()
    return file


def write_text(path: Path, text: str) -> None:
    """Replace `path` as a whole: at every instant it holds the old text or the new. Raises CapoError.

    A link stays and what it leads to is replaced; a device or a pipe is refused.
    """
    path = path.resolve()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CapoError(f"{path}: not a regular file. Choose another file to write.")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            aside.write_bytes(encode(text))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append one line and hand it to the system at once. A crash or full disk can leave only this line torn."""
    with writing(path), path.open("ab", buffering=0) as file:
        rest = encode(line + "\n")
        while rest:
            rest = rest[file.write(rest) :]


def encode(text: str) -> bytes:
    """UTF-8; the half characters that a model can emit become escapes, which JSON reads."""
    return text.encode("utf-8", errors="backslashreplace")


def to_json(row: Mapping[str, Any]) -> str:
    """One line of JSON. NaN and infinities, which JSON lacks, become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(clean, ensure_ascii=False, allow_nan=False)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file such as metrics.jsonl, see `each_row`."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file, one at a time. A last line that a crash left torn is dropped.

    Raises DataError if the file cannot be read or another line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _parse(line) if line.strip() else None
                if row is not None:
                    yield row
                elif line.strip() and line.endswith(b"\n"):
                    raise DataError(f"{path}:{number}: not a JSON object: {line[:60].rstrip()!r}. Remove the line.")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error


def keep_rows(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrite a jsonl file without the rows that `keep` rejects and without torn lines, all or nothing."""
    if not path.is_file():
        return
    with writing(path):
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    parsed = [(line, _parse(line.encode("utf-8", errors="replace"))) for line in lines]
    kept = [line for line, row in parsed if row is not None and keep(row)]
    if [*kept, ""] != lines:
        write_text(path, "".join(f"{line}\n" for line in kept))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
