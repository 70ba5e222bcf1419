"""CAPO: calibration-aware policy optimisation.

"Calibration-Aware Policy Optimization", arXiv 2604.12632. Correct answers are pushed above the wrong answers of the
same problem in mean log-prob through an AUC-consistent pairwise surrogate, and answers whose verdict the frozen
reference model finds implausible are left out (noise mask):

    w_ij = (1/tau) sigmoid(-(l_i - l_j) / tau),  l = mean log-prob of a response, i correct, j wrong
    A_i = keep_i sum_j w_ij,   A_j = -keep_j sum_i w_ij,   the same for every token of the response
    keep = PPL_ref <= ref_high if correct, PPL_ref >= ref_low if wrong
    loss = PPO's clipped surrogate (clip 0.2, no KL)

The paper leaves these open; each has an option, the default first:

    inv_tau     true: the exact derivative | false
    norm        sum | group | opposite_mean | pairs. A constant factor hardly matters under Adam, one per group does
    mask_scope  output: a masked answer is still somebody's partner | pairs: it leaves the pairs, too
    reduction   seq-mean-token-mean, which fits the derivation | token-mean, verl's default | ...
    dual_clip   off | 3.0, verl's default
    ratio       token | sequence: GSPO's ratio, with clips of its size
    reference_decay  fixed reference | a moving average of the policy

Variants beyond the paper:

    surrogate      linear: w = 1, GRPO's surrogate, which is not AUC-consistent
    weight_floor   w = max(S, weight_floor), with S = sigmoid(...) in [0, 1]: well ordered pairs keep teaching
    norm: mass     w = S (n_correct n_wrong / sum S)^mass_exponent: at 1 a group teaches as much as under GRPO, however
                   well it is ordered
    tau_schedule   tau moves to tau_end while the run proceeds
    mask: off      no noise mask, no reference pass

There is no division by a standard deviation, and no fallback for groups of one class: they get 0, as under GRPO.

`logprob_source` says whose log-probs make l. "trainer": the policy that sampled, recomputed by the trainer. "engine":
the rollout engine's own, which drift from the trainer's by its numerics. Log-probs of the *current* policy (detached)
are not offered: pairs need a whole group at once, while a loss sees whatever rows a micro-batch or rank holds, so
results would depend on the layout. On the first optimizer step of a rollout they are the trainer's anyway.

All log-probs, the reference's too, are taken at the sampling temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import broadcast, check_finite, counted_rows
from capo_megatron.algorithms.equations import Norm, Surrogate, capo_advantage, sequence_logprob_mean
from capo_megatron.algorithms.noise_mask import ReferencePerplexityMask
from capo_megatron.algorithms.schedule import ScheduleKind, scheduled
from capo_megatron.algorithms.shaping import with_centred_penalty
from capo_megatron.algorithms.surrogate import SurrogateConfig, assemble, noise_mask, require
from capo_megatron.seams import Algorithm
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class CapoConfig(SurrogateConfig):
    """Options of CAPO."""

    kind: Literal["capo"] = "capo"
    tau: float = 0.6  # temperature of the pairwise surrogate; paper: 0.6 for 1.5B, 0.5 for 7B
    tau_schedule: ScheduleKind = "constant"
    tau_end: float | None = None  # where the schedule leads; needed unless it is constant
    tau_until: float = 1.0  # share of the run's steps after which it is there
    surrogate: Surrogate = "logistic"  # linear: every pair weighs 1, which is GRPO's (not AUC-consistent) surrogate
    norm: Norm = "sum"  # divide by: 1 | responses of the group | partners | pairs of the group; or mass, see above
    mass_exponent: float = 1.0  # of norm=mass
    weight_floor: float = 0.0  # smallest weight of a pair, before 1/tau
    inv_tau: bool = True  # keep the factor 1/tau of the exact derivative
    mask: Literal["on", "off"] = "on"  # off needs no reference pass
    mask_scope: Literal["output", "pairs"] = "output"
    logprob_source: Literal["trainer", "engine"] = "trainer"


def build(config: CapoConfig) -> Algorithm:
    """CAPO as configured. Raises ConfigError on options out of range."""
    for option, tau in (("tau", config.tau), ("tau_end", config.tau if config.tau_end is None else config.tau_end)):
        require(option, tau, 0 < tau < math.inf, "must be larger than 0 and finite")
    needed = config.tau_schedule == "constant" or config.tau_end is not None
    require("tau_end", config.tau_end, needed, f"tau_schedule={config.tau_schedule} needs to know where it leads")
    used = config.tau_schedule != "constant" or config.tau_end is None
    require("tau_end", config.tau_end, used, "not used by tau_schedule=constant; remove it or choose a schedule")
    require("tau_until", config.tau_until, 0 < config.tau_until <= 1, "must be above 0 and at most 1")
    require("weight_floor", config.weight_floor, 0 <= config.weight_floor <= 1, "must be from 0 to 1")
    require("mass_exponent", config.mass_exponent, 0 <= config.mass_exponent < math.inf, "must be 0 or larger")
    used = config.surrogate == "logistic" or config.weight_floor == 0
    require("weight_floor", config.weight_floor, used, f"not used by surrogate={config.surrogate}; remove it")
    used = config.norm == "mass" or config.mass_exponent == 1
    require("mass_exponent", config.mass_exponent, used, f"not used by norm={config.norm}; remove it or choose mass")
    mask = noise_mask(config)
    estimator = PairwiseAdvantage(config, mask if config.mask_scope == "pairs" else None)
    whole = with_centred_penalty(config, estimator)
    algorithm = assemble(config.kind, config, whole, noise=mask, report=estimator.report)
    return replace(algorithm, scheduled=config.tau_schedule != "constant")


@dataclass
class PairwiseAdvantage:
    """`equations.capo_advantage` over the counted, non-empty rows; [N, T], other rows 0.0.

    With a `mask`, the rows it removes leave the pairs as well. norm="group" divides by all counted rows of the group,
    whether or not they are in a pair.
    """

    config: CapoConfig
    mask: ReferencePerplexityMask | None = None
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        mean, answered = self._logprob_mean(batch, signals)
        counted = counted_rows(batch, self.config.truncated)
        member = counted & answered
        if self.mask is not None:
            member = member & self.mask.rows(batch, signals)
        option = self.config
        per_group = option.norm == "group"
        advantage = capo_advantage(
            mean,
            batch.correct,
            batch.group,
            self._tau(batch.progress),
            option.surrogate,
            "sum" if per_group else option.norm,
            option.inv_tau,
            member,
            option.weight_floor,
            option.mass_exponent,
        )
        if per_group:
            size = torch.bincount(batch.group[counted], minlength=len(batch.problems))
            advantage = advantage / size[batch.group].clamp(min=1)
        return broadcast(advantage, batch)

    def _tau(self, progress: float) -> float:
        option = self.config
        end = option.tau if option.tau_end is None else option.tau_end
        tau = scheduled(option.tau_schedule, option.tau, end, option.tau_until, progress)
        self._last = {} if option.tau_schedule == "constant" else {"capo/tau": tau}
        return tau

    def report(self) -> dict[str, float]:
        """tau of the last step, where it changes."""
        return self._last

    def _logprob_mean(self, batch: RolloutBatch, signals: Signals) -> tuple[Tensor, Tensor]:
        engine = self.config.logprob_source == "engine"
        logprobs = batch.sampler_logprobs if engine else signals.old_logprobs
        check_finite(batch, "sampler_logprobs" if engine else "old_logprobs", logprobs, batch.response_mask)
        return sequence_logprob_mean(logprobs, batch.response_mask)
