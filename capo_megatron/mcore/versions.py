"""Which releases of Megatron-core are supported, and everything in which they differ.

0.16.1 is the last release for Python 3.11; 0.19.2 is for Python 3.12 and later.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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
