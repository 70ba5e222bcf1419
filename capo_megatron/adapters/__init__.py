"""CAPO inside trainers that people already run: one module per trainer, none of which is a dependency of this package.

    trl.py             TRL             a trainer class and its config
    nemo_rl.py         NeMo-RL         an advantage estimator and a loss, and `install` to name them in the config
    verl.py            verl            the advantage estimator "capo"
    slime.py           slime           a custom advantage function
    nemo_aligner*.py   NeMo-Aligner    trainer, actor, rollout batch, prompts, verifier (legacy)

All of them gather what CAPO needs, each in its trainer's way, and hand it to `row_advantages`: whole groups, the mean
log-prob of the policy that sampled, and the reference model's if the noise mask is on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from capo_megatron.algorithms.equations import Norm, Surrogate, capo_advantage, capo_noise_mask
from capo_megatron.errors import CapoError, ConfigError

Mask = Literal["on", "off"]
MaskScope = Literal["output", "pairs"]


class MissingTrainerError(CapoError, ImportError):
    """The trainer that an adapter is for is not installed."""


@dataclass(frozen=True, kw_only=True)
class CapoOptions:
    """Options of CAPO (arXiv 2604.12632) in another trainer. Raises ConfigError on values out of range."""

    tau: float = 0.6  # temperature of the pairwise surrogate
    surrogate: Surrogate = "logistic"  # linear: every pair weighs 1
    norm: Norm = "sum"  # divide by: 1 | valid responses of the group | partners | pairs of the group
    inv_tau: bool = True  # keep the factor 1/tau of the exact derivative
    mask: Mask = "on"  # the noise mask; off needs no reference model
    mask_scope: MaskScope = "output"  # pairs: a masked response leaves the pairs, too
    ref_high: float = 2.5  # largest reference perplexity of a correct answer
    ref_low: float = 1.05  # smallest reference perplexity of a wrong answer
    correct_above: float = 0.5  # a response whose reward is larger is correct

    def __post_init__(self) -> None:
        choices = {"surrogate": Surrogate, "norm": Norm, "mask": Mask, "mask_scope": MaskScope}
        for name, literal in choices.items():
            if vars(self)[name] not in get_args(literal):
                allowed = ", ".join(get_args(literal))
                raise ConfigError(f"{name}={vars(self)[name]!r}: unknown. Choose one of {allowed}.")
        for name in ("tau", "ref_high", "ref_low", "correct_above"):
            value = vars(self)[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name}={value!r}: must be a finite number.")
        if not self.tau > 0:
            raise ConfigError(f"tau={self.tau}: must be larger than 0.")
        if not (self.ref_high >= 1 and self.ref_low > 0):
            raise ConfigError(
                f"ref_high={self.ref_high}, ref_low={self.ref_low}: perplexities; ref_high must be 1 or larger, "
                "ref_low larger than 0."
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> CapoOptions:
        """Options from a mapping. A name that is none of them raises ConfigError, which starts with `where`."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"{where}: unknown option {unknown[0]!r}. CAPO has {', '.join(known)}.")
        return cls(**values)


@torch.no_grad()
def row_advantages(
    options: CapoOptions,
    logprob_mean: Tensor,
    valid: Tensor,
    reward: Tensor,
    group: Tensor,
    ref_logprob_mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[N] CAPO's advantages, masked, and [N] bool, which rows the noise mask keeps. Whole groups go in, on any device.

    `logprob_mean`, `ref_logprob_mean` [N] nats per token under the policy that sampled and the reference model; `valid`
    [N] False for rows without tokens or verdict, which get 0 and are nobody's partner; `reward` [N]; `group` [N]
    integer ids. Raises ConfigError if the noise mask is on and `ref_logprob_mean` is None.
    """
    correct = reward > options.correct_above
    keep = torch.ones_like(valid)
    if options.mask == "on":
        if ref_logprob_mean is None:
            raise ConfigError("mask='on': no reference log-probs were handed in. Pass them, or set mask='off'.")
        reference = torch.where(valid, ref_logprob_mean, 0.0)
        keep = capo_noise_mask(reference, correct, options.ref_high, options.ref_low) | ~valid
    member = valid & keep if options.mask_scope == "pairs" else valid
    advantage = capo_advantage(
        logprob_mean, correct, group, options.tau, options.surrogate, options.norm, options.inv_tau, member
    )
    return advantage * keep, keep


def require_version(package: str, tested: str, advice: str) -> None:
    """Raise unless `package` is installed in the minor version `tested` (e.g. 1.16.0); warn if the patch differs.

    MissingTrainerError if it is missing, ConfigError if it is another version.
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingTrainerError(f"{package} is not installed: {advice}") from error
    if found.split(".")[:2] != tested.split(".")[:2]:
        raise ConfigError(f"{package} {found} is installed, this adapter is for {tested}: {advice}")
    if found != tested:
        warnings.warn(f"{package} {found} is installed, this adapter was tested with {tested}.", stacklevel=2)
