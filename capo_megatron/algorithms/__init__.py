"""Placeholder until the algorithms land."""
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CapoConfig:
    kind: str = "capo"


AlgorithmConfig = CapoConfig
