"""vLLM's end of a refit: how its workers take weights, and what they hold of them. Imported where vLLM is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from capo_megatron.rollout.sketch import direction, project
from capo_megatron.seams import Sketch

BACKEND = "capo_in_process"


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is no connection to make."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Weights by their Hugging Face names."""

    weights: list[tuple[str, Tensor]]


class Receiver(WeightTransferEngine[Nothing, Bucket]):
    """Takes tensors of the same process as they are."""

    init_info_cls, update_info_cls = Nothing, Bucket

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(dict(update_info)))

    def receive_weights(self, update_info: Bucket) -> None:
        self.model.load_weights(update_info.weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A tied head multiplies by a packed copy of the embedding, which a reload forgets to make again.
            head = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


# --- what the workers hold --------------------------------------------------------------------------------------------


def held(model: nn.Module) -> dict[str, Sketch]:
    """Hugging Face name -> sketch of every weight, whole, as this model holds it. Collective over an engine's ranks.

    Matrices are applied to a vector instead of read: they may lie packed, or in FP8.
    """
    found = {}
    with torch.inference_mode():
        for name, module in model.named_modules():
            for weight, values in _products(name, module):
                found[weight] = project(values)
    return found


def _products(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, values to project) of the weights of one layer."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    if isinstance(module, QKVParallelLinear):
        copies = module.num_kv_head_replicas
        sizes = [module.num_heads * module.head_size, *[module.num_kv_heads * module.head_size] * 2]
        places = [(ranks, rank), *[(ranks // copies, rank // copies)] * 2]
        yield from _parts(name, "qkv_proj", ("q_proj", "k_proj", "v_proj"), module, sizes, places)
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [size // ranks for size in module.output_sizes]
        yield from _parts(name, "gate_up_proj", ("gate_proj", "up_proj"), module, sizes, [(ranks, rank)] * 2)
    elif isinstance(module, RowParallelLinear):
        size = module.input_size_per_partition
        mine = direction(module.input_size, 0)[rank * size : (rank + 1) * size]
        yield f"{name}.weight", tensor_model_parallel_all_reduce(_applied(module, mine))
    elif isinstance(module, VocabParallelEmbedding):
        begin, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        weight = module.weight[: end - begin].float()
        rows = weight.new_zeros(module.org_vocab_size)
        rows[begin:end] = weight @ direction(weight.shape[1], 0).to(weight.device)
        yield f"{name}.weight", tensor_model_parallel_all_reduce(rows)
    elif name.endswith("norm"):
        norm: Any = module
        yield f"{name}.weight", norm.weight


def _parts(
    name: str, packed: str, parts: tuple[str, ...], module: Any, sizes: list[int], places: list[tuple[int, int]]
) -> Iterator[tuple[str, Tensor]]:
    """The parts of a layer that computes several at once, each put together from its `(count, index)`-th shards."""
    columns = {"weight": _applied(module, direction(module.input_size, 0))}
    if module.bias is not None:
        columns["bias"] = module.bias.float()
    for kind, local in columns.items():
        for part, piece, (count, index) in zip(parts, local.split(sizes), places, strict=True):
            whole = piece.new_zeros(count * len(piece))
            whole[index * len(piece) : (index + 1) * len(piece)] = piece
            copies = get_tensor_model_parallel_world_size() // count
            yield f"{name.removesuffix(packed)}{part}.{kind}", tensor_model_parallel_all_reduce(whole) / copies


def _applied(module: Any, vector: Tensor) -> Tensor:
    """[out] float32: this rank's weight times a vector."""
    some = next(iter(module.parameters()))
    dtype = some.dtype if some.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16
    product: Tensor = module.quant_method.apply(module, vector.to(some.device, dtype)[None], bias=None)
    return product[0].float()
