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

There is no division by a standard deviation, and no fallback for groups of one class: they get 0, as under GRPO.

`logprob_source` says whose log-probs make l. "trainer": the policy that sampled, recomputed by the trainer. "engine":
the rollout engine's own, which drift from the trainer's by its numerics. Log-probs of the *current* policy (detached)
are not offered: pairs need a whole group at once, while a loss sees whatever rows a micro-batch or rank holds, so
results would depend on the layout. On the first optimizer step of a rollout they are the trainer's anyway.

All log-probs, the reference's too, are taken at the sampling temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations import (
    Norm,
    Surrogate,
    capo_advantage,
    capo_noise_mask,
    sequence_logprob_mean,
)
from capo_megatron.algorithms.surrogate import (
    SurrogateConfig,
    Truncated,
    assemble,
    broadcast,
    check_finite,
    counted_rows,
    present,
    require,
)
from capo_megatron.errors import CheckpointError
from capo_megatron.seams import Algorithm, Signal
from capo_megatron.types import RolloutBatch, Signals

Threshold = float | Literal["quartile"]


@dataclass(frozen=True, kw_only=True)
class CapoConfig(SurrogateConfig):
    """Options of CAPO."""

    kind: Literal["capo"] = "capo"
    tau: float = 0.6  # temperature of the pairwise surrogate; paper: 0.6 for 1.5B, 0.5 for 7B
    surrogate: Surrogate = "logistic"  # linear: every pair weighs 1, which is GRPO's (not AUC-consistent) surrogate
    norm: Norm = "sum"  # divide by: 1 | responses of the group | partners | pairs of the group
    inv_tau: bool = True  # keep the factor 1/tau of the exact derivative
    mask: Literal["on", "off"] = "on"  # off needs no reference pass
    mask_scope: Literal["output", "pairs"] = "output"
    ref_high: Threshold = 2.5  # largest reference perplexity of a correct answer; quartile: 75th percentile, see mask
    ref_low: Threshold = 1.05  # smallest reference perplexity of a wrong answer; quartile: 25th percentile
    logprob_source: Literal["trainer", "engine"] = "trainer"


def build(config: CapoConfig) -> Algorithm:
    """CAPO as configured. Raises ConfigError on options out of range."""
    require("tau", config.tau, 0 < config.tau < math.inf, "must be larger than 0 and finite")
    high, low = config.ref_high, config.ref_low
    require("ref_high", high, high == "quartile" or high >= 1, "must be a perplexity, 1 or larger, or 'quartile'")
    require("ref_low", low, low == "quartile" or low > 0, "must be a perplexity (at most 1 keeps all) or 'quartile'")
    if config.mask == "off":
        return assemble(config.kind, config, PairwiseAdvantage(config))
    mask = ReferencePerplexityMask(config.ref_high, config.ref_low, config.truncated)
    return assemble(
        config.kind,
        config,
        PairwiseAdvantage(config, mask if config.mask_scope == "pairs" else None),
        masks=(mask,),
        needs=frozenset({Signal.REF_LOGPROBS}),
        stateful={"reference_mask": mask},
        report=mask.report,
    )


@dataclass(frozen=True)
class PairwiseAdvantage:
    """`equations.capo_advantage` over the counted, non-empty rows; [N, T], other rows 0.0.

    With a `mask`, the rows it removes leave the pairs as well. norm="group" divides by all counted rows of the group,
    whether or not they are in a pair.
    """

    config: CapoConfig
    mask: ReferencePerplexityMask | None = None

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        mean, answered = self._logprob_mean(batch, signals)
        counted = counted_rows(batch, self.config.truncated)
        member = counted & answered
        if self.mask is not None:
            member = member & self.mask.rows(batch, signals)
        option = self.config
        per_group = option.norm == "group"
        norm: Norm = "sum" if per_group else option.norm
        advantage = capo_advantage(
            mean, batch.correct, batch.group, option.tau, option.surrogate, norm, option.inv_tau, member
        )
        if per_group:
            size = torch.bincount(batch.group[counted], minlength=len(batch.problems))
            advantage = advantage / size[batch.group].clamp(min=1)
        return broadcast(advantage, batch)

    def _logprob_mean(self, batch: RolloutBatch, signals: Signals) -> tuple[Tensor, Tensor]:
        engine = self.config.logprob_source == "engine"
        logprobs = batch.sampler_logprobs if engine else signals.old_logprobs
        check_finite(batch, "sampler_logprobs" if engine else "old_logprobs", logprobs, batch.response_mask)
        return sequence_logprob_mean(logprobs, batch.response_mask)


class ReferencePerplexityMask:
    """CAPO's noise mask (`equations.capo_noise_mask`) as a TokenMask with memory.

    A threshold is an absolute perplexity, or "quartile": estimated once, on the counted, non-empty responses of the
    first batch that has answers of its class, then frozen (75th percentile of the reference perplexity of correct
    answers for `high`, 25th of wrong ones for `low`, interpolated linearly). Until then that class is kept whole.
    Sees the batch of a whole step, the same on every rank, hence so are the thresholds.
    """

    def __init__(self, high: Threshold = 2.5, low: Threshold = 1.05, truncated: Truncated = "keep") -> None:
        self._given: dict[str, Threshold] = {"ref_high": high, "ref_low": low}
        self._known = {name: float(value) for name, value in self._given.items() if value != "quartile"}
        self._truncated = truncated

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        return self.rows(batch, signals).unsqueeze(1).expand_as(batch.response_mask)

    def rows(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N] bool: keep. Rows without a verdict or without tokens are kept; they train nothing anyway."""
        reference = present(signals.ref_logprobs, "Signals.ref_logprobs")
        check_finite(batch, "ref_logprobs", reference, batch.response_mask)
        mean, answered = sequence_logprob_mean(reference, batch.response_mask)
        judged = answered & counted_rows(batch, self._truncated)
        self._estimate(mean, batch.correct, judged)
        # A threshold that is still unknown removes nothing.
        high, low = self._known.get("ref_high", math.inf), self._known.get("ref_low", math.ulp(0.0))
        return capo_noise_mask(mean, batch.correct, high, low) | ~judged

    def _estimate(self, mean: Tensor, correct: Tensor, judged: Tensor) -> None:
        for name, rows, quantile in (("ref_high", judged & correct, 0.75), ("ref_low", judged & ~correct, 0.25)):
            if name not in self._known and rows.any():
                perplexity = (-mean[rows].double()).clamp(max=700.0).exp()
                self._known[name] = float(perplexity.quantile(quantile))

    def report(self) -> dict[str, float]:
        """The thresholds in force, for the log."""
        return {f"mask/{name}": value for name, value in self._known.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        """The estimated thresholds; configured ones belong to the config."""
        return {name: value for name, value in self._known.items() if self._given[name] == "quartile"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over estimated thresholds. A threshold that the config now gives as a number stays as given."""
        for name, value in state.items():
            if name not in self._given or not (isinstance(value, float | int) and value > 0):
                raise CheckpointError(f"algorithm state reference_mask.{name}={value!r}: expected a perplexity.")
            if self._given[name] == "quartile":
                self._known[name] = float(value)
