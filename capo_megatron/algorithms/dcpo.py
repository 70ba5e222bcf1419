"""DCPO: answers are trained for being right, stated confidences for being honest, each token for one of the two.

"Decoupled Calibration Policy Optimization", arXiv 2603.09117 (not "Dynamic Clipping Policy Optimization", another
DCPO). The prompt asks for a last line `CONFIDENCE: <number from 0 to 1>`. With R 1 for a correct response and z the
confidence that it states:

    T_i = group_share mean_g(R) + (1 - group_share) R_i,   Rc_i = -|z_i - T_i|  or  -(z_i - T_i)^2
    A[i, t] = GRPO's advantage of R before the confidence line, that of Rc from its first token on

group_share 1 is the paper's DCPO-G, 0 its DCPO-I. A response that states none, or not a number from 0 to 1, has z = -1:
the distance is its punishment. Without the line, all its tokens are trained for being right.

This follows the paper. The released code gives the two advantages to the wrong segments (its reward manager and its
advantage function disagree about which is which), reads the first number that follows a tag, in whatever range, and
groups by blocks of eight. It multiplies the squared distance by 0.5, which the standard deviation cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.counted import counted_rows
from capo_megatron.algorithms.equations import (
    CONFIDENCE_TAG,
    Distance,
    ReductionMode,
    dcpo_confidence_reward,
    dcpo_targets,
    parse_confidence,
)
from capo_megatron.algorithms.grpo import GroupAdvantage, GroupConfig, group_advantage
from capo_megatron.algorithms.shaping import VerdictReward, with_centred_penalty
from capo_megatron.algorithms.surrogate import assemble, require
from capo_megatron.seams import Algorithm
from capo_megatron.types import Reading, RolloutBatch, Segment, Signals

INSTRUCTION = (
    "After the final answer, add one last line that says how sure you are that it is right, in exactly this form:\n"
    f"{CONFIDENCE_TAG} <number from 0 to 1>"
)
UNSTATED = -1.0  # the confidence of a response that states none


@dataclass(frozen=True, kw_only=True)
class DcpoConfig(GroupConfig):
    """Options of DCPO. Defaults of optimisation are those of its training script."""

    kind: Literal["dcpo"] = "dcpo"
    reduction: ReductionMode = "token-mean"
    clip_high: float = 0.28
    beta: float = 1e-3
    group_share: float = 0.5  # of the group's accuracy in a response's target; the rest is its own verdict
    distance: Distance = "abs"  # abs: the paper's; square: the released code's
    instruction: str = INSTRUCTION  # added to every problem; must ask for the line that is read


def build(config: DcpoConfig) -> Algorithm:
    """DCPO as configured. Raises ConfigError on options out of range."""
    require("group_share", config.group_share, 0 <= config.group_share <= 1, "must be from 0 to 1")
    asks = CONFIDENCE_TAG in config.instruction
    require("instruction", repr(config.instruction), asks, f"must ask for a line with {CONFIDENCE_TAG!r}")
    plain = replace(config, kl_in="loss")  # a penalty in the reward is added to all tokens alike, further below
    confidence = ConfidenceReward(config)
    estimator = SegmentAdvantage(
        answer=group_advantage(plain, VerdictReward("01")), confidence=group_advantage(plain, confidence)
    )
    whole = with_centred_penalty(config, estimator)
    algorithm = assemble(config.kind, config, whole, report=confidence.report)
    return replace(algorithm, instruction=config.instruction, read=read_confidence)


def read_confidence(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> Reading:
    """The stated "confidence" (`UNSTATED` without one), and the token where its line's tag begins.

    The place is found from the sampled ids: the last token from which on they still spell the whole tag. Encoding the
    text again could give other tokens. What stands before the tag is graded: a grader that compares the whole text
    would call an answer wrong for the line that was asked for.
    """
    stated = parse_confidence(text)
    values = {"confidence": UNSTATED if stated is None else stated}
    answer, tag, _ = text.rpartition(CONFIDENCE_TAG)
    if not tag:
        return Reading(values)
    answer = answer.rstrip()
    outside, inside, step = len(ids), len(ids), 8
    while inside > 0 and CONFIDENCE_TAG not in decode(ids[inside:]):
        outside, inside, step = inside, max(0, inside - step), 2 * step
    if CONFIDENCE_TAG not in decode(ids[inside:]):
        return Reading(values, answer=answer)  # the tag is in what `text` adds to its tokens
    while outside - inside > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if CONFIDENCE_TAG in decode(ids[middle:]) else (inside, middle)
    return Reading(values, {inside: Segment.CONFIDENCE}, answer)


@dataclass
class ConfidenceReward:
    """[N] how near the stated confidence is to its target; notes how well confidences are stated."""

    config: DcpoConfig
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        counted = counted_rows(batch, self.config.truncated)
        confidence = batch.rewards["confidence"]
        reward = torch.zeros_like(confidence)
        targets = dcpo_targets(batch.correct[counted].float(), batch.group[counted], self.config.group_share)
        reward[counted] = dcpo_confidence_reward(confidence[counted], targets, self.config.distance)
        self._note(confidence[counted], batch.correct[counted].float())
        return reward

    def _note(self, confidence: Tensor, correct: Tensor) -> None:
        stated = confidence >= 0
        self._last = {"dcpo/stated": float(stated.float().mean())} if len(stated) else {}
        if stated.any():
            self._last["dcpo/confidence"] = float(confidence[stated].mean())
            self._last["dcpo/brier"] = float((confidence[stated] - correct[stated]).square().mean())

    def report(self) -> dict[str, float]:
        """Of the last step: the share of responses that state a confidence, its mean, and its Brier score."""
        return self._last


@dataclass(frozen=True)
class SegmentAdvantage:
    """One advantage for the tokens of the confidence line, another for all others; [N, T]."""

    answer: GroupAdvantage
    confidence: GroupAdvantage

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        line = batch.segment == Segment.CONFIDENCE
        return torch.where(line, self.confidence(batch, signals), self.answer(batch, signals))
