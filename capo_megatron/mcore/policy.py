"""MegatronPolicy: the model, its optimizer and its frozen reference behind `seams.Policy`, on any layout.

Every rank holds a step's batch whole, on CPU; what is distributed is the work. Rows go to data-parallel ranks in
micro-batches (`microbatches.plan`), through the pipeline (Megatron's schedules), and the last stage turns hidden states
into log-probs of the response tokens (`logprobs.target_outputs`).

**The one loss scale.** `TrainBatch.weights` already hold the whole reduction, so a mini-batch's loss is a plain sum
over rows. Megatron's schedule divides a micro-batch's loss by the number of micro-batches, and its data parallelism
divides gradients by the number of ranks; `_MicroBatch.loss_scale` undoes both. Hence loss and gradient do not depend on
the layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from capo_megatron.config import PrecisionConfig, TrainConfig
from capo_megatron.mcore import fp8, hf_weights, microbatches
from capo_megatron.mcore.logprobs import target_outputs
from capo_megatron.mcore.model import build_model, head_weight
from capo_megatron.mcore.optimizer import CHECKPOINT_METADATA, Optimizer
from capo_megatron.mcore.reference import Reference
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.mcore.tally import Tally
from capo_megatron.seams import PolicyLoss, Signal, Weights
from capo_megatron.types import PolicyOutputs, RolloutBatch, StepReport, TopK, TrainBatch
from capo_megatron.weights.shape import ModelShape


class MegatronPolicy:
    """A GPTModel in training. All methods are collective: every rank calls them with the same arguments."""

    def __init__(
        self,
        shape: ModelShape,
        runtime: Runtime,
        config: TrainConfig,
        *,
        dtype: torch.dtype,
        total_steps: int,
        temperature: float = 1.0,
        distributed_optimizer: bool = True,
        averaged_reference: bool = False,
        precision: PrecisionConfig | None = None,
    ) -> None:
        """Build the model with unset weights; `load` comes next.

        Args:
            shape: the model.
            runtime: ranks and layout.
            config: optimisation.
            dtype: of the weights; the optimizer keeps float32 copies.
            total_steps: optimizer steps the learning-rate schedule spans.
            temperature: sampling temperature, by which logits are divided everywhere.
            distributed_optimizer: shard optimizer state over data-parallel ranks.
            averaged_reference: the reference is a moving average (`update_reference`) and part of checkpoints.
            precision: FP8 and fused kernels, default: neither. Whoever asks for FP8 has `fp8.check_installed` and
                `check_layout` pass first: where there is no TransformerEngine, Megatron-core ignores it.
        """
        precision = precision or PrecisionConfig()
        self.version = 0
        self._shape, self._runtime, self._config, self._temperature = shape, runtime, config, temperature
        self._layout = runtime.layout
        chunks = build_model(shape, runtime.layout, dtype, config.recompute, precision)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
            **fp8.ddp_settings(precision),
        )
        self._chunks = [
            DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for chunk in self._chunks:
            chunk.broadcast_params()
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        self._models = chunks
        self._optimizer = Optimizer(self._chunks, config, total_steps, distributed_optimizer, precision)
        self._rounded = precision.param_gather  # the model's weights are rounded to FP8, the optimizer's are not
        restore = self._optimizer.restore_weights if self._rounded else None
        self._reference = Reference(chunks, averaged_reference, restore)
        self._scales, self._alignment = fp8.Scales(chunks, precision), fp8.alignment(precision)

    # --- weights ---------------------------------------------------------------------------------------------------

    def load(self, source: hf_weights.WeightSource) -> None:
        """Take weights from a Hugging Face directory or any other source of named tensors."""
        hf_weights.load_hf(self._models, self._shape, self._layout, source)
        exact = None
        if self._rounded:
            found = hf_weights.read_local(self._models, self._shape, self._layout, source)
            exact = dict(zip(self._chunk_names(), found, strict=True))
        self._optimizer.reload(exact)

    def freeze_reference(self) -> None:
        """Keep a copy of the present weights, on CPU, as the reference."""
        self._reference.freeze()

    def update_reference(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * policy. Needs a policy made with `averaged_reference`."""
        self._reference.follow(decay)

    def hf_weights(self, which: Weights = "policy") -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, whole, on every rank, one after another."""
        with self._weights(which):
            yield from hf_weights.stream_hf(self._models, self._shape, self._layout)

    def _weights(self, which: Weights) -> contextlib.AbstractContextManager[None]:
        """The model with these weights."""
        return contextlib.nullcontext() if which == "policy" else self._reference.in_place()

    # --- score -----------------------------------------------------------------------------------------------------

    def score(
        self,
        batch: RolloutBatch,
        needs: frozenset[Signal] = frozenset(),
        which: Weights = "policy",
        top_k: int = 0,
    ) -> PolicyOutputs:
        """Log-probs [N, T] of the response tokens (and entropy, top-k where needed), on CPU, the same on every rank.

        In FP8, if that is what the policy trains in; FP8's scales are afterwards what they were (see `fp8`).
        """
        self._set_scales(batch)
        entropy, top_k = Signal.ENTROPY in needs, top_k if Signal.TOPK in needs else 0
        total = _empty_outputs(tuple(batch.response_mask.shape), entropy, top_k, self._runtime.device)

        def collect(outputs: PolicyOutputs, mb: _MicroBatch) -> tuple[Tensor, dict[str, Any]]:
            if self._layout.tp_rank == 0:  # all tensor-parallel ranks hold the same values
                _write(total, mb.rows, outputs)
            return outputs.logprobs.sum(), {}

        with self._weights(which), self._scales.kept(), torch.no_grad():
            self._pipeline(batch, collect, entropy, top_k, forward_only=True)
        if self._runtime.size > 1:
            for tensor in _tensors(total):  # each row was written by exactly one rank, the others hold zeros
                torch.distributed.all_reduce(tensor)
        return total.to("cpu")

    # --- train -----------------------------------------------------------------------------------------------------

    def train_step(
        self, batch: TrainBatch, loss: PolicyLoss, needs: frozenset[Signal] = frozenset(), top_k: int = 0
    ) -> StepReport:
        """One optimizer step on `sum(weights * loss)`. A non-finite loss or gradient leaves everything as it was."""
        self._set_scales(batch.rollouts)
        tally = Tally()

        def weigh(outputs: PolicyOutputs, mb: _MicroBatch) -> tuple[Tensor, dict[str, Any]]:
            assert isinstance(mb.batch, TrainBatch)
            token_loss = loss(outputs, mb.batch)
            value = (mb.batch.weights * token_loss.loss).sum()
            tally.add(value, token_loss, mb.batch)
            return value * mb.loss_scale, {}

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        lr = self._optimizer.lr
        entropy, top_k = Signal.ENTROPY in needs, top_k if Signal.TOPK in needs else 0
        self._pipeline(batch, weigh, entropy, top_k, forward_only=False)
        spokesman = self._layout.is_last_stage and self._layout.tp_rank == 0
        total = Tally.merge(self._runtime.gather(tally.packed() if spokesman else None))
        if total.bad_rows:
            return StepReport(total.loss, float("nan"), lr, f"non-finite loss: {total.bad_rows[0]}", total.means())
        norm, moved = self._optimizer.step()
        if not moved:
            found = [f"{name} on rank {rank}" for rank, name in enumerate(self._runtime.gather(self._bad())) if name]
            where = found[0] if found else "the norm overflowed"
            return StepReport(total.loss, norm, lr, f"non-finite gradient: {where}", total.means())
        self.version += 1
        return StepReport(total.loss, norm, lr, None, total.means())

    def _bad(self) -> str | None:
        """The first of this rank's weights whose gradient is not finite; a pipeline stage counts its layers from 0."""
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((name for name, weight in named if not bool(torch.isfinite(weight.main_grad).all())), None)

    def _set_scales(self, batch: RolloutBatch) -> None:
        """Give delayed scaling its first scales, from a few rows, before a log-prob is computed with it. Collective.

        It takes a scale from earlier passes, and from none takes 1, at which most weights round to nothing. Scales move
        when a pass with gradients ends, so this one has them, and discards them; those of gradients stay at 1 until
        the first backward pass has ended, so that the first micro-batch of a run counts for little.
        """
        if self._scales.unset:
            rows = tuple(range(min(len(batch), 8 * self._layout.data)))
            with torch.enable_grad():
                self._pipeline(batch.slice(rows), lambda outputs, _: (outputs.logprobs.sum(), {}), False, 0, True)

    # --- the pipeline ----------------------------------------------------------------------------------------------

    def _pipeline(
        self, batch: RolloutBatch | TrainBatch, finish: _Finish, entropy: bool, top_k: int, forward_only: bool
    ) -> None:
        """Run this rank's micro-batches through Megatron's schedule; `finish` sees the outputs on the last stage."""
        mine = self._micro_batches(batch)

        def forward(iterator: Iterator[_MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            mb = next(iterator)
            hidden = chunk(input_ids=mb.tokens, position_ids=mb.positions, attention_mask=None)
            return hidden, lambda last: finish(self._outputs(last, mb, entropy, top_k), mb)

        iterators = [iter(mine) for _ in self._chunks]
        for chunk in self._chunks:
            if chunk.training == forward_only:  # it walks through every module
                chunk.train(not forward_only)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(mine),
            seq_length=mine[0].tokens.shape[1],  # both are read from the tensors: variable_seq_lengths is set
            micro_batch_size=mine[0].tokens.shape[0],
            forward_only=forward_only,
        )

    def _micro_batches(self, batch: RolloutBatch | TrainBatch) -> list[_MicroBatch]:
        rollouts = batch.rollouts if isinstance(batch, TrainBatch) else batch
        layout = self._layout
        lengths = rollouts.lengths.tolist()
        interleaved = layout.virtual > 1
        if interleaved:  # its schedule wants micro-batches of one shape
            lengths = [max(lengths)] * len(lengths)
        multiple = layout.pipeline if interleaved else 1
        plan = microbatches.plan(lengths, self._config.micro_batch_tokens, layout.data, multiple)[layout.dp_rank]
        height = max(map(len, plan)) if interleaved else 1
        scale = float(len(plan) * layout.data)
        sides = (layout.tensor if layout.sequence else 1, self._alignment)
        build = partial(_micro_batch, batch, lengths, sides, scale, self._runtime.device)
        return [build(rows, max(height, len(rows))) for rows in plan]

    def _outputs(self, hidden: Tensor, mb: _MicroBatch, entropy: bool, top_k: int) -> PolicyOutputs:
        """[n, T] outputs from the last stage's hidden states [n, S, H]; only response positions meet the LM head."""
        rollouts = mb.rollouts
        mask, targets = rollouts.response_mask, rollouts.tokens[:, 1:]
        weight = head_weight(self._models[-1])
        found = target_outputs(
            hidden[:, : mask.shape[1]][mask].to(weight.dtype),
            weight,
            targets[mask],
            temperature=self._temperature,
            vocab_size=self._shape.vocab_size,
            chunk_tokens=self._config.logprob_chunk_tokens,
            group=self._layout.tensor_group,
            entropy=entropy,
            top_k=top_k,
        )
        spread = partial(_spread, mask=mask)
        return PolicyOutputs(
            logprobs=spread(found.logprobs),
            entropy=None if found.entropy is None else spread(found.entropy),
            topk=None if found.topk is None else TopK(spread(found.topk.ids), spread(found.topk.logprobs)),
        )

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """JSON values that identify the model and the layout."""
        layout = self._layout
        return {
            "model": self._shape.identity(),
            "layout": {
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "virtual": layout.virtual,
                "data": layout.data,
            },
        }

    def checkpoint_bytes(self) -> int:
        """Roughly what a checkpoint takes on disk: the weights, and float32 numbers for optimizer and average."""
        more = 16 if self._reference.averaged else 12
        parameters = (parameter for model in self._models for parameter in model.parameters())
        local = sum(parameter.numel() * (parameter.element_size() + more) for parameter in parameters)
        return local * self._layout.tensor * self._layout.pipeline

    def sharded_state_dict(self, loading: bool) -> dict[str, Any]:
        """Model and optimizer for megatron.core.dist_checkpointing."""
        metadata, names = dict(CHECKPOINT_METADATA), self._chunk_names()
        model = {
            name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, self._models, strict=True)
        }
        optimizer, reference = (
            self._optimizer.sharded_state_dict(model, loading),
            self._reference.sharded_state_dict(model, names),
        )
        return {**model, **optimizer, **reference, "version": self.version}

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, model in zip(self._chunk_names(), self._models, strict=True):
            model.load_state_dict(state[name])
        self._reference.load_state_dict(state, self._chunk_names())
        self._optimizer.load_state_dict(state)
        if self._rounded:
            self._optimizer.restore_weights()
        self.version = state["version"]

    def _chunk_names(self) -> list[str]:
        return ["model"] if len(self._models) == 1 else [f"model{index}" for index in range(len(self._models))]


