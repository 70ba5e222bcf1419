"""RunConfig: everything a run can be told, with every default in exactly one place.

A YAML file is sparse and dotted overrides win over it (`train.lr=1e-6`). `load` reports every mistake by its dotted
path; `RunConfig.check` holds the rules that span sections. The resolved config is written beside the metrics and loads
back to the same object. Library code receives its own section, never the whole.
"""

from capo_megatron.config.loading import around_model, dump, load
from capo_megatron.config.rules import describe_batch
from capo_megatron.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SeparateConfig,
    ShapeConfig,
    TrainConfig,
    VllmConfig,
    WarmupConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SeparateConfig",
    "ShapeConfig",
    "TrainConfig",
    "VllmConfig",
    "WarmupConfig",
    "around_model",
    "describe_batch",
    "dump",
    "load",
]
