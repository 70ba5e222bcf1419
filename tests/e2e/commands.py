"""Commands as a user types them, on the smallest run that does everything: in this process, or as real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capo_megatron.cli import main

# A Qwen2-shaped model of 10k weights on the chain task, without a warm-up.
TREE: dict[str, Any] = {
    "output": "run",
    "model": {
        "dtype": "float32",
        "shape": {
            "vocab_size": 17,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "initializer_range": 0.2,
        },
    },
    "data": {"task": "chain", "task_size": 16, "validation_size": 2, "template": "plain", "max_prompt_tokens": 16},
    "reward": {"kind": "task"},
    "rollout": {"prompts": 4, "samples": 4, "max_tokens": 8, "probe_rows": 2},
    "train": {"steps": 2, "minibatches": 2, "lr": 1e-2, "weight_decay": 0.5, "micro_batch_tokens": 256},
    "checkpoint": {"every": 1},
    "eval": {"every": 2, "samples": 2, "at_start": False},
}
WARMUP = {"steps": 20, "batch": 16, "lr_warmup_steps": 2}


def write_config(folder: Path, tree: dict[str, Any] = TREE, **sections: Any) -> Path:
    """`folder`/run.yaml: JSON, which is YAML."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree | sections))
    return path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: files with their bytes, folders with None."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which a command is refused, run in this process; nothing below the working folder may change."""
    before = snapshot(Path.cwd())
    capfd.readouterr()
    code = main(arguments)
    shown = capfd.readouterr()
    lines = shown.err.splitlines()
    assert len(lines) == 1, f"not one line on stderr:\n{shown.err}"
    assert code == 2
    assert snapshot(Path.cwd()) == before, "something was written"
    assert lines[0].startswith("capo-megatron: ")
    return lines[0].removeprefix("capo-megatron: ")


@contextmanager
def own_file_system(folder: Path, size: str) -> Iterator[Path]:
    """The folder as a file system of its own of this size, if the system lets us mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m ...` in `folder`, as a process of its own."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    known = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=known, capture_output=True, text=True, timeout=300
    )
