"""The reference weights of a policy: a copy in host memory, frozen or following the policy as a moving average."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from capo_megatron.mcore import fp8

_PREFIX = "reference."


class Reference:
    """The weights of one moment, which can take the model's place and give it back.

    With `averaged` they are kept in float32 (a step of an average is far below bfloat16's resolution) and belong into
    checkpoints; without, whoever resumes freezes the same weights again.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], averaged: bool, restore: Callable[[], None] | None = None
    ) -> None:
        """`restore` gives the model its own weights back where a copy of them could not: FP8 weights have scales."""
        self.averaged = averaged
        self._models = models
        self._restore = restore
        self._values: list[Tensor] = []

    def freeze(self) -> None:
        """Take the model's present weights."""
        dtype = torch.float32 if self.averaged else None
        self._values = [_host_copy(parameter, dtype) for parameter in self._parameters()]

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * model."""
        assert self.averaged, "a frozen reference does not move"
        for value, parameter in zip(self._values, self._parameters(), strict=True):
            value.lerp_(_host_copy(parameter, torch.float32), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the reference weights. Its own come back bit for bit."""
        if not self._values:
            raise RuntimeError("freeze_reference() has not been called")
        own = [] if self._restore else [_host_copy(parameter) for parameter in self._parameters()]
        self._fill(self._values)
        try:
            yield
        finally:
            self._restore() if self._restore else self._fill(own)

    def sharded_state_dict(self, state: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
        """The average as a model's sharded state, given that of the model; {} for a frozen reference."""
        if not self.averaged:
            return {}
        values = {id(parameter): value for parameter, value in zip(self._parameters(), self._values, strict=True)}
        return {_PREFIX + model: _sharded(state[model], values) for model in models}

    def load_state_dict(self, state: Mapping[str, Any], models: Sequence[str]) -> None:
        """Take back what `sharded_state_dict` described."""
        if not self.averaged:
            return
        values = iter(self._values)
        for name, model in zip(models, self._models, strict=True):
            for weight, _ in model.named_parameters():
                next(values).copy_(state[_PREFIX + name][weight])

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for model in self._models:
            yield from model.parameters()

    def _fill(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            fp8.assign(parameter, value)


def _sharded(model: Mapping[str, Any], values: Mapping[int, Tensor]) -> dict[str, Any]:
    found = {}
    for name, weight in model.items():
        if isinstance(weight, ShardedTensor | ShardedTensorFactory) and id(weight.data) in values:
            changes: dict[str, Any] = {"key": _PREFIX + weight.key, "data": values[id(weight.data)]}
            if isinstance(weight, ShardedTensor):
                changes["dtype"] = torch.float32
            found[name] = replace(weight, **changes)
    return found


@torch.no_grad()
def _host_copy(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in host memory, whatever device the parameter is on."""
    return fp8.plain(parameter.detach()).to("cpu", dtype, copy=True)
