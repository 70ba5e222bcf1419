"""The parts of a transformer layer that Megatron-core's local layers lack, in plain PyTorch.

They stand in for TransformerEngine's where that is not installed (norm, attention), and for Megatron's own where those
would keep tensors that nobody needs (activation, output layer).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

_SHORT = 128  # targets up to which attention on a CPU keeps the [S, S] matrix, because it is faster


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that also works on a sequence-parallel shard, which Megatron's torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the sequence: Megatron then sums the gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """The same shape, normalised over the last dimension."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Causal grouped-query attention by PyTorch's fused kernels: no [S, S] matrix is kept, on the CPU either.

    There, short sequences take the direct way instead, which needs two thirds of the fused kernel's time for them.

    Sequences are right-padded, so causality alone keeps padding out of every real position, and no mask is needed.
    """

    def __init__(self, *, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """[S, b, heads * head_dim] from query [S, b, heads, head_dim], key and value [S, b, groups, head_dim]."""
        assert attention_mask is None, "causal attention takes no mask"
        if query.device.type == "cpu" and len(query) <= _SHORT:
            return _short_attention(query, key, value, self.softmax_scale or query.shape[-1] ** -0.5)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.softmax_scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def _short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention as two batched products; the heads that share a key-value head are queries of one head."""
    length, rows, heads, size = query.shape
    groups = key.shape[2]
    folded = query.view(length, rows, groups, heads // groups, size).permute(1, 2, 3, 0, 4)
    keys, values = (tensor.permute(1, 2, 0, 3).reshape(rows * groups, length, size) for tensor in (key, value))
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1).repeat(heads // groups, 1)
    scores = torch.baddbmm(hidden, folded.reshape(rows * groups, -1, size), keys.transpose(1, 2), alpha=scale)
    mixed = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
    return mixed.view(rows, groups, heads // groups, length, size).permute(3, 0, 1, 2, 4).flatten(2)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([grad_gate, grad * F.silu(gate)], dim=-1)


class SwiGLU(MegatronModule):
    """silu(gate) * up, rounded as Hugging Face rounds it.

    Only its input is kept for backward: half of what Megatron's unfused activation keeps.
    """

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., F] from the gate and up projections side by side, [..., 2 F]."""
        return _SwiGLU.apply(gate_up)


class _SumGradients(torch.autograd.Function):
    """The identity whose backward sums over the ranks of a group.

    Megatron's `copy_to_tensor_model_parallel_region` loses that sum (in 0.16.1) if the gradient is not contiguous, and
    ours is not: it is the transpose of [b, S, H].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class DeferredHead(ColumnParallelLinear):
    """An output layer that hands on the hidden states, ready to be multiplied by this rank's rows of the head.

    Logits of a whole sequence never exist: log-probs are computed from hidden states and `model.head_weight` in chunks.
    """

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """[S, b, H] of the whole sequence; in backward the gradients of all tensor-parallel ranks are summed."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        if self.tp_group.size() > 1:
            return _SumGradients.apply(input_, self.tp_group), None
        return input_, None
