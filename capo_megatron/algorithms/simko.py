"""SimKO: spread the probability that correct answers gain over the top candidates of uncertain tokens.

"SimKO: Simple Pass@K Policy Optimization", arXiv 2510.14807. GRPO's advantages; in each response the tokens whose
entropy lies above the response's `quantile` are selected. There, under the current policy,

    correct response:  r~ = (1 - alpha) r + alpha mean over the top K of a stand-in for r whose gradient is theirs
    wrong response:    where the most likely token was sampled, its advantage is multiplied by top1_penalty

so that a correct answer lifts the K most likely tokens a little and not the sampled one alone, and a confident wrong
token is pushed down harder. r~ has r's value: losses and clips are GRPO's, only gradients differ.

The released code also keeps the old policy's top-K log-probs, which cancel out, and an entropy bonus whose gradient is
cut off; neither is here. Its entropies and top-K are those of the current policy, at the sampling temperature, over the
whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import present
from capo_megatron.algorithms.equations import ReductionMode, clipped_ratio_loss, simko_ratio, simko_selected
from capo_megatron.algorithms.grpo import GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import NamedReward
from capo_megatron.algorithms.surrogate import ClippedLoss, assemble, clipped_loss, require
from capo_megatron.seams import Algorithm, Signal
from capo_megatron.types import PolicyOutputs, TokenLoss, TrainBatch


@dataclass(frozen=True, kw_only=True)
class SimkoConfig(GroupConfig):
    """Options of SimKO."""

    kind: Literal["simko"] = "simko"
    reduction: ReductionMode = "token-mean"
    reward: str = "reward"  # which of the named rewards
    top_k: int = 3  # K
    alpha: float = 0.01  # share of a selected token's gradient that goes to the top K
    quantile: float = 0.8  # of a response's entropies; tokens above it are selected
    top1_penalty: float = 1.1  # factor on the advantage of a wrong response's selected most likely tokens


def build(config: SimkoConfig) -> Algorithm:
    """SimKO as configured. Raises ConfigError on options out of range."""
    require("ratio", config.ratio, config.ratio == "token", "SimKO's ratio is per token; choose gspo for sequences")
    require("top_k", config.top_k, config.top_k >= 1, "must be 1 or larger")
    require("alpha", config.alpha, 0 <= config.alpha <= 1, "must be from 0 to 1")
    require("quantile", config.quantile, 0 <= config.quantile <= 1, "must be from 0 to 1")
    require("top1_penalty", config.top1_penalty, config.top1_penalty >= 0, "must be 0 or larger")
    return assemble(
        config.kind,
        config,
        group_advantage(config, NamedReward(config.reward)),
        loss=SpreadLoss(clipped_loss(config), config.alpha, config.quantile, config.top1_penalty),
        loss_needs=frozenset({Signal.ENTROPY, Signal.TOPK}),
        top_k=config.top_k,
    )


@dataclass(frozen=True)
class SpreadLoss:
    """The clipped surrogate with `equations.simko_ratio`, as a PolicyLoss.

    Metrics beside those of `ClippedLoss`: `selected_share`, and `punished_share` (tokens under `top1_penalty`).
    """

    plain: ClippedLoss
    alpha: float = 0.01
    quantile: float = 0.8
    top1_penalty: float = 1.1

    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        rollouts, topk = mb.rollouts, now.topk
        # A broken policy's loss is not finite, and its step is skipped: no reason to end the run here.
        entropy = present(now.entropy, "PolicyOutputs.entropy").detach().nan_to_num()
        assert topk is not None, "the algorithm declared that it needs the top K"
        selected = simko_selected(entropy, rollouts.response_mask, self.quantile)
        punished = selected & self._confident_mistakes(mb, topk.ids)
        advantages = torch.where(punished, self.top1_penalty * mb.advantages, mb.advantages)
        ratio = simko_ratio(
            now.logprobs, mb.signals.old_logprobs, topk.logprobs, selected, rollouts.correct, self.alpha
        )
        plain = self.plain
        loss = clipped_ratio_loss(ratio, advantages, plain.clip_low, plain.clip_high, plain.dual_clip)
        found = {"selected_share": selected.to(loss.dtype), "punished_share": punished.to(loss.dtype)}
        return TokenLoss(loss, plain.metrics(now, mb) | found)

    def _confident_mistakes(self, mb: TrainBatch, top_ids: Tensor) -> Tensor:
        """[n, T] bool: the most likely token was sampled, in a response that the step pushes down."""
        pushed_down = mb.advantages.sum(dim=1, keepdim=True) < 0
        return pushed_down & (mb.rollouts.tokens[:, 1:] == top_ids[..., 0])
