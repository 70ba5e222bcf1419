"""Which releases of Megatron-core are supported, and everything in which they differ.

0.16.1 is the last release for Python 3.11; 0.19.2 is for Python 3.12 and later.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from capo_megatron.errors import ConfigError

SUPPORTED = ("0.16.1", "0.19.2")


def check() -> str:
    """The installed version of megatron-core. Raises ConfigError if it is missing or was never tested with this code."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(f"megatron-core: not installed. Install {' or '.join(SUPPORTED)}.") from error
    if found not in SUPPORTED:
        raise ConfigError(
            f"megatron-core: version {found} is not supported. Install {' (Python 3.11) or '.join(SUPPORTED)} "
            "(Python 3.12), and see capo_megatron/mcore/versions.py to add one."
        )
    return found
