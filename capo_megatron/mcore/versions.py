"""Which releases of Megatron-core are supported, and everything in which they differ.

0.16.1 is the last release for Python 3.11; 0.19.2 is for Python 3.12 and later.
"""

from __future__ import annotations

import functools
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
