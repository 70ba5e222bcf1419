"""Decoders as Megatron-core `GPTModel`s, cut for a layout."""

from __future__ import annotations

from math import gcd
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from capo_megatron.config import ParallelConfig, PrecisionConfig
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import cpu, fp8, versions
from capo_megatron.mcore.layers import CausalAttention, DeferredHead, RMSNorm, SwiGLU
from capo_megatron.mcore.runtime import Layout
from capo_megatron.weights.shape import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_PLAIN = PrecisionConfig()


def check_layout(shape: ModelShape, parallel: ParallelConfig, precision: PrecisionConfig = _PLAIN) -> None:
    """Raise ConfigError if `shape` cannot be cut so, naming what can, or if FP8 cannot multiply what is cut."""
    cut = {
        "key-value heads": shape.num_key_value_heads,
        "attention heads": shape.num_attention_heads,
        "columns (intermediate_size)": shape.intermediate_size,
    }
    for what, count in cut.items():
        if count % parallel.tensor:
            raise ConfigError(
                f"parallel.tensor={parallel.tensor} does not divide the {count} {what} of {shape.name}. "
                f"Use {_divisors(gcd(*cut.values()))}."
            )
    stages = parallel.pipeline * parallel.virtual
    if shape.num_hidden_layers % stages:
        factors = f"parallel.pipeline={parallel.pipeline}"
        if parallel.virtual > 1:
            factors += f" x parallel.virtual={parallel.virtual} = {stages}"
        raise ConfigError(
            f"{factors} does not divide the {shape.num_hidden_layers} layers of {shape.name}. "
            f"Use {_divisors(shape.num_hidden_layers)}."
        )
    fp8.check_shape(shape, parallel, precision)


def _divisors(number: int) -> str:
    found = [str(candidate) for candidate in range(1, number + 1) if number % candidate == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def build_model(
    shape: ModelShape,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Literal["none", "selective", "full"] = "none",
    precision: PrecisionConfig = _PLAIN,
) -> list[GPTModel]:
    """This rank's chunks of the model, one per virtual stage: parameters of `dtype`, values undefined.

    The chunk that ends the model returns hidden states [b, S, H] instead of logits, see `DeferredHead`. Parameters have
    their final dtype, so no `Float16Module` is needed around a chunk.
    """
    config = transformer_config(shape, layout, dtype, recompute, precision)
    return [_build_chunk(shape, layout, config, stage) for stage in range(layout.virtual)]


def _build_chunk(shape: ModelShape, layout: Layout, config: TransformerConfig, stage: int) -> GPTModel:
    last = layout.is_last_stage and stage == layout.virtual - 1
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(shape, layout, config),
        vocab_size=shape.padded_vocab(layout.tensor),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=layout.is_first_stage and stage == 0,
        post_process=last,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 1.0,
        vp_stage=stage if layout.virtual > 1 else None,
    )
    if last:
        # GPTModel itself names the class of its output layer, and building a second one would cost its memory.
        chunk.output_layer.__class__ = DeferredHead
    _mark_shards(chunk)
    return chunk


def _mark_shards(chunk: GPTModel) -> None:
    """Say of every sharded parameter that it is one.

    Megatron says so only while it initialises weights, which are loaded here. Without it the gradient norm would take
    the shards of all but the first tensor-parallel rank for copies, and leave them out.
    """
    kinds = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    for module in chunk.modules():
        for kind, cut in kinds.items():
            if isinstance(module, kind):
                for parameter in module.parameters(recurse=False):
                    sharded = parameter.dim() > cut  # the bias of a row-parallel layer is whole on every rank
                    parameter.tensor_model_parallel = sharded
                    parameter.partition_dim = cut if sharded else -1
                    parameter.partition_stride = 1


def _block_spec(shape: ModelShape, layout: Layout, config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of one chunk: TransformerEngine's on a GPU where it is installed, else local ones."""
    if HAVE_TE and not cpu.installed():
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.family.qk_norm), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(normalization="RMSNorm"), RMSNorm
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if shape.family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.use_te_activation_func:
        versions.mlp_submodules(layer.submodules).activation_func = SwiGLU
    count = len(layout.layers(0, shape.num_hidden_layers))
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def transformer_config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, recompute: str, precision: PrecisionConfig = _PLAIN
) -> TransformerConfig:
    """Megatron's configuration of `shape` on `layout`.

    Fusions that round differently from Hugging Face and vLLM are off unless `precision` asks for them: they make the
    trainer's log-probs differ from those of the engine that samples.
    """
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
        use_te_activation_func="swiglu" not in precision.fusions,  # the hook for an activation module, our `SwiGLU`
        add_bias_linear=False,
        add_qkv_bias=shape.family.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=cpu.installed(),
        **_parallel_settings(layout),
        **_recompute_settings(recompute),
        **fp8.transformer_settings(precision),
    )


def _parallel_settings(layout: Layout) -> dict[str, Any]:
    interleaved = layout.virtual > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if interleaved else None,
        "sequence_parallel": layout.sequence,
        # Micro-batches differ in length. Megatron refuses that on a dense model unless the (unused) token dispatcher
        # is "alltoall". The interleaved schedule would mix up the lengths of two stages: it gets equal ones.
        "variable_seq_lengths": layout.pipeline > 1 and not interleaved,
        "moe_token_dispatcher_type": "alltoall",
        # The interleaved schedule mixes up forward and backward messages of two stages unless they are sent one by one
        # and overlapped: silently wrong losses. The plain schedule refuses to overlap.
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        # An output is freed as soon as its sending has begun. On CUDA the order of the streams makes that safe, but
        # gloo would send what has taken its place in memory: now and then, silently wrong gradients.
        "deallocate_pipeline_outputs": layout.pipeline > 1 and not cpu.installed(),
    }


def _recompute_settings(recompute: str) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective" if recompute == "selective" else None}


def head_weight(chunk: GPTModel) -> Tensor:
    """This rank's rows [padded vocabulary / tensor, H] of the head, in the chunk that ends the model.

    For a tied head that is the embedding, or the copy of it that the last pipeline stage holds.
    """
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight
