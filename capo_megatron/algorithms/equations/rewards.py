"""Shaped rewards: DAPO's length penalty, CDE's curiosity bonus, DCPO's reward of the stated confidence."""

from __future__ import annotations

import math
import re
from typing import Literal

import torch
from torch import Tensor

from capo_megatron.algorithms.equations.checks import (
    choice,
    finite_rows,
    flags,
    float_dtype,
    group_index,
    members,
    positive,
    real,
    same,
    within,
)
from capo_megatron.errors import ConfigError, ShapeError

CONFIDENCE_TAG = "CONFIDENCE:"  # what the prompt asks a response to end with, followed by a number from 0 to 1

Distance = Literal["abs", "square"]

_STATED_NUMBER = re.compile(r"[ \t]*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[ \t\r]*(?:\n|\Z)")


@torch.no_grad()
def dapo_overlong_penalty(length: Tensor, max_length: float, buffer: float, factor: float = 1.0) -> Tensor:
    """[N] penalties from -factor to 0 to add to the rewards: DAPO's soft overlong punishment (arXiv 2503.14476).

    `length` [N] response tokens. With n the length:

        0                                            n <= max_length - buffer
        -factor (n - (max_length - buffer)) / buffer
        -factor                                      n >= max_length

    Integer lengths give torch's default dtype.
    """
    positive("max_length", max_length)
    positive("buffer", buffer)
    if not math.isfinite(buffer):
        raise ConfigError(f"buffer={buffer}: must be finite.")
    if buffer > max_length:
        raise ConfigError(f"buffer={buffer}: must not be longer than max_length={max_length}.")
    if not (factor >= 0 and math.isfinite(factor)):
        raise ConfigError(f"factor={factor}: must be 0 or larger, and finite.")
    count = real("length", length, 1)
    finite_rows("length", count, torch.ones_like(count, dtype=torch.bool))
    excess = ((count - (max_length - buffer)) / buffer).clamp(0.0, 1.0)
    return (0.0 - excess * factor).to(float_dtype(length))


@torch.no_grad()
def cde_shaped_reward(
    reward: Tensor,
    logprob_mean: Tensor,
    omega: float,
    kappa: float = 3.0,
    alpha: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """[N] rewards with CDE's bonus for perplexity (curiosity-driven exploration, arXiv 2509.09675).

    `reward` [N], `logprob_mean` [N] mean log-prob per token in nats under the sampling policy:

        R + omega min(|R| / kappa, -alpha logprob_mean)

    GRPO's advantage of the result is CDE's. The bonus is capped by |R| / kappa as in the paper's text (its proof has
    kappa |R|), so that with kappa > 1 and omega <= 1 no reward changes its sign. The method is made for rewards of +-1:
    with 0/1 only correct answers can get a bonus. A group of equal rewards no longer has equal shaped ones, until all
    bonuses are capped. `valid` [N] False: no bonus (an empty response has no mean log-prob). Of the widest floating
    dtype among the two.
    """
    positive("kappa", kappa)
    for name, value in (("omega", omega), ("alpha", alpha)):
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name}={value}: must be 0 or larger, and finite.")
    earned, score = real("reward", reward, 1), real("logprob_mean", logprob_mean, 1)
    same("logprob_mean", logprob_mean, reward)
    earned = earned.to(score.dtype) if not reward.is_floating_point() else earned
    member = members(valid, score)
    finite_rows("reward", earned, torch.ones_like(member))
    finite_rows("logprob_mean", score, member, "Rows without a log-prob need valid=False.")
    bonus = torch.minimum(earned.abs() / kappa, torch.where(member, -alpha * score, 0.0))
    return (earned + omega * bonus).to(float_dtype(reward, logprob_mean))


@torch.no_grad()
def dcpo_targets(correct: Tensor, group: Tensor, group_share: float = 0.5) -> Tensor:
    """[N] confidences in [0, 1] that the responses should have stated (decoupled calibration, arXiv 2603.09117).

    `correct` [N], `group` [N] any integer id. With R = 1 for a correct answer and 0 for a wrong one:

        group_share * mean_g(R) + (1 - group_share) * R

    group_share=1 is the paper's DCPO-G, 0 its DCPO-I. A floating `correct` gives its dtype, any other torch's default.
    """
    within("group_share", group_share, 0.0, 1.0)
    like = real("correct", correct, 1)
    right, ids = flags("correct", correct, like).to(like.dtype), group_index(group, like)
    size = torch.bincount(ids)
    mean = right.new_zeros(size.shape).index_add(0, ids, right) / size
    return (right + group_share * (mean[ids] - right)).to(float_dtype(correct))


@torch.no_grad()
def dcpo_confidence_reward(
    confidence: Tensor, target: Tensor, distance: Distance = "abs", weight: float | None = None
) -> Tensor:
    """[N] rewards of the stated confidence: minus its distance from the target (DCPO, arXiv 2603.09117).

    `confidence` [N] as stated, from 0 to 1, or -1 where a response states none, which is then the farthest from any
    target; `target` [N] from `dcpo_targets`.

        abs      -weight |confidence - target|      the paper; weight 1
        square   -weight (confidence - target)^2    the released code; weight 0.5

    The weight hardly matters once the advantage divides by the standard deviation. Of the widest floating dtype among
    the two. Raises ShapeError for any other confidence, e.g. one in percent.
    """
    choice("distance", distance, Distance)
    weight = (1.0 if distance == "abs" else 0.5) if weight is None else weight
    positive("weight", weight)
    stated, wanted = real("confidence", confidence, 1), real("target", target, 1)
    same("target", target, confidence)
    every = torch.ones_like(stated, dtype=torch.bool)
    finite_rows("confidence", stated, every, "A response that states none has -1.")
    finite_rows("target", wanted, every)
    outside = (stated > 1) | ((stated < 0) & (stated != -1))
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ShapeError(f"confidence: {stated[row].item()} in row {row}; it must lie in [0, 1], or be -1 for none.")
    gap = stated - wanted
    return (-weight * (gap.abs() if distance == "abs" else gap.square())).to(float_dtype(confidence, target))


def parse_confidence(text: str) -> float | None:
    """The confidence in [0, 1] that a response states, or None if it does not state one in the form asked for.

    What counts is the last `CONFIDENCE:`: the rest of its line must be a plain decimal number from 0 to 1, such as
    `0.9`, `.25` or `1`. (The released code of DCPO, arXiv 2603.09117, reads the first, and any number that follows.)
    """
    _, tag, rest = text.rpartition(CONFIDENCE_TAG)
    number = _STATED_NUMBER.match(rest) if tag else None
    if number is None:
        return None
    stated = float(number[1])
    return stated if stated <= 1 else None
