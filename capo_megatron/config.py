"""RunConfig: everything a run can be told, with every default in exactly one place.

A YAML file is sparse and dotted overrides win over it (`train.lr=1e-6`). `load` reports every mistake by its dotted path;
`RunConfig.check` holds the rules that span sections. The resolved config is written beside the metrics and loads back to
the same object. Library code receives its own section, never the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from capo_megatron.algorithms import AlgorithmConfig, CapoConfig


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """A Qwen2-shaped decoder described here instead of by a config.json. Names follow Hugging Face's Qwen2Config."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train: a Hugging Face directory, or a shape with seeded random weights."""

    path: str | None = None  # directory with config.json, *.safetensors and tokenizer files
    shape: ShapeConfig | None = None
    tokenizer: str | None = None  # directory; default: model.path, or the task's own tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    reference: str | None = None  # directory of the frozen reference model; default: the model as training starts
    max_position_embeddings: int | None = None  # explicit override, written to exports


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is laid out. Data parallelism takes the ranks that are left."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # virtual pipeline stages per rank; > 1 needs pipeline > 1
    sequence: bool = False  # sequence parallelism; needs tensor > 1
    distributed_optimizer: bool = True


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where problems come from and how they become prompts."""

    train: tuple[str, ...] = ()  # jsonl / parquet files
    validation: tuple[str, ...] = ()  # files; if empty, validation_size problems are split off the training ones
    validation_size: int = 0
    task: str | None = None  # a procedural task instead of files: "chain", "one_digit", or "reasoning_gym/<name>"
    task_size: int = 4000  # problems generated for training
    task_options: dict[str, float | int | str | bool | list[int] | list[str] | list[float]] = field(default_factory=dict)
    prompt_column: str = "problem"
    answer_column: str = "answer"
    id_column: str | None = None
    template: str = "qwen25-math"  # qwen25-math | chat | plain | a file with a Jinja template
    system_prompt: str | None = None  # default: the template's own
    max_prompt_tokens: int = 1050  # longer prompts are dropped and counted
    dedupe: bool = True
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a step's responses are sampled."""

    engine: Literal["transformers"] = "transformers"
    prompts: int = 128  # problems per step
    samples: int = 8  # responses per problem (G)
    max_tokens: int = 3046
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()  # single-token strings besides the tokenizer's end-of-sequence
    batch_size: int = 256  # responses decoded together on a rank
    probe_rows: int = 4  # responses on which engine and policy are compared after every refit; 0 = off
    probe_tolerance: float = 0.02  # largest median |exp(gap) - 1| between engine and policy before the run stops


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Who grades, and within what limits."""

    kind: str = "math_verify"  # math_verify | exact | reasoning_gym | task | package.module:function
    workers: int = 2  # grading processes per rank (math_verify and user functions)
    timeout_s: float = 10.0  # wall-clock of one grading, from when a worker starts on it
    memory_mib: int = 2048  # address space of a worker
    max_answer_chars: int = 2000  # longer extracted answers are wrong without being parsed


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation. One step = one rollout; it makes minibatches x epochs optimizer steps."""

    steps: int = 600
    minibatches: int = 2  # per rollout
    epochs: int = 1  # passes over a rollout
    micro_batch_tokens: int = 16_384  # padded tokens of a micro-batch, at most
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = 0  # optimizer steps
    lr_decay_steps: int | None = None  # optimizer steps; default: all of the run
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # global norm; 0 = off
    recompute: Literal["none", "selective", "full"] = "none"
    logprob_chunk_tokens: int = 512  # tokens whose logits exist at one time
    max_skipped: int = 5  # optimizer steps skipped in a row for a non-finite loss or gradient before the run stops


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 20  # steps; 0 = only at the end and on SIGTERM
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training, and the defaults of `eval`."""

    every: int = 20  # steps; 0 = off
    samples: int = 16  # per problem
    temperature: float = 1.0
    at_start: bool = True  # validate before the first step, too


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    samples: int = 16  # responses written to samples/ per step
    tensorboard: bool = False
    wandb: str | None = None  # project name


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised training of a base model on a task's own demonstrations, before reinforcement learning."""

    steps: int = 1800
    batch: int = 128
    lr: float = 2e-3
    min_lr: float = 2e-4
    lr_warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    path: str = "base"  # Hugging Face directory to write (relative to `output`'s parent); reused if it is already there


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    output: str
    model: ModelConfig
    seed: int = 0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=CapoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    warmup: WarmupConfig | None = None
