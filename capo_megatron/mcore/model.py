"""Qwen2-shaped decoders as Megatron-core `GPTModel`s, cut for a layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from capo_megatron.config import ParallelConfig, ShapeConfig
from capo_megatron.errors import CheckpointError, ConfigError
from capo_megatron.mcore.runtime import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen2-shaped decoder, and the name it goes by in messages."""

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
    name: str = "the model"

    @classmethod
    def of(cls, config: ShapeConfig, name: str = "model.shape") -> ModelShape:
        """The shape written in a run's config."""
        return cls(**{spec.name: getattr(config, spec.name) for spec in fields(config)}, name=name)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding and the head over all tensor-parallel ranks.

        A multiple of 128 per rank, as Megatron pads, so that matrix products stay aligned. Vocabularies under 1024 are
        toys, where that padding would be most of the work: they become a multiple of `tensor` only.
        """
        unit = tensor * (128 if self.vocab_size >= 1024 else 1)
        return -(-self.vocab_size // unit) * unit


def read_shape(directory: str | Path) -> ModelShape:
    """The shape in `directory`/config.json. Raises CheckpointError if it is missing, damaged or of another architecture."""
    path = Path(directory) / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file. A Hugging Face model directory has a config.json.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}).") from error
    return _shape(found, path)


def _shape(found: dict[str, Any], path: Path) -> ModelShape:
    if found.get("model_type") != "qwen2":
        raise CheckpointError(f"{path}: model_type {found.get('model_type')!r} is not supported. Use a 'qwen2' model.")
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    values = {spec.name: found[spec.name] for spec in fields(ModelShape) if spec.name in found}
    values.setdefault("tie_word_embeddings", False)
    values["rope_theta"] = float(found.get("rope_theta", rope.get("rope_theta", 10_000.0)))
    return ModelShape(**(values | {"name": path.parent.name}))


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raise ConfigError if `shape` cannot be cut so."""
    for count, what in (
        (shape.num_key_value_heads, "key-value heads"),
        (shape.num_attention_heads, "attention heads"),
        (shape.intermediate_size, "feed-forward columns"),
    ):
        if count % parallel.tensor:
            raise ConfigError(f"parallel.tensor={parallel.tensor} does not divide the {count} {what} of {shape.name}.")
    stages = parallel.pipeline * parallel.virtual
    if shape.num_hidden_layers % stages:
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline} x parallel.virtual={parallel.virtual} = {stages} stages do not divide "
            f"the {shape.num_hidden_layers} layers of {shape.name}."
        )


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that also works on a sequence-parallel shard, which Megatron's torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the sequence: Megatron sums the gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DeferredHead(ColumnParallelLinear):
    """An output layer that hands on the hidden states, ready to be multiplied by this rank's rows of the head.

    Logits of a whole sequence never exist: log-probs are computed from (hidden states, `head_weight`) in chunks.
    """

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """[S, b, H] of the whole sequence; in backward the ranks' gradients of it are summed."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


def head_weight(chunk: GPTModel) -> Tensor:
    """This rank's rows [padded vocabulary / tensor, H] of the head, in the chunk that ends the model."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def build_model(
    shape: ModelShape,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Literal["none", "selective", "full"] = "none",
) -> list[GPTModel]:
    """This rank's chunks of the model, one per virtual stage, with parameters of `dtype` and undefined values.

    The chunk that ends the model returns hidden states [b, S, H] instead of logits, see `DeferredHead`.
    """
    config = transformer_config(shape, layout, dtype, recompute)
    chunks = []
    for stage in range(layout.virtual):
        first = layout.is_first_stage and stage == 0
        last = layout.is_last_stage and stage == layout.virtual - 1
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(shape, layout),
            vocab_size=shape.padded_vocab(layout.tensor),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            vp_stage=stage if layout.virtual > 1 else None,
        )
        if last:
            # GPTModel names the class of its output layer itself, and a second head is not worth its memory.
            chunk.output_layer.__class__ = DeferredHead
        chunks.append(chunk)
    return chunks


def transformer_config(shape: ModelShape, layout: Layout, dtype: torch.dtype, recompute: str) -> TransformerConfig:
    """Megatron's configuration of `shape` on `layout`, without the fusions that round differently from other engines."""
    interleaved = layout.virtual > 1
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if interleaved else None,
        sequence_parallel=layout.sequence,
        # Megatron refuses variable lengths on dense models unless the (unused) token dispatcher says alltoall.
        # The interleaved schedule exchanges shapes in an order that two stages mix up: it gets equal shapes instead.
        variable_seq_lengths=layout.pipeline > 1 and not interleaved,
        moe_token_dispatcher_type="alltoall",
        # With two stages the interleaved schedule mixes up forward and backward messages unless they are sent one by one
        # and overlapped; the plain schedule refuses to overlap.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        # Gloo sends read the storage later; CUDA's stream order makes freeing it right after the send safe.
        deallocate_pipeline_outputs=layout.pipeline > 1 and torch.cuda.is_available(),
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def _block_spec(shape: ModelShape, layout: Layout) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    count = len(layout.layers(0, shape.num_hidden_layers))
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
