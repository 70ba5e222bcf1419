"""Shaped rewards and token credit against golden numbers, and their edge cases one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms.equations import (
    cde_shaped_reward,
    dapo_overlong_penalty,
    dcpo_confidence_reward,
    dcpo_targets,
    grpo_advantage,
    parse_confidence,
    scapo_credit,
    simko_selected,
)
from tests.golden.cases import CASES, assert_golden

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


# --- golden numbers -------------------------------------------------------------------------------------------------


@DTYPES
def test_overlong_penalties_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["dapo_overlong_and_filter"]
    length = torch.tensor(case["inputs"]["length"])
    assert_golden(dapo_overlong_penalty(length.to(dtype), 200, 50), case["expected"]["penalty"], case)
    assert_golden(dapo_overlong_penalty(length, 200, 50), case["expected"]["penalty"], case)


@DTYPES
def test_cde_rewards_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["cde_ppl_bonus_pm1"]
    reward, mean = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("reward", "lpm_old"))
    shaped = cde_shaped_reward(reward, mean, omega=1.0)
    assert_golden(shaped - reward, case["expected"]["bonus"], case)
    assert_golden(shaped, case["expected"]["shaped_reward"], case)
    assert_golden(grpo_advantage(shaped, torch.tensor(case["inputs"]["group"])), case["expected"]["advantage"], case)


@DTYPES
@pytest.mark.parametrize("distance", ["abs", "square"])
def test_dcpo_targets_rewards_and_advantages_agree_with_golden_numbers(distance: str, dtype: torch.dtype) -> None:
    case = CASES["dcpo_hybrid"]
    want = case["expected"]
    correct, confidence = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("accuracy", "confidence"))
    group = torch.tensor(case["inputs"]["group"])
    target = dcpo_targets(correct, group)
    assert_golden(target, want["target"], case)
    reward = dcpo_confidence_reward(confidence, target, distance)
    assert_golden(reward, want["conf_reward_abs" if distance == "abs" else "conf_reward_square_w05"], case)
    assert_golden(grpo_advantage(correct, group), want["adv_reason"], case)
    assert_golden(grpo_advantage(reward, group), want[f"adv_conf_{distance}"], case)


@DTYPES
def test_dcpo_token_advantages_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["dcpo_token_advantage"]
    given, group = case["inputs"], zeros(4)
    correct, confidence = (torch.tensor(given[key], dtype=dtype) for key in ("accuracy", "confidence"))
    stated = grpo_advantage(dcpo_confidence_reward(confidence, dcpo_targets(correct, group)), group)
    column = torch.arange(given["T"])
    start = torch.tensor([given["T"] if one is None else one for one in given["conf_start"]]).unsqueeze(1)
    got = torch.where(column < start, grpo_advantage(correct, group).unsqueeze(1), stated.unsqueeze(1))
    got = got * (column < torch.tensor(given["response_length"]).unsqueeze(1))
    assert_golden(got, case["expected"]["token_advantage"], case)


def test_stated_confidences_agree_with_the_recommended_golden_column() -> None:
    case = CASES["dcpo_parse_confidence"]
    got = [parse_confidence(text) for text in case["inputs"]["text"]]
    assert got == case["expected"]["confidence_recommended"]


@DTYPES
def test_scapo_advantages_agree_with_golden_numbers(dtype: torch.dtype) -> None:
    case = CASES["scapo_credit"]
    old, moved, reward = (
        torch.tensor(case["inputs"][k], dtype=dtype) for k in ("old_logp", "perturbed_logp", "reward")
    )
    mask = torch.tensor(case["inputs"]["mask"])
    credit = scapo_credit(old, moved, mask, zeros(2))
    assert_golden(credit[mask.bool()], np.minimum(case["expected"]["stability"], 0), case)
    base = grpo_advantage(reward, zeros(2))
    got = (base.unsqueeze(1) + case["params"]["lambda0"] * credit) * mask
    assert_golden(got, case["expected"]["token_advantage"], case)


# --- CDE --------------------------------------------------------------------------------------------------------------


def test_cde_gives_wrong_answers_of_reward_zero_and_rows_without_tokens_no_bonus() -> None:
    mean = torch.tensor([-0.1, -0.9, -0.9, math.nan], dtype=torch.float64)
    got = cde_shaped_reward(torch.tensor([1, 1, 0, 1]), mean, omega=0.5, valid=mean.isfinite())
    assert got.tolist() == pytest.approx([1.05, 1 + 0.5 / 3, 0.0, 1.0], rel=1e-14)


def test_cde_lets_all_wrong_groups_train_until_every_bonus_is_capped() -> None:
    wrong = torch.full((3,), -1.0)
    below = cde_shaped_reward(wrong, torch.tensor([-0.1, -0.2, -0.3]), omega=1.0)
    assert grpo_advantage(below, zeros(3)).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)
    capped = cde_shaped_reward(wrong, torch.tensor([-0.4, -0.5, -0.6]), omega=1.0)
    assert grpo_advantage(capped, zeros(3)).tolist() == [0.0, 0.0, 0.0]


# --- DCPO -------------------------------------------------------------------------------------------------------------


def test_dcpo_targets_of_either_kind_and_their_mean() -> None:
    correct, group = torch.tensor([1, 0, 0, 1]), torch.tensor([5, 5, 5, 2])
    shared = pytest.approx([1 / 3] * 3 + [1.0])
    assert dcpo_targets(correct, group, group_share=1.0).tolist() == shared
    assert dcpo_targets(correct, group, group_share=0.0).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert dcpo_targets(correct, group, group_share=0.3).tolist() == pytest.approx([0.8, 0.1, 0.1, 1.0])


def test_equal_confidences_in_one_class_groups_give_exactly_zero() -> None:
    for verdict in (0, 1):
        target = dcpo_targets(torch.full((7,), verdict), zeros(7), group_share=0.1)
        for distance in ("abs", "square"):
            reward = dcpo_confidence_reward(torch.full((7,), 0.7), target, distance)
            assert grpo_advantage(reward, zeros(7)).abs().max() == 0


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        ("CONFIDENCE: 0", 0.0),
        ("CONFIDENCE:0.95", 0.95),
        ("CONFIDENCE:   1.000  \r\n", 1.0),
        ("CONFIDENCE: 0.8\nAnd that is it.", 0.8),
        ("CONFIDENCE: 2 CONFIDENCE: 0.5", 0.5),
        ("CONFIDENCE: 0.5 CONFIDENCE:", None),
        ("CONFIDENCE: 0.5\nCONFIDENCE: high", None),
        ("CONFIDENCE: 1.01", None),
        ("CONFIDENCE: -0.5", None),
        ("CONFIDENCE: 0.9.1", None),
        ("CONFIDENCE: 0.9abc", None),
        ("CONFIDENCE: 90%", None),
        ("CONFIDENCE: 0.9%", None),
        ("CONFIDENCE: 0.7 or so", None),
        ("CONFIDENCE: .", None),
        ("CONFIDENCE: nan", None),
        ("CONFIDENCE: 1e-1", None),
        ("CONFIDENCE:\n0.9", None),
        ("CONFIDENCE: \u0660.\u0669", None),
        ("confidence: 0.9", None),
        ("", None),
    ],
)
def test_confidence_is_read_strictly(line: str, stated: float | None) -> None:
    assert parse_confidence("Thus \\boxed{4}\n" + line) == stated


# --- SimKO's tokens ---------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_selected_tokens_exceed_the_linear_quantile_of_their_own_response(quantile: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    entropy = torch.rand(40, 30, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(40, 30, generator=generator) < 0.6
    got = simko_selected(torch.where(mask, entropy, math.nan), mask, quantile)
    for row, keep, chosen in zip(entropy.numpy(), mask.numpy(), got.numpy(), strict=True):
        assert (chosen == (keep & (row > np.quantile(row[keep].astype(np.float64), quantile)))).all()


def test_constant_entropy_and_empty_responses_select_nothing() -> None:
    assert not simko_selected(torch.full((1, 7), 0.1), torch.ones(1, 7)).any()
    assert not simko_selected(torch.rand(2, 7), torch.zeros(2, 7)).any()
    ranked = torch.arange(21.0).unsqueeze(0)  # 0.55 * 20 is not 11 in binary, and 11 is not above the threshold
    assert simko_selected(ranked, torch.ones(1, 21), 0.55).sum() == 9


# --- SCAPO's credit ---------------------------------------------------------------------------------------------------


def plain_credit(old: Tensor, moved: Tensor, mask: Tensor, have: Tensor, eps: float = 1e-6) -> Tensor:
    """One group's credit, straight from the formula, with the probabilities themselves."""

    def z(value: Tensor, keep: Tensor) -> Tensor:
        return (value - value[keep].mean()) / (value[keep].std(correction=0) + eps)

    total, count = torch.zeros_like(old), torch.zeros(len(old), 1)
    for now, there in zip(moved, have, strict=True):
        keep = mask & there.unsqueeze(1)
        drift = (old.exp() - now.exp()).abs() / ((old.exp() + now.exp()) / 2)
        total += torch.where(keep, z(-drift, keep), 0.0)
        count += there.unsqueeze(1)
    keep = mask & (count > 0)
    return torch.where(keep, z(total / count.clamp(min=1), keep).clamp(max=0), 0.0)


