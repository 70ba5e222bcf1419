"""The maths of a step of CAPO in NeMo-Aligner 0.7.0, see `nemo_aligner.py`: plain tensors, no ranks. Legacy.

n rows of a data-parallel rank, N of all, T targets: column t of a `[n, T]` tensor speaks of predicting token t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from capo_megatron.adapters import CapoOptions, row_advantages
from capo_megatron.algorithms.equations import (
    ReductionMode,
    clipped_surrogate,
    grpo_advantage,
    importance_ratio,
    kl_penalty,
    reduction_weights,
)
from capo_megatron.errors import ConfigError


@dataclass(frozen=True)
class StepOptions:
    """`trainer.capo`: how advantages and weights are made. Raises ConfigError for a value out of range."""

    algorithm: Literal["capo", "grpo"] = "capo"
    options: CapoOptions = field(default_factory=CapoOptions)  # of capo; `correct_above` is used by both
    scale_by_std: bool = True  # of grpo; False is Dr.GRPO
    reduction: ReductionMode = "seq-mean-token-mean"
    length: int | None = None  # response budget in tokens, for reduction=constant-length

    def __post_init__(self) -> None:
        for name, value, literal in (
            ("algorithm", self.algorithm, Literal["capo", "grpo"]),
            ("reduction", self.reduction, ReductionMode),
        ):
            if value not in get_args(literal):
                raise ConfigError(f"trainer.capo.{name}={value!r}: choose one of {', '.join(get_args(literal))}.")
        if self.reduction == "constant-length" and not (self.length is not None and self.length > 0):
            raise ConfigError(f"trainer.capo.length={self.length}: constant-length needs the response budget.")

    @property
    def needs_reference(self) -> bool:
        """True if the log-probs of the initial policy are needed, for CAPO's noise mask."""
        return self.algorithm == "capo" and self.options.mask == "on"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepOptions:
        """Options from the mapping `trainer.capo`, CAPO's own under `options`. Raises ConfigError."""
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ConfigError(f"trainer.capo: unknown option {unknown[0]!r}. There are {known}.")
        inner = CapoOptions.of(values.get("options") or {}, "trainer.capo.options")
        return cls(**{**values, "options": inner})


@dataclass(frozen=True)
class Rows:
    """What advantages and weights are made of: one entry per response, [n] of one rank or [N] of all."""

    group: Tensor  # int64 prompt id
    mini_batch: Tensor  # int64, which optimizer step of the rollout the row belongs to
    tokens: Tensor  # int64 response length
    valid: Tensor  # bool: has tokens and a verdict
    reward: Tensor  # float32
    logprob_mean: Tensor  # float32, nats per token
    ref_logprob_mean: Tensor  # float32, nats per token; 0.0 without a reference

    def pack(self) -> Tensor:
        """[n, 7] float64 on the CPU, to be sent. Ids up to 2^53 and float32 values survive."""
        return torch.stack([value.double() for value in vars(self).values()], dim=1).cpu()

    @classmethod
    def unpack(cls, packed: Tensor) -> Rows:
        group, mini_batch, tokens, valid, *rest = packed.unbind(1)
        return cls(group.long(), mini_batch.long(), tokens.long(), valid.bool(), *[value.float() for value in rest])


def response_mask(logprobs: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """[n, T] bool: the target was sampled. Lengths [n] in tokens; a response length includes the prompt."""
    target = torch.arange(1, logprobs.shape[1] + 1, device=logprobs.device)
    return (target >= prompt_lengths.view(-1, 1)) & (target < response_lengths.view(-1, 1))


def advantages(options: StepOptions, rows: Rows) -> tuple[Tensor, Tensor]:
    """[N] float32 advantages of whole groups and [N] bool, which rows the noise mask keeps. Invalid rows get 0."""
    if options.algorithm == "capo":
        reference = rows.ref_logprob_mean if options.needs_reference else None
        return row_advantages(options.options, rows.logprob_mean, rows.valid, rows.reward, rows.group, reference)
    result = torch.zeros_like(rows.reward)
    valid = rows.valid
    result[valid] = grpo_advantage(rows.reward[valid], rows.group[valid], scale_by_std=options.scale_by_std)
    return result, torch.ones_like(valid)


def token_weights(options: StepOptions, rows: Rows) -> Tensor:
    """[N] float32: the weight of every token of a row in the loss of its mini-batch (`reduction_weights`)."""
    weights = torch.zeros_like(rows.reward)
    columns = torch.arange(max(int(rows.tokens.max()), 1))
    for index in rows.mini_batch.unique():
        member = rows.valid & (rows.mini_batch == index)
        mask = columns < rows.tokens[member].unsqueeze(1)
        weights[member] = reduction_weights(mask, options.reduction, options.length)[:, 0].float()
    return weights


def clipped_loss(
    logprobs: Tensor, batch: Mapping[str, Tensor], clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch, and [2]: share of clipped tokens and KL(sampling || current policy), weighted alike.

    `logprobs` [n, T] with gradient; `batch` has prev_logprobs and weights [n, T] and advantages [n, 1].
    """
    weights, advantage = batch["weights"], batch["advantages"]
    counted = weights > 0
    logprobs = torch.where(counted, logprobs.float(), 0.0)  # padding may hold infinities, and 0 * inf is NaN
    old = torch.where(counted, batch["prev_logprobs"].float(), 0.0)
    loss = (weights * clipped_surrogate(logprobs, old, advantage, clip_low, clip_high, dual_clip)).sum()
    with torch.no_grad():
        ratio = importance_ratio(logprobs, old)
        high, low = (ratio > 1 + clip_high) & (advantage > 0), (ratio < 1 - clip_low) & (advantage < 0)
        signs = torch.stack([(weights * (high | low)).sum(), (weights * kl_penalty(old, logprobs)).sum()])
    return loss, signs


def step_metrics(options: StepOptions, rows: Rows, advantage: Tensor, keep: Tensor) -> dict[str, float]:
    """Numbers worth logging of a step's rows. Mean log-probs of a class are left out where it has no answers."""
    counted = rows.valid.sum().clamp(min=1)
    ids = rows.group.unique(return_inverse=True)[1]
    trained = torch.zeros(int(ids.max()) + 1).index_add(0, ids, (advantage != 0).float()) > 0
    metrics = {
        "valid_share": rows.valid.float().mean().item(),
        "mask_kept_share": ((keep & rows.valid).sum() / counted).item(),
        "trained_group_share": trained.float().mean().item(),
        "advantage_abs": (advantage.abs().sum() / counted).item(),
    }
    correct = rows.reward > options.options.correct_above
    for name, member in (("correct", correct), ("wrong", ~correct)):
        if (member & rows.valid).any():
            metrics[f"logprob_mean_{name}"] = rows.logprob_mean[member & rows.valid].mean().item()
    return metrics
