"""The sizes of a decoder, the families of decoders that are supported, and their config.json, read and written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capo_megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from capo_megatron.config import ShapeConfig

_LARGEST = 2**40  # that a size may be
_MOST_LAYERS = 10_000
_TOY_VOCABULARY = 1024  # below it, padding to 128 rows per rank would be most of the work


@dataclass(frozen=True)
class Family:
    """What one family of decoders has and another lacks. All have grouped-query attention, SwiGLU, RMSNorm, RoPE."""

    architecture: str  # the class that config.json names
    qkv_bias: bool  # the query, key and value projections have biases
    qk_norm: bool  # queries and keys pass through a norm of each head
    hidden_from_heads: bool = False  # a head is hidden_size / num_attention_heads wide, always


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, hidden_from_heads=True),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True),
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False),
}
# The only constants of Llama 3's rotary scaling that were ever released, and the only ones that Megatron-core computes.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, named as in Hugging Face's configs; defaults are Qwen2Config's, too.

    `name` is what messages call the model.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int = 32_768
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    model_type: str = "qwen2"  # one of FAMILIES
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope_scaling_factor: float | None = None  # of Llama 3's rotary scaling; None: without scaling
    name: str = field(default="the model")

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str) or self.model_type not in FAMILIES:
            raise ConfigError(f"{self.name}: model_type={self.model_type!r} is not supported. Use {_families()}.")
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.type == "int" and (type(value) is not int or not (spec.name != "head_dim") <= value < _LARGEST):
                raise ConfigError(f"{self.name}: {spec.name}={value!r} must be a positive integer.")
            if spec.type in ("float", "float | None") and not _is_positive(value, spec.type != "float"):
                raise ConfigError(f"{self.name}: {spec.name}={value!r} must be a positive number.")
            if spec.type == "bool" and type(value) is not bool:
                raise ConfigError(f"{self.name}: {spec.name}={value!r} must be true or false.")
        if self.num_hidden_layers > _MOST_LAYERS:
            raise ConfigError(
                f"{self.name}: num_hidden_layers={self.num_hidden_layers} must be at most {_MOST_LAYERS}."
            )
        by_heads = self._must_divide("hidden_size", "num_attention_heads") if not self.head_dim else self.head_dim
        self._must_divide("num_attention_heads", "num_key_value_heads")
        object.__setattr__(self, "head_dim", by_heads)
        if self.family.hidden_from_heads and self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ConfigError(
                f"{self.name}: head_dim={self.head_dim} differs from hidden_size / num_attention_heads: "
                f"not a {self.model_type}."
            )
        if self.head_dim % 2:
            by_size = self.head_dim * self.num_attention_heads == self.hidden_size
            what = "hidden_size / num_attention_heads = " if by_size else "head_dim="
            raise ConfigError(f"{self.name}: {what}{self.head_dim} must be even for rotary embeddings.")

    def _must_divide(self, whole: str, part: str) -> int:
        quotient, rest = divmod(getattr(self, whole), getattr(self, part))
        if rest:
            raise ConfigError(
                f"{self.name}: {part}={getattr(self, part)} does not divide {whole}={getattr(self, whole)}."
            )
        return quotient

    @classmethod
    def of(cls, config: ShapeConfig, name: str = "model.shape") -> ModelShape:
        """The shape described in a run's config. Raises ConfigError if its sizes contradict each other."""
        return cls(**{spec.name: getattr(config, spec.name) for spec in fields(config)}, name=name)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def identity(self) -> dict[str, Any]:
        """JSON values that decide what the tensors of a checkpoint mean."""
        return {key: value for key, value in asdict(self).items() if key not in ("name", "initializer_range")}

    def is_like(self, other: ModelShape) -> bool:
        """Whether the tensors of both mean the same."""
        return self.identity() == other.identity()

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding and the head over all tensor-parallel ranks; rows from `vocab_size` on are padding.

        A multiple of 128 per rank, as Megatron pads, so that matrix products stay aligned. Vocabularies under 1024 are
        toys, where that padding would be most of the work: they become a multiple of `tensor` only.
        """
        unit = tensor * (128 if self.vocab_size >= _TOY_VOCABULARY else 1)
        return -(-self.vocab_size // unit) * unit


def _is_positive(value: Any, may_lack: bool) -> bool:
    if value is None:
        return may_lack
    return type(value) in (int, float) and isfinite(value) and value > 0


def _families() -> str:
    *others, last = (repr(name) for name in FAMILIES)
    return f"{', '.join(others)} or {last}"


# --- config.json ------------------------------------------------------------------------------------------------------


def read_shape(directory: str | Path) -> ModelShape:
    """The shape in `directory`/config.json.

    Raises CheckpointError if the file is missing or damaged, or the model is not a plain decoder of `FAMILIES`.
    """
    path = Path(directory) / "config.json"
    found = read_config(path)
    _refuse_unsupported(found, path)
    values = {spec.name: found[spec.name] for spec in fields(ModelShape) if found.get(spec.name) is not None}
    values.pop("name", None)
    bases = [place["rope_theta"] for place in (found.get("rope_parameters") or {}, found) if "rope_theta" in place]
    for base in bases:
        if not _is_positive(base, may_lack=True):
            raise CheckpointError(f"{path}: rope_theta={base!r} must be a positive number. Download it again.")
    values["rope_theta"] = float(next((base for base in bases if base is not None), ModelShape.rope_theta))
    values["rope_scaling_factor"] = _scaling_factor(found, path)
    try:
        return ModelShape(**(values | {"name": path.parent.name or str(path.parent)}))
    except TypeError as error:
        raise CheckpointError(f"{path}: a size is missing ({error}). Download it again.") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json. Raises CheckpointError if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no such file. Point to a Hugging Face model directory; a Megatron checkpoint becomes one by "
            "capo-megatron convert megatron-to-hf."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected an object. Download it again.")
    return found


def _refuse_unsupported(found: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for anything that would silently compute something else."""
    kinds = {"rope_scaling": dict, "rope_parameters": dict, "layer_types": list, "model_type": str}
    for name, wanted in kinds.items():
        if not isinstance(found.get(name), wanted | None):
            raise CheckpointError(f"{path}: {name} is a {type(found[name]).__name__}, expected a {wanted.__name__}.")
    kind = found.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(f"{path}: model_type={kind!r} is not supported. Use a {_families()} model.")
    if found.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act={found['hidden_act']!r} is not supported, only 'silu'.")
    if kind != "qwen2":
        for name in ("attention_bias", "mlp_bias"):
            if found.get(name):
                raise CheckpointError(f"{path}: {name}=true is not supported for a {kind} model.")
    sliding = "sliding_attention" in (found.get("layer_types") or ())
    if found.get("use_sliding_window") or sliding:
        raise CheckpointError(
            f"{path}: sliding-window attention is not supported. Set use_sliding_window to false if the sequences fit "
            "into the window."
        )


