"""Which releases of Megatron-core are supported, and everything in which they differ.

0.16.1 is the last release for Python 3.11; 0.19.2 is for Python 3.12 and later.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from capo_megatron.errors import ConfigError

SUPPORTED = {"0.16.1": "Python 3.11", "0.19.2": "Python 3.12 or later"}


def check() -> str:
    """The installed version of megatron-core.

    Raises ConfigError if there is none, or one that this code was never tested with.
    """
    allowed = " or ".join(f"{release} ({python})" for release, python in SUPPORTED.items())
    try:
        found = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(f"megatron-core: not installed. Install {allowed}.") from error
    if found not in SUPPORTED:
        raise ConfigError(f"megatron-core: version {found} is not supported. Install {allowed}.")
    return found


# --- FP8 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accelerator:
    """What decides which FP8 recipes there are."""

    te: str | None  # release of TransformerEngine, None where it is not installed or does not import
    capability: tuple[int, int] | None  # of the weakest GPU, None without one
    cuda: tuple[int, int] | None  # that torch was built for


# First release of TransformerEngine with the recipe that Megatron-core builds for the name.
_RECIPE_SINCE = {"delayed": "2.1", "tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.1"}


def accelerator() -> Accelerator:
    """What this process finds here. Imports TransformerEngine, through Megatron-core."""
    import torch
    from megatron.core.fp8_utils import HAVE_TE

    return Accelerator(version("transformer-engine") if HAVE_TE else None, capability(), _pair(torch.version.cuda))


def capability() -> tuple[int, int] | None:
    """Compute capability of the weakest GPU that is visible; None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_capability(index) for index in range(count)), default=None)


def _pair(release: str | None) -> tuple[int, int] | None:
    return None if release is None else Version(release).release[:2]  # type: ignore[return-value]


def fp8_obstacles(found: Accelerator) -> dict[str, str | None]:
    """Why each recipe cannot run, in words without a full stop; None if it can.

    The limits on devices and CUDA are TransformerEngine's own.
    """
    return {recipe: _obstacle(recipe, found) for recipe in _RECIPE_SINCE}


def _obstacle(recipe: str, found: Accelerator) -> str | None:
    since = Version(_RECIPE_SINCE[recipe])
    if found.te is None:
        return "needs TransformerEngine, which is not installed or cannot be imported"
    if Version(found.te) < since:
        return f"needs TransformerEngine {since} or later, found {found.te}"
    if found.capability is None:
        return "needs a GPU, and none is visible"
    device = f"found {found.capability[0]}.{found.capability[1]}"
    if recipe == "mxfp8":
        blackwell = (10, 0) <= found.capability < (12, 0)
        return None if blackwell else f"needs a GPU of compute capability 10.x (Blackwell), {device}"
    if recipe == "blockwise":
        if found.capability < (9, 0):
            return f"needs a GPU of compute capability 9.0 (Hopper) or later, {device}"
        if found.cuda is None or found.cuda < (12, 9):
            build = "no CUDA" if found.cuda is None else f"CUDA {found.cuda[0]}.{found.cuda[1]}"
            return f"needs a torch built for CUDA 12.9 or later, found {build}"
        return None
    return None if found.capability >= (8, 9) else f"needs a GPU of compute capability 8.9 or later, {device}"


# --- differences ------------------------------------------------------------------------------------------------------


def mlp_submodules(layer_submodules: Any) -> Any:
    """The parts of a layer's feed-forward block, to be changed before the layer is built."""
    mlp = layer_submodules.mlp
    if isinstance(mlp, functools.partial):  # 0.19.2
        return mlp.keywords["submodules"]
    return mlp.submodules


def write_here(request: Any) -> Any:
    """A checkpoint's write request, to be carried out by this process.

    0.16.1 would fork a writer in the middle of the threads of gloo and OpenMP, which may hang and outlives a rank that
    is killed; 0.19.2 writes in this process by itself.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if request.async_fn is None or "write_preloaded_data_multiproc" not in vars(FileSystemWriterAsync):
        return request
    transforms = request.async_fn.args[0]
    return request._replace(async_fn=functools.partial(_write_buckets, FileSystemWriterAsync, transforms))


def _write_buckets(writer: Any, transforms: list[Any], _rank: int, buckets: Sequence[Any], results: Any) -> None:
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        said: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        writer.write_preloaded_data(transforms, index, bucket, said, pending, use_fsync=True)
        _, written[index] = said.get_nowait()
    failures = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    results.put(failures[0] if failures else written)