@dataclass(frozen=True)
class _MicroBatch:
    """Rows that run together, and below them fillers: copies of a row, without response and of weight zero."""

    rows: tuple[int, ...]
    batch: RolloutBatch | TrainBatch  # rows and fillers, trimmed to the longest
    tokens: Tensor  # [n, T'] without the last, which predicts nothing; T' is T rounded up, see `fp8.padded`
    positions: Tensor  # [n, T']
    loss_scale: float

    @property
    def rollouts(self) -> RolloutBatch:
        return self.batch.rollouts if isinstance(self.batch, TrainBatch) else self.batch


_Finish = Callable[[PolicyOutputs, _MicroBatch], tuple[Tensor, dict[str, Any]]]


def _micro_batch(
    batch: RolloutBatch | TrainBatch,
    lengths: Sequence[int],
    sides: tuple[int, int],
    scale: float,
    device: torch.device,
    rows: tuple[int, ...],
    height: int,
) -> _MicroBatch:
    longest = max(1, *(lengths[row] - 1 for row in rows or (0,)))
    height, width = fp8.padded(height, longest, *sides)
    chosen = rows + (rows or (0,))[:1] * (height - len(rows))
    part = batch.slice(chosen).trim(longest).to(device)
    if len(rows) < height:
        part = _silence(part, len(rows))
    rollouts = part.rollouts if isinstance(part, TrainBatch) else part
    tokens = torch.nn.functional.pad(rollouts.tokens[:, :-1], (0, width - longest))
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    return _MicroBatch(rows, part, tokens, positions, scale)