def _scaling_factor(found: dict[str, Any], path: Path) -> float | None:
    """The factor of Llama 3's rotary scaling, None without scaling. Looks where old configs have it and where new."""
    factor = None
    for key in ("rope_scaling", "rope_parameters"):
        scaling = found.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            continue
        if kind != "llama3":
            raise CheckpointError(
                f"{path}: {key} of type {kind!r} is not supported. Remove it to train without scaling."
            )
        for name, only in _LLAMA3.items():
            if scaling.get(name) != only:
                raise CheckpointError(f"{path}: {key} with {name}={scaling.get(name)!r} is not supported, only {only}.")
        if not _is_positive(scaling.get("factor"), may_lack=False):
            raise CheckpointError(f"{path}: {key}.factor={scaling.get('factor')!r} must be a positive number.")
        factor = float(scaling["factor"])
    return factor


def hf_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The config.json of such a model. The rotary base is written both where old and where new readers look for it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling_factor is not None:
        rope |= {"rope_type": "llama3", "factor": shape.rope_scaling_factor} | _LLAMA3
    config = {
        "architectures": [shape.family.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": shape.initializer_range,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
        # Without a version, transformers warns of a broken tokenizer whenever it loads a large one from there.
        "transformers_version": version("transformers"),
    }
    if shape.rope_scaling_factor is not None:
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if shape.model_type == "llama":
        return config | {"attention_bias": False, "mlp_bias": False}
    if shape.family.hidden_from_heads:
        config.pop("head_dim")
    return config | {"use_sliding_window": False} | ({} if shape.family.qkv_bias else {"attention_bias": False})
