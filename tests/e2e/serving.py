"""An engine server as a user starts it, for tests of runs that use one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from capo_megatron.rollout.channel import SECRET

TOKEN = "a secret of the tests"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return f"127.0.0.1:{place.getsockname()[1]}"


def separate(address: str, **changes: Any) -> dict[str, Any]:
    """Options of `rollout` for a run with a server at this address."""
    return {"placement": "separate", "separate": {"servers": [address], "wait_s": 120.0, **changes}}


@contextmanager
def engine_server(config: Path, address: str, ranks: int = 1, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`capo-megatron engine`, in the config's folder, where its output goes to engine.log."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    known = {**os.environ, SECRET: TOKEN, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    known |= environment
    command = [sys.executable, "-m", "capo_megatron", "engine", str(config), "--listen", address]
    command += ["--nproc", str(ranks)] if ranks > 1 else []
    with (config.parent / "engine.log").open("w") as log:
        process = subprocess.Popen(command, cwd=config.parent, env=known, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it has started, at once."""
    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            member.kill()
        process.wait()