def test_credit_follows_the_formula_with_lacking_perturbations_and_interleaved_groups() -> None:
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(6, 5, generator=generator, dtype=torch.float64)
    moved = old - torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.8
    group = torch.tensor([7, -2, 7, -2, 7, 4])
    have = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0]]).bool()
    nan = torch.where(mask & have.unsqueeze(2), moved, math.nan)
    got = scapo_credit(torch.where(mask, old, math.nan), nan, mask, group, available=have)
    for one in (7, -2):
        rows = group == one
        want = plain_credit(old[rows], moved[:, rows], mask[rows], have[:, rows])
        torch.testing.assert_close(got[rows], want)
        assert want.min() < -0.1
    assert got[5].abs().max() == 0


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_drifts_give_exactly_zero_whatever_the_log_probs_round_to(count: int, dtype: torch.dtype) -> None:
    old = -5 * torch.rand(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    shift = torch.tensor([0.1, -0.3, 0.0, 0.7])[:count].view(-1, 1, 1).to(dtype)
    assert scapo_credit(old, old + shift, torch.ones(4, 9), torch.tensor([0, 0, 1, 2])).abs().max() == 0


def test_drifts_that_cancel_over_the_perturbations_give_exactly_zero() -> None:
    old = torch.full((1, 2), -1.0)
    moved = torch.tensor([[[-1.0, -1.3]], [[-1.3, -1.0]]])
    assert scapo_credit(old, moved, torch.ones(1, 2), zeros(1)).tolist() == [[0.0, 0.0]]


def test_tiny_probabilities_do_not_overflow_and_drift_at_most_by_two() -> None:
    old, moved = torch.tensor([[-1.0, -1000.0, 0.0]]), torch.tensor([[[-1.0, -1.0, -800.0]]])
    # Drifts 0, 2, 2: z of (0, -2, -2) is (2, -1, -1) / sqrt(2), twice.
    want = pytest.approx([0.0, -(0.5**0.5), -(0.5**0.5)], rel=1e-5)
    assert scapo_credit(old, moved, torch.ones(1, 3), zeros(1)).tolist() == [want]


def test_one_class_groups_still_push_unstable_tokens_down() -> None:
    old = torch.tensor([[-0.1, -0.5], [-0.2, -0.4]])
    credit = scapo_credit(old, old - torch.tensor([[[0.0, 1.0], [0.0, 0.1]]]), torch.ones(2, 2), zeros(2))
    assert grpo_advantage(torch.ones(2), zeros(2)).tolist() == [0.0, 0.0]
    assert credit[0, 1] < -1 and (credit <= 0).all()