def _silence(part: RolloutBatch | TrainBatch, first: int) -> RolloutBatch | TrainBatch:
    """`part` with its rows from `first` on made fillers."""
    real = (torch.arange(len(part.rollouts if isinstance(part, TrainBatch) else part)) < first).unsqueeze(1)
    if isinstance(part, TrainBatch):
        silent = _silence(part.rollouts, first)
        assert isinstance(silent, RolloutBatch)
        return replace(part, rollouts=silent, weights=part.weights * real.to(part.weights.device))
    return replace(part, response_mask=part.response_mask & real.to(part.response_mask.device))


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """[M, ...] values at the True places of mask [n, T], zeros elsewhere: [n, T, ...]. Differentiable."""
    return values.new_zeros(*mask.shape, *values.shape[1:]).index_put((mask,), values)


def _empty_outputs(shape: tuple[int, ...], entropy: bool, top_k: int, device: torch.device) -> PolicyOutputs:
    zeros = partial(torch.zeros, device=device, dtype=torch.float32)
    topk = TopK(zeros(*shape, top_k, dtype=torch.int64), zeros(*shape, top_k)) if top_k else None
    return PolicyOutputs(zeros(shape), zeros(shape) if entropy else None, topk)


def _tensors(outputs: PolicyOutputs) -> list[Tensor]:
    topk = [] if outputs.topk is None else [outputs.topk.ids, outputs.topk.logprobs]
    return [outputs.logprobs, *([] if outputs.entropy is None else [outputs.entropy]), *topk]


def _write(total: PolicyOutputs, rows: Sequence[int], part: PolicyOutputs) -> None:
    for whole, values in zip(_tensors(total), _tensors(part), strict=True):
        whole[list(rows), : values.shape[1]] = values[: len(rows)]
