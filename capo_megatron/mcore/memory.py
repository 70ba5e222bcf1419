"""How much memory a run will take, estimated from shapes alone: nothing is allocated, no rank is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, prod

import torch

from capo_megatron.config import RolloutConfig, TrainConfig
from capo_megatron.errors import ConfigError
from capo_megatron.mcore.hf_weights import slots
from capo_megatron.mcore.runtime import Layout
from capo_megatron.weights import blockwise
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes

GIB = 2**30


def parameters(shape: ModelShape, layout: Layout) -> int:
    """Parameters on this rank; the last stage of a tied model holds its own copy of the embedding."""
    mine = (slot for slot in slots(shape, layout) if slot.pp_rank == layout.pp_rank)
    count = sum(prod(slot.rule.local_shape(shape, layout.tensor)) for slot in mine)
    copied = shape.tie_word_embeddings and layout.is_last_stage and layout.pipeline > 1
    return count + copied * shape.padded_vocab(layout.tensor) // layout.tensor * shape.hidden_size


@dataclass(frozen=True)
class Plan:
    """Bytes on the fullest rank, by what they are for.

    Weights, gradients and optimizer are exact. Activations are those of one micro-batch per pipeline stage in flight,
    counting the tensors that backward needs in each layer; attention scores are left out, as a fused attention does.
    """

    shape: ModelShape
    rollout: RolloutConfig
    ranks: int
    longest: int  # tokens of a sequence, at most: the keys and values of a decoding batch grow up to it
    parameters: int
    model: dict[str, int]  # which the trainer keeps all the time
    training: dict[str, int]  # beside it, while it trains
    sampling: dict[str, int]  # the engine's on this rank
    engine_weights: int
    engine_per_token: int  # a key and a value of every layer
    host: int

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        layout: Layout,
        dtype: torch.dtype,
        train: TrainConfig,
        rollout: RolloutConfig,
        longest: int,
        distributed: bool,
    ) -> Plan:
        """The plan of a run that is laid out so; `distributed`: data-parallel ranks share the optimizer's state."""
        stages = [replace(layout, rank=layout.rank_at(0, 0, stage)) for stage in range(layout.pipeline)]
        count = max(parameters(shape, place) for place in stages)
        cut = rollout.vllm.tensor if rollout.engine == "vllm" else 1
        engine_weights = _of_engine(shape, dtype, rollout.in_fp8) // cut
        per_token = _cached(shape) * dtype.itemsize // min(cut, shape.num_key_value_heads)
        sampling = _sampling(rollout, cut, layout, longest, engine_weights, per_token)
        return cls(
            shape,
            rollout,
            layout.world,
            longest,
            count,
            model={
                "weights": count * dtype.itemsize,
                "gradients (float32)": count * 4,
                "optimizer (float32 weights, two moments)": count
                * (12 if dtype != torch.float32 else 8)
                // (layout.data if distributed else 1),
            },
            training={
                "activations of a micro-batch": _activations(shape, layout, dtype, train),
                "logits in flight": train.logprob_chunk_tokens * shape.padded_vocab(layout.tensor) // layout.tensor * 4,
            },
            sampling={} if rollout.placement == "separate" else sampling,
            engine_weights=engine_weights,
            engine_per_token=per_token,
            host=2 * count * dtype.itemsize,
        )

    @property
    def beside_engine(self) -> int:
        """Bytes of the trainer while the engine is awake."""
        return sum((self.model | self.training if self.rollout.async_steps else self.model).values())

    def lines(self) -> list[str]:
        """For a person."""
        trains = [f"at a time     {_size(sum((self.model | self.training).values())):>10}  while it trains"]
        samples = [f"              {_size(sum((self.model | self.sampling).values())):>10}  while it samples"]
        everything = self.model | self.training | self.sampling
        both = [f"at a time     {_size(sum(everything.values())):>10}  while it trains and samples"]
        elsewhere = self.rollout.placement == "separate"
        return [
            f"parameters    {_number(_whole(self.shape))} in all, {_number(self.parameters)} on the fullest of "
            f"{self.ranks:,} ranks",
            *(f"memory        {_size(size):>10}  {name}" for name, size in everything.items()),
            *(trains if elsewhere else both if self.rollout.async_steps else [*trains, *samples]),
            f"host memory   {_size(self.host):>10}  for the reference, and the policy's weights meanwhile",
        ]


# --- vLLM's share of a GPU --------------------------------------------------------------------------------------------


