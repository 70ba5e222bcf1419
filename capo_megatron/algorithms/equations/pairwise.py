"""CAPO: advantages from pairs of a correct and a wrong answer, and the mask of implausible verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    within,
)
from capo_megatron.errors import ConfigError

PAIRS_AT_ONCE = 1 << 22  # pairs whose weights exist at one time: bounds the memory of `capo_advantage`

Surrogate = Literal["logistic", "linear"]
Norm = Literal["sum", "group", "opposite_mean", "pairs", "mass"]


@torch.no_grad()
def capo_advantage(
    logprob_mean: Tensor,
    correct: Tensor,
    group: Tensor,
    tau: float = 0.6,
    surrogate: Surrogate = "logistic",
    norm: Norm = "sum",
    inv_tau: bool = True,
    valid: Tensor | None = None,
    weight_floor: float = 0.0,
    mass_exponent: float = 1.0,
) -> Tensor:
    """[N] calibration-aware advantages from all (correct, wrong) pairs inside each group.

    `logprob_mean` [N] mean log-prob per token in nats; `correct` [N] (bool, or numbers of which > 0.5 is correct);
    `group` [N] any integer id, rows of a group anywhere; `valid` [N] False: as if the row were absent, its advantage
    is 0 (e.g. an empty response, which has no mean log-prob).

        w_ij = (1/tau) sigmoid(-(logprob_mean_i - logprob_mean_j) / tau)      i correct, j wrong
        A_i = + sum_j w_ij,   A_j = - sum_i w_ij                              (CAPO, arXiv 2604.12632)

    which is -d/dlogprob_mean of the pairwise loss sum_ij log(1 + exp(-(logprob_mean_i - logprob_mean_j) / tau)). A
    group's advantages sum to 0; a group of one class gets 0. `inv_tau=False` leaves the factor 1/tau out. The linear
    surrogate has w_ij = 1 whatever `tau`: with norm="group" it is Dr.GRPO's R - mean(R). `norm` divides by 1 (sum), G
    (group), the number of partners (opposite_mean), or n_correct * n_wrong (pairs), counting valid rows only.
    Memory does not grow with N^2: pairs are formed in blocks.

    Two variants beyond the paper, with S_ij the logistic weight without 1/tau (the factor is applied to what they
    make of S): `weight_floor` in [0, 1] puts max(S_ij, weight_floor) in the place of S_ij, so that pairs that are well
    ordered already keep their say. norm="mass" multiplies S_ij by (n_correct n_wrong / sum_ij S_ij)^mass_exponent: at 1
    a group's weights sum to those of the linear surrogate, however well it is ordered; at 0 it is "sum"; above 1 a
    group weighs the more, the better it is ordered.
    """
    _check_options(tau, surrogate, norm, weight_floor, mass_exponent)
    score = real("logprob_mean", logprob_mean, 1)
    right = flags("correct", correct, score)
    member = members(valid, score)
    ids = group_index(group, score)
    finite_rows("logprob_mean", score, member, "Rows without a log-prob need valid=False.")
    winners, losers = right & member, ~right & member
    groups = int(ids.max()) + 1 if len(ids) else 0
    n_right = torch.bincount(ids[winners], minlength=groups)[ids]
    n_wrong = torch.bincount(ids[losers], minlength=groups)[ids]
    if surrogate == "linear":
        total = torch.where(winners, n_wrong, torch.where(losers, -n_right, 0)).to(score.dtype)
    elif norm == "mass":
        total = _mass_sums(score, ids, winners, losers, tau, weight_floor, mass_exponent)
    else:
        total = _pair_sums(score, ids, winners, losers, lambda gap, _: torch.sigmoid(gap / tau).clamp(min=weight_floor))
    if surrogate == "logistic" and inv_tau:
        total = total / tau
    one = torch.ones_like(n_right)
    divisor = {
        "sum": one,
        "mass": one,
        "group": n_right + n_wrong,
        "opposite_mean": torch.where(right, n_wrong, n_right),
        "pairs": n_right * n_wrong,
    }[norm]
    return (total / divisor.clamp(min=1)).to(float_dtype(logprob_mean))


def _check_options(tau: float, surrogate: Surrogate, norm: Norm, weight_floor: float, mass_exponent: float) -> None:
    choice("surrogate", surrogate, Surrogate)
    choice("norm", norm, Norm)
    positive("tau", tau)
    if math.isinf(tau):
        raise ConfigError("tau=inf: must be finite; surrogate='linear' weighs all pairs alike.")
    within("weight_floor", weight_floor, 0.0, 1.0)
    if not (mass_exponent >= 0 and math.isfinite(mass_exponent)):
        raise ConfigError(f"mass_exponent={mass_exponent}: must be 0 or larger, and finite.")


def _mass_sums(
    score: Tensor, ids: Tensor, winners: Tensor, losers: Tensor, tau: float, floor: float, exponent: float
) -> Tensor:
    """[N] pair sums of S (n_right n_wrong / sum S)^exponent with S = max(sigmoid, floor).

    S is taken relative to the largest of its group, that of the lowest winner and the highest loser, so that a group
    in which all of them underflow has its limit instead of 0 / 0.
    """
    groups = int(ids.max()) + 1 if len(ids) else 0
    log_floor = math.log(floor) if floor > 0 else -math.inf
    lowest = score.new_full((groups,), math.inf).scatter_reduce(0, ids[winners], score[winners], "amin")
    highest = score.new_full((groups,), -math.inf).scatter_reduce(0, ids[losers], score[losers], "amax")
    peak = torch.nn.functional.logsigmoid((highest - lowest) / tau).clamp(min=log_floor)
    pairs = torch.bincount(ids[winners], minlength=groups) * torch.bincount(ids[losers], minlength=groups)
    peak = torch.where(pairs > 0, peak, 0.0)

    def relative(gap: Tensor, of: Tensor) -> Tensor:
        return (torch.nn.functional.logsigmoid(gap / tau).clamp(min=log_floor) - peak[of]).exp()

    total = _pair_sums(score, ids, winners, losers, relative)
    mass = torch.zeros_like(peak).index_add(0, ids[winners], total[winners])
    log_factor = peak * (1 - exponent) + exponent * torch.where(pairs > 0, pairs / mass, 1.0).log()
    # Above an exponent of 1 it has no bound: finite even so.
    return total * log_factor.clamp(max=math.log(torch.finfo(score.dtype).max) / 2).exp()[ids]


def _pair_sums(
    score: Tensor, ids: Tensor, winners: Tensor, losers: Tensor, weigh: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[N] sums of weigh(loser's score - winner's, group) over each row's partners: + for winners, - for losers."""
    wrong = losers.nonzero().squeeze(1)
    wrong = wrong[torch.argsort(ids[wrong], stable=True)]
    per_group = torch.bincount(ids[wrong], minlength=int(ids.max()) + 1 if len(ids) else 0)
    first_of_group = per_group.cumsum(0) - per_group
    right = winners.nonzero().squeeze(1)
    partners = per_group[ids[right]]
    blocks = torch.bincount(partners.cumsum(0) // PAIRS_AT_ONCE).tolist()
    total = torch.zeros_like(score)
    for rows, count in zip(right.split(blocks), partners.split(blocks), strict=True):
        left = rows.repeat_interleave(count)
        rank = torch.arange(len(left), device=score.device) - (count.cumsum(0) - count).repeat_interleave(count)
        other = wrong[first_of_group[ids[left]] + rank]
        weight = weigh(score[other] - score[left], ids[left])
        total.index_add_(0, left, weight)
        total.index_add_(0, other, weight, alpha=-1)
    return total


@torch.no_grad()
def capo_noise_mask(ref_logprob_mean: Tensor, correct: Tensor, ref_high: float = 2.5, ref_low: float = 1.05) -> Tensor:
    """[N] bool, True = keep: answers whose verdict the reference model does not find implausible.

    `ref_logprob_mean` [N] mean log-prob per token under the frozen reference model, `correct` [N]. With the reference
    perplexity PPL = exp(-ref_logprob_mean), keep a correct answer iff PPL <= ref_high and a wrong one iff
    PPL >= ref_low (CAPO's noise mask, arXiv 2604.12632). Compared as logarithms, so that PPL cannot overflow;
    perplexities that differ from a threshold by one rounding unit of the dtype count as equal, and equality keeps.
    """
    positive("ref_high", ref_high)
    positive("ref_low", ref_low)
    score = real("ref_logprob_mean", ref_logprob_mean, 1)
    right = flags("correct", correct, score)
    finite_rows("ref_logprob_mean", score, torch.ones_like(right))
    slack = torch.finfo(score.dtype).eps
    low_enough = -score <= math.log(ref_high) + slack
    high_enough = -score >= math.log(ref_low) - slack
    return torch.where(right, low_enough, high_enough)
