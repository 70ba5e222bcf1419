"""SCAPO: push down tokens that another wording of the problem would have made less likely.

"Semifactual Credit-Augmented Policy Optimization", arXiv 2609.40360. With p_0 and p_k a token's probability, under the
policy that sampled it, after the problem and after its k-th perturbed wording:

    d_k = 2 tanh(|log p_0 - log p_k| / 2),   u = z(mean_k z(-d_k)),   z standardises over a group's tokens
    A[i, t] = GRPO's advantage + lambda min(u, 0)        lambda > 0 in the first `credit_steps` optimizer steps only

Advantages are made once per rollout: one that begins before `credit_steps` are over has lambda in all of its updates.
The number is thus rounded up to whole rollouts.
Groups of one verdict have no advantage but still this correction. The perturbed wordings come with the data
(`data.perturbations`, `data.perturbed_column`); a problem with fewer of them uses those it has, one with none gets no
correction. Each k costs a scoring pass while lambda is not 0.

The paper does not say which standard deviation z takes (here: over all tokens) nor its epsilon (1e-6).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import check_finite, counted_rows, present
from capo_megatron.algorithms.equations import ReductionMode, scapo_credit
from capo_megatron.algorithms.grpo import GroupAdvantage, GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import NamedReward
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.seams import Algorithm, Signal
from capo_megatron.types import RolloutBatch, Signals


@dataclass(frozen=True, kw_only=True)
class ScapoConfig(GroupConfig):
    """Options of SCAPO."""

    kind: Literal["scapo"] = "scapo"
    reduction: ReductionMode = "token-mean"
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    reward: str = "reward"  # which of the named rewards
    credit: float = 0.01  # lambda
    credit_steps: int = 120  # optimizer steps with a correction, up to whole rollouts (paper: 120 for 4B, 200 for 1.7B)


def build(config: ScapoConfig) -> Algorithm:
    """SCAPO as configured. Raises ConfigError on options out of range."""
    require("credit", config.credit, config.credit >= 0, "must be 0 or larger")
    require("credit_steps", config.credit_steps, config.credit_steps >= 0, "must be 0 or larger")
    estimator = CreditedAdvantage(config, group_advantage(config, NamedReward(config.reward)))
    needs = frozenset({Signal.PERTURBED} if config.credit and config.credit_steps else ())
    algorithm = assemble(config.kind, config, estimator, needs=needs, report=estimator.report)
    return replace(
        algorithm, idle=lambda batch: frozenset() if estimator.factor(batch) else frozenset({Signal.PERTURBED})
    )


@dataclass
class CreditedAdvantage:
    """GRPO's advantage plus lambda times `equations.scapo_credit`; [N, T], rows that do not count 0.0."""

    config: ScapoConfig
    advantage: GroupAdvantage
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        factor = self.factor(batch)
        self._last = {"scapo/lambda": factor}
        advantages = self.advantage(batch, signals)
        return advantages + factor * self._credit(batch, signals) if factor else advantages

    def factor(self, batch: RolloutBatch) -> float:
        """lambda for this batch."""
        return self.config.credit if batch.policy_version < self.config.credit_steps else 0.0

    def _credit(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        perturbed = present(signals.perturbed_logprobs, "Signals.perturbed_logprobs").permute(2, 0, 1)
        mask = batch.response_mask & counted_rows(batch, self.config.truncated).unsqueeze(1)
        # A wording that a problem lacks is NaN on all tokens. NaN on some is a fault, and infinity always.
        available = ~(perturbed.isnan() | ~batch.response_mask).all(dim=2)
        known = torch.where(available.unsqueeze(2), perturbed, 0.0)
        for k, logprobs in enumerate(known):
            check_finite(batch, f"perturbed_logprobs[{k}]", logprobs, mask)
        credit = scapo_credit(signals.old_logprobs, known, mask, batch.group, available=available)
        drift = (signals.old_logprobs - known).abs()[available.unsqueeze(2) & mask]
        self._last["scapo/credit"] = float(credit[mask].mean()) if mask.any() else 0.0
        self._last["scapo/drift"] = float(drift.mean()) if drift.numel() else 0.0
        return credit

    def report(self) -> dict[str, float]:
        """Of the last step: lambda, the mean correction, the mean drift |log p_0 - log p_k| in nats."""
        return self._last
