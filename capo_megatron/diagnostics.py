"""The numbers logged every step that are true of any algorithm: rewards, lengths, calibration, masks, engine gap."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from capo_megatron.algorithms.equations import sequence_logprob_mean
from capo_megatron.evaluation.calibration import auc_by_question
from capo_megatron.types import RolloutBatch, Signals

EXP_LIMIT = 700.0  # nats; exp of more is infinite in float64


def describe(batch: RolloutBatch, signals: Signals, advantages: Tensor, kept: Tensor) -> dict[str, float]:
    """Name -> value of one step. What is undefined (no wrong answer, no reference, ...) is left out, never NaN.

    `advantages` [N, T] (masked or not: the masks are applied here), `kept` [N, T] bool is what the token masks keep.
    "answered" below means gradable with at least one response token. Log-probs are old ones, per token, in nats.

        reward/mean, reward/accuracy, reward/gradable     over gradable rows; gradable is their share
        response/length, response/length_max, response/truncated
        calibration/auc_mean, calibration/valid_groups    AUC of the mean log-prob in groups of both classes
        calibration/logprob_correct, calibration/logprob_wrong
        reference/ppl_{correct,wrong}_{q25,q50,q75}       perplexity of the answered rows under the reference model
        mask/dropped_correct, mask/dropped_wrong          mean share of an answered row's tokens that the masks remove
        advantage/abs_mean, advantage/zero_groups         over response tokens; share of groups that train nothing
        policy/entropy                                    of the sampling policy, per response token, in nats
        engine/gap_median, engine/gap_p99, engine/gap_max of exp |old - sampler log-prob| over response tokens,
            which with rollout.async_steps is what one step of training moved, too
        engine/above_2                                    share of the response tokens for which it is above 2

    Raises ShapeError if an old or reference log-prob of a response token is not finite.
    """
    mask = batch.response_mask
    mean, answered = sequence_logprob_mean(signals.old_logprobs, mask)
    answered = answered & batch.gradable
    classes = {"correct": answered & batch.correct, "wrong": answered & ~batch.correct}
    found = _rewards(batch) | _responses(batch) | _auc(mean, batch, answered)
    for name, rows in classes.items():
        found |= _mean(f"calibration/logprob_{name}", mean[rows])
    if signals.ref_logprobs is not None:
        found |= _reference(signals.ref_logprobs, mask, classes)
    dropped = (mask & ~kept).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    for name, rows in classes.items():
        found |= _mean(f"mask/dropped_{name}", dropped[rows])
    if signals.old_entropy is not None:
        found |= _mean("policy/entropy", signals.old_entropy[mask])
    return found | _advantages(batch, advantages, kept) | _engine_gap(batch, signals)


def _rewards(batch: RolloutBatch) -> dict[str, float]:
    rows = batch.gradable
    return {
        **_mean("reward/mean", batch.rewards["reward"][rows]),
        **_mean("reward/accuracy", batch.correct[rows]),
        **_mean("reward/gradable", rows),
    }


def _responses(batch: RolloutBatch) -> dict[str, float]:
    length = batch.response_mask.sum(dim=1)
    longest = {"response/length_max": float(length.max())} if len(length) else {}
    return _mean("response/length", length) | longest | _mean("response/truncated", batch.truncated)


def _auc(mean: Tensor, batch: RolloutBatch, answered: Tensor) -> dict[str, float]:
    columns = (mean[answered].cpu().numpy(), batch.correct[answered].cpu().numpy(), batch.group[answered].cpu().numpy())
    each = auc_by_question(*columns)
    valid = each[~np.isnan(each)]
    counted = {"calibration/valid_groups": float(len(valid))}
    return counted | ({"calibration/auc_mean": float(valid.mean())} if len(valid) else {})


def _reference(ref_logprobs: Tensor, mask: Tensor, classes: dict[str, Tensor]) -> dict[str, float]:
    surprise = -sequence_logprob_mean(ref_logprobs, mask)[0]
    found = {}
    for name, rows in classes.items():
        if rows.any():
            perplexity = np.exp(np.minimum(surprise[rows].double().cpu().numpy(), EXP_LIMIT))
            quartiles = np.quantile(perplexity, [0.25, 0.5, 0.75])
            for label, value in zip(("q25", "q50", "q75"), quartiles, strict=True):
                found[f"reference/ppl_{name}_{label}"] = float(value)
    return found


def _advantages(batch: RolloutBatch, advantages: Tensor, kept: Tensor) -> dict[str, float]:
    size = torch.where(batch.response_mask & kept, advantages, 0.0).abs()
    groups, index = torch.unique(batch.group, return_inverse=True)
    trains = torch.zeros(len(groups), dtype=torch.bool, device=size.device)
    trains[index[(size > 0).any(dim=1)]] = True
    return _mean("advantage/abs_mean", size[batch.response_mask]) | _mean("advantage/zero_groups", ~trains)


def _engine_gap(batch: RolloutBatch, signals: Signals) -> dict[str, float]:
    gap = (signals.old_logprobs - batch.sampler_logprobs)[batch.response_mask].abs().double().cpu().numpy()
    if not len(gap):
        return {}
    gap = np.nan_to_num(gap, nan=EXP_LIMIT, posinf=EXP_LIMIT)  # a broken engine must look broken
    median, tail, largest = np.exp(np.minimum(np.quantile(gap, [0.5, 0.99, 1.0]), EXP_LIMIT))
    return {
        "engine/gap_median": float(median),
        "engine/gap_p99": float(tail),
        "engine/gap_max": float(largest),
        "engine/above_2": float((gap > np.log(2.0)).mean()),
    }


def _mean(name: str, value: Tensor) -> dict[str, float]:
    return {name: float(value.double().mean())} if value.numel() else {}
