"""The algorithm-blind numbers of a step, by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from capo_megatron.diagnostics import describe
from capo_megatron.types import Signals
from tests.rollouts import make_batch, signals, spread


def test_every_number_of_a_step_by_hand() -> None:
    # Group 0: two right, one wrong. Group 1: one wrong, one that nobody can judge. Group 2: one empty wrong answer.
    batch = make_batch(
        [2, 4, 2, 1, 3, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 2],
        reward=[1.0, 1.0, 0.0, -1.0, 9.0, 0.0],
        gradable=[1, 1, 1, 1, 0, 1],
        truncated=[0, 1, 0, 0, 0, 0],
    )
    old = [-0.2, -0.8, -0.5, -0.4, -9.0, 0.0]
    scored = signals(old, batch, [-math.log(value) for value in (1.5, 2.0, 3.0, 5.0, 99.0, 1.0)])
    kept = batch.response_mask.clone()
    kept[1] = False
    found = describe(batch, scored, spread([1.0, 1.0, -2.0, 0.0, 0.0, 0.0], batch), kept)
    assert found == pytest.approx(
        {
            "reward/mean": 0.2,
            "reward/accuracy": 0.4,
            "reward/gradable": 5 / 6,
            "response/length": 2.0,
            "response/length_max": 4.0,
            "response/truncated": 1 / 6,
            "calibration/auc_mean": 0.5,
            "calibration/valid_groups": 1.0,
            "calibration/logprob_correct": -0.5,
            "calibration/logprob_wrong": -0.45,
            "reference/ppl_correct_q25": 1.625,
            "reference/ppl_correct_q50": 1.75,
            "reference/ppl_correct_q75": 1.875,
            "reference/ppl_wrong_q25": 3.5,
            "reference/ppl_wrong_q50": 4.0,
            "reference/ppl_wrong_q75": 4.5,
            "mask/dropped_correct": 0.5,
            "mask/dropped_wrong": 0.0,
            "advantage/abs_mean": 0.5,  # (2 * 1 + 2 * 2) / 12: the masked row trains nothing
            "advantage/zero_groups": 2 / 3,
            # gaps of the twelve tokens: 0.2 0.2 0.8 0.8 0.8 0.8 0.5 0.5 0.4 9 9 9
            "engine/gap_median": math.exp(0.8),
            "engine/gap_p99": math.exp(9.0),
            "engine/gap_max": math.exp(9.0),
            "engine/above_2": 7 / 12,
        },
        rel=1e-5,
    )


def test_what_is_undefined_is_left_out_and_nothing_is_nan() -> None:
    batch = make_batch([0, 0], [0, 0], [0, 0], gradable=[0, 0])
    scored = Signals(torch.zeros(batch.response_mask.shape))
    found = describe(batch, scored, torch.zeros(batch.response_mask.shape), batch.response_mask)
    assert set(found) == {
        "reward/gradable",
        "response/length",
        "response/length_max",
        "response/truncated",
        "calibration/valid_groups",
        "advantage/zero_groups",
    }
    assert not any(math.isnan(value) for value in found.values())


def test_a_broken_engine_and_a_vast_reference_perplexity_stay_json_numbers() -> None:
    batch = make_batch([2, 2], [1, 0], [0, 0], sampler=torch.tensor([[0.0, math.nan, -math.inf, 0.0]] * 2))
    found = describe(batch, signals([-1.0, -2.0], batch, [-5000.0, -1.0]), torch.zeros(2, 4), batch.response_mask)
    assert found["engine/gap_median"] > 1e300
    assert found["reference/ppl_correct_q50"] > 1e300
    json.dumps(found, allow_nan=False)