def gpu_here() -> int | None:
    """Bytes of the smallest GPU that is visible; None without one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=None)


def check_vllm(plan: Plan, gpu: int) -> None:
    """Raise ConfigError unless `rollout.vllm.memory_fraction` of a GPU holds an engine and leaves room for the trainer.

    `gpu` is in bytes. vLLM does not start without room for the keys and values of one sequence of all the model's
    positions. Of its own activations and CUDA graphs nothing is known here: the smallest fraction that is accepted may
    still be too small.
    """
    fraction = plan.rollout.vllm.memory_fraction
    positions = plan.shape.max_position_embeddings
    needed = plan.engine_weights + positions * plan.engine_per_token
    least, most = ceil(100 * needed / gpu) / 100, floor(100 * (gpu - plan.beside_engine) / gpu) / 100
    if needed <= fraction * gpu <= gpu - plan.beside_engine:
        return
    if fraction * gpu < needed:
        reason = (
            f"its weights take {_size(plan.engine_weights)}, and keys and values of one sequence of {positions:,} "
            f"positions {_size(needed - plan.engine_weights)}"
        )
    else:
        also = ", activations and logits" if plan.rollout.async_steps else ""
        reason = f"beside it the trainer keeps {_size(plan.beside_engine)} of weights, gradients, optimizer{also}"
    remedy = (
        f"Use {least:g} to {most:g}"
        if least <= most < 1
        else "No fraction fits: raise rollout.vllm.tensor or parallel.tensor, take more ranks, or set "
        "rollout.placement=separate"
    )
    raise ConfigError(
        f"rollout.vllm.memory_fraction={fraction:g}: vLLM takes {_size(int(fraction * gpu))} of a GPU of {_size(gpu)}; "
        f"{reason}. {remedy}."
    )


def describe_vllm(plan: Plan, gpu: int | None) -> list[str]:
    """How an engine shares a GPU of so many bytes with the trainer, or what it has on a CPU (None), for a person."""
    options = plan.rollout.vllm
    if gpu is None:
        cache = options.cpu_cache_gib * GIB
        return [f"vLLM          {_size(cache):>10}  on a CPU (rollout.vllm.cpu_cache_gib){_kept(plan, cache)}"]
    taken = int(options.memory_fraction * gpu)
    cache = taken - plan.engine_weights
    return [
        f"vLLM          {_size(taken):>10}  of a GPU of {_size(gpu)} (rollout.vllm.memory_fraction="
        f"{options.memory_fraction:g}), and {_size(plan.beside_engine)} of the trainer's beside it",
        f"              {_size(cache):>10}  of that at most{_kept(plan, cache)}",
        f"              {_size(gpu - taken - plan.beside_engine):>10}  left for CUDA, NCCL, and the proof of a refit",
    ]


def _kept(plan: Plan, cache: int) -> str:
    tokens = cache // plan.engine_per_token
    return f", for keys and values of {tokens:,} tokens: {tokens // plan.longest:,} sequences of {plan.longest:,}"


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _whole(shape: ModelShape) -> int:
    return parameters(shape, Layout(1, 1, 1, False, 1, 0))


def _of_engine(shape: ModelShape, dtype: torch.dtype, in_fp8: bool) -> int:
    """Bytes of all weights, in whole."""
    saved = [blockwise.saved_bytes(name, size, dtype.itemsize) for name, size in hf_shapes(shape).items()]
    return _whole(shape) * dtype.itemsize - in_fp8 * sum(saved)


def _sampling(
    rollout: RolloutConfig, cut: int, layout: Layout, longest: int, weights: int, per_token: int
) -> dict[str, int]:
    """What the engine takes on a rank, by what it is for."""
    most = rollout.vllm.batch_size if rollout.engine == "vllm" else rollout.batch_size
    responses = min(most, -(-rollout.prompts * rollout.samples * cut // layout.world))
    of_weights = f"1/{cut} of the weights" if cut > 1 else "its own whole copy of the weights"
    in_fp8 = ", the layers' in FP8" if rollout.in_fp8 else ""
    # vLLM takes as much cache as its share of the GPU leaves: these are what it needs to decode all of them together.
    return {
        f"engine: {of_weights}{in_fp8}": weights,
        f"engine: keys and values of {responses:,} responses of {longest:,} tokens": responses * longest * per_token,
    }


def _number(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.2f} MiB"


def _cached(shape: ModelShape) -> int:
    """Numbers that the engine keeps for each token it has seen: a key and a value per layer and key-value head."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim


def _activations(shape: ModelShape, layout: Layout, dtype: torch.dtype, train: TrainConfig) -> int:
    """Bytes kept for backward: of each token and layer the norms, and what attention and feed-forward take and give."""
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    inside = (heads * shape.head_dim * 2 + 4 * shape.intermediate_size) // layout.tensor
    around = 5 * shape.hidden_size // (layout.tensor if layout.sequence else 1)
    layers = shape.num_hidden_layers // layout.pipeline
    kept = shape.hidden_size * layers + inside + around if train.recompute == "full" else (inside + around) * layers
    in_flight = layout.pipeline  # the first stage of 1F1B holds one micro-batch per stage
    return kept * train.micro_batch_tokens * dtype.itemsize * in_flight
