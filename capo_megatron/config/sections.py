"""The sections of a run's configuration. A default is written here and nowhere else.

Types carry their ranges (`Count` is an integer above zero), which `capo_megatron.config.load` enforces and prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict

from capo_megatron.algorithms import AlgorithmConfig, CapoConfig
from capo_megatron.config.rules import mistakes
from capo_megatron.errors import ConfigError

Count = Annotated[int, Gt(0)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Rate = Annotated[float, Gt(0), Le(1)]  # of learning
FinalRate = Annotated[float, Ge(0), Le(1)]
Size = Annotated[int, Gt(0), Le(1_000_000)]  # problems: more of them would be made or sorted for minutes
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """A decoder described here instead of by a config.json. Names follow Hugging Face's configs."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    intermediate_size: Count
    max_position_embeddings: Count = 4096
    rope_theta: Positive = 10_000.0
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: Positive = 0.02
    model_type: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    head_dim: Annotated[int, Ge(0)] = 0  # 0: hidden_size / num_attention_heads
    rope_scaling_factor: Positive | None = None  # of Llama 3's rotary scaling; default: none


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train: a Hugging Face directory, or a shape with seeded random weights."""

    path: Name | None = None  # directory with config.json, *.safetensors and tokenizer files
    shape: ShapeConfig | None = None
    tokenizer: Name | None = None  # directory; default: model.path, or the task's own tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    reference: Name | None = None  # directory of the frozen reference model; default: the model as training starts
    max_position_embeddings: Count | None = None  # explicit override, written to exports


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is laid out. Data parallelism takes the ranks that are left."""

    tensor: Count = 1
    pipeline: Count = 1
    virtual: Count = 1  # virtual pipeline stages per rank; > 1 needs pipeline > 1
    sequence: bool = False  # sequence parallelism; needs tensor > 1
    distributed_optimizer: bool = True


Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Fusion = Literal["rope", "swiglu", "dropout_add"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """FP8 matrix products by TransformerEngine, and kernels that round differently from the engine's.

    FP8 is for the products of the layers alone: norms, attention, embedding, head, log-probs, loss, gradients and
    optimizer stay as they are. Recipes have Megatron-core's names and differ in what brings a tensor into FP8's range:

        delayed     one scale per tensor, from the largest values of earlier steps: the only one with a state
        tensorwise  one scale per tensor, from the tensor itself: one more pass over it
        blockwise   a scale per 1x128 numbers, or 128x128 of a weight; Hopper or later, CUDA 12.9 or later
        mxfp8       a scale per 32 numbers; Blackwell

    Fusions save memory traffic and make the trainer's log-probs differ from those of the engine that samples, which
    every importance ratio then carries: "rope" rotates in TransformerEngine's kernel instead of in the order of Hugging
    Face, "swiglu" rounds once instead of twice, "dropout_add" adds the residual in a compiled kernel. Watch
    refit/gap_median in the metrics when you switch one on.
    """

    fp8: Recipe | None = None
    format: Literal["e4m3", "hybrid"] | None = None  # hybrid: e5m2 gradients; default: e4m3 where blocks have a scale
    first_last_bf16: tuple[Whole, Whole] = (0, 0)  # layers at the start and at the end that stay in bfloat16
    param_gather: bool = False  # keep the layers' weights in FP8 and gather them so; the optimizer's stay float32
    amax_history: Count = 1024  # delayed: micro-batches whose largest value sets the scale
    margin: Whole = 0  # delayed: powers of two left free above it
    fusions: tuple[Fusion, ...] = ()

    @property
    def fp8_format(self) -> Literal["e4m3", "hybrid"]:
        """As set, or what suits the recipe: fine-grained scales spare gradients the wider range of e5m2."""
        return self.format or ("e4m3" if self.fp8 in ("blockwise", "mxfp8") else "hybrid")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where problems come from and how they become prompts."""

    train: tuple[Name, ...] = ()  # jsonl / parquet files
    validation: tuple[Name, ...] = ()  # files; if empty, validation_size problems are split off the training ones
    validation_size: Annotated[int, Ge(0), Le(1_000_000)] = 0
    task: Name | None = None  # a procedural task instead of files: "chain", "one_digit", or "reasoning_gym/<name>"
    task_size: Size = 4000  # problems generated for training
    task_options: dict[str, float | int | str | bool | list[int] | list[str] | list[float]] = field(
        default_factory=dict
    )
    prompt_column: Name = "problem"
    answer_column: Name = "answer"
    id_column: Name | None = None
    perturbed_column: Name | None = None  # list of other wordings of the problem, for algorithms that need them
    perturbations: tuple[Literal["typo", "suffix", "scenario"], ...] = ()  # other wordings made here, one per entry
    template: Name = "qwen25-math"  # qwen25-math | chat | plain | a file with a Jinja template
    system_prompt: str | None = None  # default: the template's own
    max_prompt_tokens: Count = 1050  # longer prompts are dropped and counted
    dedupe: bool = True
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM inside the training processes, or inside those of an engine server, for rollout.engine: vllm.

    With weights: fp8 those of the layers' products are rounded on the way to vLLM, which rounds their inputs: half the
    memory and faster products, on GPUs from compute capability 8.9. The responses are then of a rounded policy: set
    algorithm.importance_cap, which corrects for that, and watch refit/gap_median.
    """

    weights: Literal["as-trained", "fp8"] = "as-trained"  # as-trained: in model.dtype; fp8: E4M3 in blocks of 128 x 128
    tensor: Count = 1  # ranks that share an engine and cut its weights between them
    memory_fraction: Annotated[float, Gt(0), Lt(1)] = 0.5  # of the GPU, for weights and KV cache while it samples
    cpu_cache_gib: Count = 1  # of KV cache, without a GPU
    batch_size: Count = 256  # responses decoded together
    bucket_mib: Count = 512  # weights that are handed over together at a refit
    eager: bool = False  # without CUDA graphs: starts faster, samples slower


@dataclass(frozen=True, kw_only=True)
class SeparateConfig:
    """Engine servers, for rollout.placement: separate. Each is started by `capo-megatron engine` with this config."""

    servers: tuple[Name, ...] = ()  # host:port of each, as the trainer reaches it; ranks are dealt out to them evenly
    backend: Literal["nccl", "gloo"] | None = None  # that carries the weights; default: nccl between GPUs, else gloo
    wait_s: Positive = 600.0  # for servers to be there as a run starts
    silence_s: Annotated[float, Ge(5)] = 30.0  # after which a server, or a broadcast of weights, counts as dead
    limit_s: Positive = 3600.0  # of one call, e.g. the sampling of a step


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a step's responses are sampled."""

    engine: Literal["transformers", "vllm"] = "transformers"
    vllm: VllmConfig = field(default_factory=VllmConfig)
    placement: Literal["colocated", "separate"] = "colocated"  # in the training processes, or on devices of its own
    separate: SeparateConfig = field(default_factory=SeparateConfig)
    # 1: the responses of a step are sampled while the step before trains, by the weights before that step. Both models
    # stay in memory: the engine does not sleep. Groups are kept and replaced (DAPO) by those older weights, too;
    # validation always is of the newest. Set algorithm.importance_cap, which corrects for the lag.
    async_steps: Annotated[int, Ge(0), Le(1)] = 0
    prompts: Count = 128  # problems per step
    samples: Count = 8  # responses per problem (G)
    max_tokens: Count = 3046
    temperature: Positive = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Whole = 0  # 0 = off
    accept_truncated_sampling: bool = False  # allow top_p < 1 or top_k > 0 although trained log-probs are of all tokens
    stop: tuple[Name, ...] = ()  # single-token strings besides the tokenizer's end-of-sequence
    batch_size: Count = 256  # responses decoded together on a rank
    retries: Whole = 2  # of a response on which the engine gave up; then it is left out of its group
    max_dropped: Annotated[float, Ge(0), Lt(1)] = 0.05  # share of a step's responses left out before the run stops
    probe_rows: Whole = 4  # responses on which engine and policy are compared after every refit; 0 = off
    probe_tolerance: Positive | None = None  # largest median of exp|gap| - 1 before the run stops; default: by dtype

    @property
    def in_fp8(self) -> bool:
        """Whether the engine's weights are rounded to FP8."""
        return self.engine == "vllm" and self.vllm.weights == "fp8"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Who grades, and within what limits."""

    kind: Name = "math_verify"  # math_verify | exact | reasoning_gym | task | package.module:function
    workers: Annotated[int, Gt(0), Le(1024)] = 2  # grading processes per rank (math_verify and user functions)
    timeout_s: Annotated[float, Gt(0), Le(86_400)] = 10.0  # wall-clock of one grading, from when a worker starts on it
    memory_mib: Annotated[int, Ge(256), Le(2**24)] = 2048  # address space of a worker
    max_answer_chars: Count = 2000  # longer extracted answers are wrong without being parsed


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation. One step = one rollout; it makes minibatches x epochs optimizer steps."""

    steps: Count = 600
    minibatches: Count = 2  # per rollout
    epochs: Count = 1  # passes over a rollout
    micro_batch_tokens: Count = 16_384  # padded tokens of a micro-batch, at most
    lr: Rate = 1e-6
    min_lr: FinalRate = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: Whole = 0  # optimizer steps
    lr_decay_steps: Count | None = None  # optimizer steps; default: all of the run
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip_grad: NonNegative = 1.0  # global norm; 0 = off
    recompute: Literal["none", "selective", "full"] = "none"
    logprob_chunk_tokens: Count = 512  # tokens whose logits exist at one time
    max_skipped: Count = 5  # optimizer steps skipped in a row for a non-finite loss or gradient before the run stops


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save. A run resumes from the newest checkpoint of its output folder by itself."""

    every: Whole = 20  # steps; 0 = only at the end and on SIGTERM
    keep: Count = 2


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training, and the defaults of `eval`."""

    every: Whole = 20  # steps; 0 = off
    samples: Count = 16  # per problem
    temperature: NonNegative = 1.0  # 0 = greedy
    at_start: bool = True  # validate before the first step, too


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How a run is watched, besides metrics.jsonl, which is always written."""

    console: Literal["auto", "live", "plain", "off"] = (
        "auto"  # auto: a live display on a terminal, plain lines elsewhere
    )
    samples: Whole = 16  # responses written to samples/ per step
    tensorboard: bool = False
    wandb: Name | None = None  # project name
    wandb_run: Name | None = None  # run name; default: the name of the output folder


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised training of a base model on a task's own demonstrations, before reinforcement learning."""

    steps: Count = 1800
    batch: Count = 128
    lr: Rate = 2e-3
    min_lr: FinalRate = 2e-4
    lr_warmup_steps: Whole = 50
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: NonNegative = 0.01
    path: Name = (
        "base"  # Hugging Face directory to write (relative to `output`'s parent); reused if it is already there
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run can be told. Library code receives its own section, never this whole."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    output: Name  # folder of checkpoints, metrics, samples; a run that finds its own checkpoints there resumes
    model: ModelConfig
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=CapoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    warmup: WarmupConfig | None = None

    @property
    def probe_tolerance(self) -> float:
        """The largest gap between engine and policy: as set, or what rounding in the policy's numbers leaves room for.

        FP8 keeps 3 bits of a number where bfloat16 keeps 7, so the gap between a policy in the one and an engine in the
        other is several times as wide; how wide has not been measured on GPUs.
        """
        numbers = "fp8" if self.precision.fp8 or self.rollout.in_fp8 else self.model.dtype
        return self.rollout.probe_tolerance or {"float32": 1e-3, "bfloat16": 2e-2, "fp8": 1e-1}[numbers]

    @property
    def rounding(self) -> float:
        """By how much sums over a weight may differ between engine and policy, relative, if it is the same weight.

        Where the engine's are in FP8, the policy's are rounded alike before (see `Probe`): what is left is that kernels
        add up FP8 products in fewer bits.
        """
        return {"float32": 1e-5, "bfloat16": 1e-2, "fp8": 3e-2}["fp8" if self.rollout.in_fp8 else self.model.dtype]

    def check(self, world_size: int, training: bool = True) -> None:
        """Raise ConfigError if sections contradict each other or `world_size` ranks cannot be laid out so.

        Without `training` nothing is asked of what only training uses: its problems, batches and schedule.
        """
        found = list(mistakes(self, world_size, training))
        if found:
            raise ConfigError("\n".join(found))
