"""Megatron's optimizer: built from `TrainConfig`, stepped only on finite gradients, saved and resumed on any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from capo_megatron.config import PrecisionConfig, TrainConfig
from capo_megatron.mcore import fp8

# The distributed optimizer's default format is tied to its data-parallel sharding; this one is not.
CHECKPOINT_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Optimizer:
    """AdamW with Megatron's sharding, a learning-rate schedule, and a step that refuses non-finite gradients."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        config: TrainConfig,
        total_steps: int,
        distributed: bool,
        precision: PrecisionConfig,
    ) -> None:
        """`chunks` are DDP-wrapped; `total_steps` optimizer steps are expected in all (the schedule's length)."""
        dtype = next(chunks[0].parameters()).dtype
        self._chunks: list[Any] = list(chunks)
        self._clip = config.clip_grad
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                **fp8.optimizer_settings(precision),
            ),
            chunks,
        )
        self.schedule = _schedule(self.megatron, config, total_steps)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return next((group["lr"] for group in self.megatron.param_groups if group["params"]), self.schedule.max_lr)

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self) -> tuple[float, bool]:
        """(global gradient norm before clipping, whether the weights moved). A non-finite gradient moves nothing."""
        found_inf = self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if found_inf or not math.isfinite(norm):
            return norm, False
        if self._clip > 0:
            for part in self._parts():
                parameters = part.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, self._clip, norm)
        self.megatron.step_with_ready_grads()
        self.schedule.step(increment=1)
        return norm, True

    def reload(self, exact: dict[str, dict[str, torch.Tensor]] | None = None) -> None:
        """Take the model's weights as the new main weights, after they were changed from outside.

        `exact` holds them by chunk ("model", or "model0", ...) and name where those of the model have been rounded.
        """
        self.megatron.reload_model_params(exact)

    def restore_weights(self) -> None:
        """Make the model's weights from the main weights, bit for bit as the last step did. Collective."""
        for part in self._parts():
            if part.config.reuse_grad_buf_for_mxfp8_param_ag:
                part._copy_main_params_to_param_buffer()
            else:
                part._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync()

    def _parts(self) -> list[MegatronOptimizer]:
        chained = isinstance(self.megatron, ChainedOptimizer)
        return list(self.megatron.chained_optimizers) if chained else [self.megatron]

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def sharded_state_dict(self, model: Mapping[str, Any], loading: bool) -> dict[str, Any]:
        """Megatron's sharded state, ready for dist-checkpointing. Collective.

        Torch's Adam has no state before its first step, which Megatron's distributed optimizer neither saves nor loads,
        so the state is filled first.
        """
        for adam in self._torch_adams():
            _fill(adam)
        with _bucket_padding_kept(self._parts()):
            state = self.megatron.sharded_state_dict(model, is_loading=loading, metadata=CHECKPOINT_METADATA)
        return {"optimizer": state, "steps": self.schedule.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with _adam_steps_kept(self._parts()):
            self.megatron.load_state_dict(state["optimizer"])
        for adam in self._torch_adams():
            # The loader hands every parameter one shared counter: each optimizer step would then advance it once per
            # parameter, and Adam's bias correction would silently leave its path.
            for slot in adam.state.values():
                slot["step"] = torch.as_tensor(slot["step"], dtype=torch.float32).clone()
        for group in self.megatron.param_groups:  # a resumed run follows its config, e.g. when it is made longer
            group["max_lr"], group["min_lr"] = self.schedule.max_lr, self.schedule.min_lr
        self.schedule.num_steps = 0
        self.schedule.step(increment=state["steps"])

    def _torch_adams(self) -> Iterator[torch.optim.Optimizer]:
        for part in self._parts():
            inner = part.optimizer
            if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                yield inner


def _schedule(optimizer: MegatronOptimizer, config: TrainConfig, total_steps: int) -> OptimizerParamScheduler:
    warmup = config.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (warmup + 1),  # the first step already moves; a warm-up from 0 would waste it
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(config.lr_decay_steps or total_steps, warmup + 1),
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def _fill(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            slot = adam.state[parameter]
            if not slot:
                slot["step"] = torch.tensor(0.0)
                slot["exp_avg"] = torch.zeros_like(parameter)
                slot["exp_avg_sq"] = torch.zeros_like(parameter)


class _bucket_padding_kept:
    """While saving, keep the padding between buckets in the gathered optimizer state.

    Megatron gathers the state without that padding, but cuts each parameter out of it at its place in the padded
    buffer. Behind a bucket that is not full, such as that of a tied embedding on the last pipeline stage, every
    parameter would be saved with its neighbours' numbers.
    """

    def __init__(self, parts: list[MegatronOptimizer]) -> None:
        self._parts = [part for part in parts if isinstance(part, DistributedOptimizer)]

    def __enter__(self) -> None:
        for part in self._parts:
            part.get_parameter_state_dp_zero = partial(_padded_state, part)

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            del part.get_parameter_state_dp_zero


def _padded_state(part: DistributedOptimizer, **options: Any) -> dict[Any, Any] | None:
    state = DistributedOptimizer.get_parameter_state_dp_zero(part, **options)
    for index, buffer in enumerate(part.buffers if state else []):
        for tensors in state[index].values():
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    tensors[name] = _pad_buckets(value, buffer)
    return state


def _pad_buckets(values: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[buffer.numel] of the same values, each bucket at its place in the buffer."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    padded = values.new_zeros(buffer.numel)
    for bucket, part in zip(buffer.buckets, values.split(sizes), strict=True):
        padded[bucket.offset : bucket.offset + len(part)] = part
    return padded


class _adam_steps_kept:
    """While loading, pass each parameter's own `step` through the distributed optimizer's state setter.

    Megatron copies every key of torch Adam's state from the checkpoint's tensors, but stores `step` beside them: the
    copy would end in a KeyError.
    """

    def __init__(self, parts: list[MegatronOptimizer]) -> None:
        self._parts = [part for part in parts if isinstance(part, DistributedOptimizer)]

    def __enter__(self) -> None:
        for part in self._parts:
            part._set_main_param_and_optimizer_states = _with_step(part)

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            del part._set_main_param_and_optimizer_states


def _with_step(part: DistributedOptimizer) -> Any:
    original = part._set_main_param_and_optimizer_states

    def set_states(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        slot = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        extra = {"step": slot["step"]} if "step" in slot else {}
        original(model_param, {**tensors, **extra})

    return set_states
