"""FP8 by TransformerEngine: what Megatron-core is told, which shapes its products take, and where the scales stand.

What is in FP8 are the products of the layers. Hidden states between layers, attention, embedding, head, log-probs and
losses are not.

**The scales of scoring passes.** Old and reference log-probs are computed in FP8 as well: a ratio of an FP8 pass to a
bfloat16 pass would start away from 1. Only `delayed` has a state, and its forward kernels write the largest value that
they see into it, even without gradients and in evaluation; the next training step would turn the scales of scored
responses, or of the reference's weights, into its own. `Scales.kept` therefore puts the state back after a scoring
pass, bit for bit. That costs four small copies per layer and way, and no memory worth counting. Scoring thus uses the
scales that training has reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd, lcm
from typing import Any

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from capo_megatron.config import ParallelConfig, PrecisionConfig
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import versions
from capo_megatron.weights.shape import ModelShape

# For both sides of a product, and for the tokens, which are a side of the weights' gradient: 16 numbers for the tensor
# cores, or whole blocks that share a scale.
_ALIGNMENT = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def alignment(precision: PrecisionConfig) -> int:
    """What every side of a product must be a multiple of; 1 without FP8."""
    return _ALIGNMENT[precision.fp8]


# --- checks -----------------------------------------------------------------------------------------------------------


def check_installed(precision: PrecisionConfig) -> None:
    """Raise ConfigError unless this machine can do what `precision` asks for."""
    if precision.fp8 is None and "rope" not in precision.fusions:
        return
    facts = versions.accelerator()
    if precision.fp8 is not None and (obstacle := versions.fp8_obstacles(facts)[precision.fp8]):
        works = [recipe for recipe, reason in versions.fp8_obstacles(facts).items() if reason is None]
        raise ConfigError(
            f"precision.fp8={precision.fp8}: {obstacle}. "
            + (f"Use {' or '.join(works)}, or null for bfloat16." if works else "Use precision.fp8=null for bfloat16.")
        )
    if facts.te is None:
        raise ConfigError(
            'precision.fusions: "rope" is a kernel of TransformerEngine, which is not installed. Leave it out.'
        )


def check_shape(shape: ModelShape, parallel: ParallelConfig, precision: PrecisionConfig) -> None:
    """Raise ConfigError if the layers' products do not have the sides that FP8 asks for, on one rank of `parallel`."""
    multiple, cut = alignment(precision), parallel.tensor
    heads = shape.num_attention_heads
    sides = {
        "hidden_size": shape.hidden_size,
        "attention heads x head_dim": heads * shape.head_dim // cut,
        "query, key and value columns": (heads + 2 * shape.num_key_value_heads) * shape.head_dim // cut,
        "intermediate_size": shape.intermediate_size // cut,
    }
    for name, side in sides.items():
        if side % multiple:
            raise ConfigError(
                f"precision.fp8={precision.fp8}: takes multiples of {multiple}, and {name} of {shape.name} is {side} "
                f"on a rank of parallel.tensor={cut}. Lower parallel.tensor, or use another recipe."
            )
    per_stage = shape.num_hidden_layers // parallel.pipeline
    if max(precision.first_last_bf16) > per_stage:
        raise ConfigError(
            f"precision.first_last_bf16={list(precision.first_last_bf16)}: a pipeline stage has {per_stage} layers "
            "(of all that stay in bfloat16 at one end, Megatron-core wants no more than that). Lower it."
        )


# --- settings ---------------------------------------------------------------------------------------------------------


def transformer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """What `precision` means in Megatron-core's TransformerConfig."""
    first, last = precision.first_last_bf16
    fused = {
        "apply_rope_fusion": "rope" in precision.fusions,
        "bias_activation_fusion": "swiglu" in precision.fusions,
        "bias_dropout_fusion": "dropout_add" in precision.fusions,
    }
    if precision.fp8 is None:
        return fused
    return {
        **fused,
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8,
        "fp8_param": precision.param_gather,
        "fp8_margin": precision.margin,
        "fp8_amax_history_len": precision.amax_history,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": bool(first or last),
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }


def ddp_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """What it means in DistributedDataParallelConfig."""
    return {"fp8_param_gather": precision.param_gather, **_shared_buffer(precision)}


def optimizer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """What it means in OptimizerConfig."""
    return {"fp8_recipe": precision.fp8, **_shared_buffer(precision)}


def _shared_buffer(precision: PrecisionConfig) -> dict[str, bool]:
    """MXFP8 weights lie twice in memory, by rows and by columns, so they are gathered through the gradients' buffer."""
    return {"reuse_grad_buf_for_mxfp8_param_ag": precision.fp8 == "mxfp8" and precision.param_gather}


# --- micro-batches ----------------------------------------------------------------------------------------------------


def padded(rows: int, targets: int, tensor: int, multiple: int) -> tuple[int, int]:
    """The smallest (rows, targets) of a micro-batch, at least those given, whose products FP8 can do.

    `targets` must divide by `tensor`, the ranks that share a sequence (1 without sequence parallelism), and the tokens
    of each of them by `multiple`. Rows may be added, because for an odd number of them the targets alone would have to
    grow by up to `multiple * tensor` each. Without FP8 (`multiple` 1) no row is added.
    """
    best: tuple[int, int] | None = None
    for height in range(rows, rows + multiple * tensor):
        if best is not None and height * targets >= best[0] * best[1]:
            break
        step = lcm(tensor, multiple * tensor // gcd(multiple * tensor, height))
        width = -(-targets // step) * step
        if best is None or height * width < best[0] * best[1]:
            best = height, width
    assert best is not None
    return best


# --- state ------------------------------------------------------------------------------------------------------------


class Scales:
    """The scale state of a model's TransformerEngine modules: empty unless the recipe is `delayed`."""

    def __init__(self, models: Sequence[torch.nn.Module], precision: PrecisionConfig) -> None:
        self._modules: list[Any] = []
        if precision.fp8 == "delayed":
            self._modules = [module for model in models for module in model.modules() if hasattr(module, "fp8_meta")]

    @property
    def unset(self) -> bool:
        """No pass has set a scale yet: they are all 1, which rounds most weights to nothing."""
        return bool(self._modules) and all(module.get_fp8_meta_tensors() is None for module in self._modules)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever runs inside leaves scales and histories as they were, bit for bit."""
        saved = [module.get_fp8_meta_tensors() for module in self._modules]
        try:
            yield
        finally:
            for module, tensors in zip(self._modules, saved, strict=True):
                module.reset_fp8_meta_tensors(tensors)  # None: a module that had no state gets a fresh one


def plain(weight: Tensor) -> Tensor:
    """The weight without quantisation: what an FP8 weight stands for, any other as it is."""
    return dequantize_fp8_tensor(weight) if is_float8tensor(weight) else weight


@torch.no_grad()
def assign(weight: Tensor, value: Tensor) -> None:
    """Overwrite a weight, from any device and dtype; an FP8 weight is quantised anew."""
    weight.data.copy_(value.to(weight.device) if is_float8tensor(weight) else value)
