"""The algorithms: pure torch on a step's `[N, T]` tensors, blind to ranks, Megatron and files.

A built-in algorithm is one module and one row of `ALGORITHMS`. An installed package adds another by an entry point in
the group `capo_megatron.algorithms`, named like its kind and leading to a pair `(Config, build)`:

    [project.entry-points."capo_megatron.algorithms"]
    my_kind = "my_package.my_module:ALGORITHM"      # ALGORITHM = (MyConfig, build)

`MyConfig` is a frozen, keyword-only dataclass with `kind: Literal["my_kind"] = "my_kind"`, usually a `SurrogateConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

from capo_megatron.algorithms import capo, cde, codapo, dapo, dcpo, dr_grpo, grpo, gspo, scapo, simko
from capo_megatron.algorithms.capo import CapoConfig
from capo_megatron.algorithms.cde import CdeConfig
from capo_megatron.algorithms.codapo import CodapoConfig
from capo_megatron.algorithms.dapo import DapoConfig
from capo_megatron.algorithms.dcpo import DcpoConfig
from capo_megatron.algorithms.dr_grpo import DrGrpoConfig
from capo_megatron.algorithms.grpo import GrpoConfig
from capo_megatron.algorithms.gspo import GspoConfig
from capo_megatron.algorithms.scapo import ScapoConfig
from capo_megatron.algorithms.simko import SimkoConfig
from capo_megatron.algorithms.surrogate import SurrogateConfig
from capo_megatron.errors import ConfigError
from capo_megatron.seams import Algorithm

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "CapoConfig",
    "CdeConfig",
    "CodapoConfig",
    "DapoConfig",
    "DcpoConfig",
    "DrGrpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "ScapoConfig",
    "SimkoConfig",
    "SurrogateConfig",
    "available",
    "build",
]

ENTRY_POINTS = "capo_megatron.algorithms"

Build = Callable[[Any], Algorithm]

ALGORITHMS: dict[str, tuple[type, Build]] = {
    "capo": (CapoConfig, capo.build),
    "grpo": (GrpoConfig, grpo.build),
    "dr_grpo": (DrGrpoConfig, dr_grpo.build),
    "dapo": (DapoConfig, dapo.build),
    "gspo": (GspoConfig, gspo.build),
    "codapo": (CodapoConfig, codapo.build),
    "cde": (CdeConfig, cde.build),
    "simko": (SimkoConfig, simko.build),
    "dcpo": (DcpoConfig, dcpo.build),
    "scapo": (ScapoConfig, scapo.build),
}


def available() -> dict[str, tuple[type, Build]]:
    """Kind -> (Config, build) of all algorithms, built in or installed. Raises ConfigError for a broken entry point."""
    found = dict(ALGORITHMS)
    for point in entry_points(group=ENTRY_POINTS):
        where = f"entry point {point.name!r} of {ENTRY_POINTS} ({point.value})"
        if point.name in found:
            raise ConfigError(f"{where}: the kind is taken. Rename it or uninstall the package.")
        try:
            config, build_installed = point.load()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: cannot be loaded as a pair (Config, build): {error}. Fix it.") from error
        found[point.name] = (config, build_installed)
    return found


class _AnyKind:
    """Tells pydantic to choose among all available configs by their `kind`.

    Installed algorithms are looked up when a schema is made rather than on import, since they import this package.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic import Field  # not at the top: adapters use the equations where pydantic may be missing or old

        configs = [config for config, _ in available().values()]
        union: Any = configs[0]
        for config in configs[1:]:
            union = union | config
        return handler.generate_schema(Annotated[union, Field(discriminator="kind")])


AlgorithmConfig = Annotated[
    CapoConfig
    | GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | GspoConfig
    | CodapoConfig
    | CdeConfig
    | SimkoConfig
    | DcpoConfig
    | ScapoConfig,
    _AnyKind(),
]


def build(config: Any) -> Algorithm:
    """The algorithm that a config describes. Raises ConfigError if its options are out of range or its kind unknown."""
    kinds = ALGORITHMS if config.kind in ALGORITHMS else available()
    if config.kind not in kinds:
        raise ConfigError(f"algorithm.kind={config.kind!r}: unknown. Choose one of {', '.join(kinds)}.")
    return kinds[config.kind][1](config)
