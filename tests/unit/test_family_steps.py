"""Every algorithm on uneven steps: no NaN, no leak between groups, zero where nothing is to be learnt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms import ALGORITHMS, GrpoConfig, ScapoConfig, SurrogateConfig, build
from capo_megatron.errors import TrainingError
from capo_megatron.seams import Signal
from capo_megatron.types import PolicyOutputs, Segment, Signals, TrainBatch
from tests.family import PLAIN, VARIANTS, advantages, current, step, uneven, wider
from tests.rollouts import train_batch

EACH = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
EACH_KIND = pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
# Float32 sums in another order or of another width; advantages are of order 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
BY_REWARD = ("grpo", "dr_grpo", "gspo", "codapo", "simko", "scapo")  # the others read verdicts


def test_every_algorithm_is_among_those_tested() -> None:
    assert {config.kind for config in PLAIN.values()} == set(ALGORITHMS) == set(PLAIN)


# --- advantages and masks -------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("truncated", ["keep", "drop", "mask_loss"])
def test_uneven_groups_give_finite_numbers_and_zero_to_rows_that_do_not_count(
    config: SurrogateConfig, truncated: str
) -> None:
    algorithm = build(replace(config, truncated=truncated))
    batch, scored = uneven()
    got, weights = advantages(algorithm, batch, scored), algorithm.reduction(batch)
    for value in (got, weights):
        assert value.dtype == torch.float32 and value.shape == batch.response_mask.shape
        assert value.isfinite().all() and not value[~batch.response_mask].any()
    assert got.any() and weights.any()
    assert not got[12].any() and not weights[12].any()  # ungradable
    assert bool(got[1].any()) == (truncated != "drop") and bool(weights[1].any()) == (truncated == "keep")
    assert all(math.isfinite(value) for value in algorithm.report().values())


@EACH
def test_rows_may_come_in_any_order_by_groups_and_padded_wider(config: SurrogateConfig) -> None:
    batch, scored = uneven()
    want, weights = advantages(build(config), batch, scored), build(config).reduction(batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    moved, moved_scored = batch.slice(order), scored.slice(order)
    torch.testing.assert_close(advantages(build(config), moved, moved_scored), want[order], **CLOSE)
    torch.testing.assert_close(build(config).reduction(moved), weights[order], **CLOSE)
    for group in range(len(batch.problems)):
        rows = torch.nonzero(batch.group == group).flatten()
        alone = advantages(build(config), batch.slice(rows), scored.slice(rows))
        torch.testing.assert_close(alone, want[rows], **CLOSE)
    width = want.shape[1]
    wide, wide_scored = wider(batch), wider(scored)
    assert wide.response_mask.shape[1] == width + 3
    torch.testing.assert_close(advantages(build(config), wide, wide_scored)[:, :width], want, **CLOSE)
    assert not advantages(build(config), wide, wide_scored)[:, width:].any()
    torch.testing.assert_close(build(config).reduction(wide)[:, :width], weights, **CLOSE)


@EACH
def test_nothing_leaks_into_another_group(config: SurrogateConfig) -> None:
    batch, scored = uneven()
    here = batch.group == 4
    other, other_scored = uneven(seed=9)
    mixed = Signals(
        torch.where(here.unsqueeze(1), other_scored.old_logprobs, scored.old_logprobs),
        torch.where(here.unsqueeze(1), other_scored.ref_logprobs, scored.ref_logprobs),
        perturbed_logprobs=torch.where(here.view(-1, 1, 1), other_scored.perturbed_logprobs, scored.perturbed_logprobs),
    )
    flipped = {
        "correct": torch.where(here, 1 - batch.rewards["correct"], batch.rewards["correct"]),
        "reward": torch.where(here, 7.0, batch.rewards["reward"]),
        "confidence": torch.where(here, other.rewards["confidence"], batch.rewards["confidence"]),
    }
    want = advantages(build(config), batch, scored)
    got = advantages(build(config), replace(batch, rewards=flipped), mixed)
    assert torch.equal(got[~here], want[~here])
    assert not torch.equal(got[here], want[here])


@EACH
@pytest.mark.parametrize("reason", ["ungradable", "dropped"])
def test_rows_that_do_not_count_are_as_if_absent(config: SurrogateConfig, reason: str) -> None:
    flags = [0, 1, 0, 0, 0, 1, 0]
    marks = {"truncated": flags} if reason == "dropped" else {"gradable": [1 - flag for flag in flags]}
    batch, scored = step([2, 3, 1, 4, 2, 5, 0], [1, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1], **marks)
    config = replace(config, truncated="drop")
    rest = [0, 2, 3, 4, 6]
    without, without_scored = batch.slice(rest), scored.slice(rest)
    got, weights = advantages(build(config), batch, scored), build(config).reduction(batch)
    torch.testing.assert_close(got[rest], advantages(build(config), without, without_scored), **CLOSE)
    assert torch.equal(weights[rest], build(config).reduction(without))
    assert not got[[1, 5]].any() and not weights[[1, 5]].any()


@EACH
def test_truncated_responses_leave_what_the_option_says(config: SurrogateConfig) -> None:
    batch, scored = step([2, 3, 1, 5], [1, 0, 1, 0], [0] * 4, truncated=[0, 0, 0, 1])
    rest = slice(0, 3)
    without = advantages(build(config), batch.slice(rest), scored.slice(rest))
    for option in ("keep", "drop", "mask_loss"):
        algorithm = build(replace(config, truncated=option))
        got, weights = advantages(algorithm, batch, scored), algorithm.reduction(batch)
        statistics_differ = not torch.allclose(got[rest], without, **CLOSE)
        denominators_differ = not torch.equal(weights[rest], algorithm.reduction(batch.slice(rest)))
        assert statistics_differ == (option != "drop")
        mean_of_tokens = option == "mask_loss" and algorithm.reduction.mode == "token-mean"
        assert denominators_differ == (option != "drop" and not mean_of_tokens)
        assert bool(weights[3].any()) == (option == "keep")


def test_truncated_responses_out_of_the_loss_leave_a_mean_over_tokens_and_stay_in_one_over_responses() -> None:
    batch, _ = step([1, 1, 4], [1, 0, 0], [0] * 3, truncated=[0, 0, 1])
    for reduction, weight in (("token-mean", 1 / 2), ("seq-mean-token-mean", 1 / 3), ("seq-mean-token-sum", 1 / 3)):
        weights = build(GrpoConfig(truncated="mask_loss", reduction=reduction)).reduction(batch)
        assert weights.sum(dim=1).tolist() == pytest.approx([weight, weight, 0.0]), reduction
    weights = build(GrpoConfig(truncated="mask_loss", reduction="constant-length", length=10)).reduction(batch)
    assert weights.sum(dim=1).tolist() == pytest.approx([1 / 30, 1 / 30, 0.0])


@EACH_KIND
@pytest.mark.parametrize("right", [0, 1])
def test_groups_of_one_verdict_and_of_one_row_have_exactly_zero(config: SurrogateConfig, right: int) -> None:
    if config.kind == "scapo":
        config = replace(config, credit=0.0)
    if config.kind == "cde":
        config = replace(config, omega=0.0)
    lengths, group = [2, 2, 1, 0, 2, 0, 1], [0, 0, 0, 0, 0, 1, 2]
    batch, scored = step(lengths, [right] * 7, group, reward=[0.1] * 7, confidence=[0.3] * 7)
    assert not advantages(build(config), batch, scored).any()


@pytest.mark.parametrize("kind", BY_REWARD)
@pytest.mark.parametrize("constant", [0.1, -1 / 3, 1e8 + 0.1])
def test_constant_rewards_that_have_no_exact_float_give_exactly_zero(kind: str, constant: float) -> None:
    config = PLAIN[kind] if kind != "scapo" else ScapoConfig(credit=0.0)
    batch, scored = step([2, 3, 1, 4, 2, 2, 0], [1, 0, 1, 0, 1, 0, 1], [0] * 7, reward=[constant] * 7)
    assert not advantages(build(config), batch, scored).any()


@pytest.mark.parametrize("name", ["capo", "grpo", "dcpo"])
def test_a_constant_penalty_in_the_reward_changes_nothing(name: str) -> None:
    batch, scored = step([3] * 7, [1, 0, 1, 0, 1, 0, 1], [0] * 7)
    scored = replace(scored, ref_logprobs=scored.old_logprobs - 0.1 * batch.response_mask)
    plain = advantages(build(replace(PLAIN[name], beta=0.0)), batch, scored)
    penalised = advantages(build(replace(PLAIN[name], beta=0.3, kl="k1", kl_in="reward")), batch, scored)
    torch.testing.assert_close(penalised, plain, rtol=1e-5, atol=1e-5)
    one_verdict = replace(batch, rewards={**batch.rewards, "correct": torch.ones(7), "reward": torch.ones(7)})
    scored = replace(scored, old_logprobs=-0.5 * batch.response_mask, ref_logprobs=-0.6 * batch.response_mask)
    got = advantages(build(replace(PLAIN[name], beta=0.3, kl_in="reward")), one_verdict, scored)
    assert not got[batch.segment == Segment.REASONING].any()


@EACH
def test_a_step_in_which_nothing_counts_is_zero(config: SurrogateConfig) -> None:
    for batch, scored in (
        step([2, 3, 0], [0, 0, 0], [0, 0, 1], gradable=[0, 0, 0]),
        step([0, 0, 0], [1, 0, 1], [0, 0, 1]),
    ):
        algorithm = build(config)
        assert not advantages(algorithm, batch, scored).any() and not algorithm.reduction(batch).any()
        assert all(math.isfinite(value) for value in algorithm.report().values())


@EACH
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_non_finite_log_probs_name_problem_and_sample(config: SurrogateConfig, value: float) -> None:
    batch, scored = uneven()
    scored.old_logprobs[7, 1] = value
    kind = "NaN" if math.isnan(value) else value
    with pytest.raises(TrainingError, match=rf"old_logprobs: {kind} in sample 1 of problem 'problem-4'"):
        build(config).estimator(batch, scored)


@pytest.mark.parametrize("kind", BY_REWARD)
def test_a_reward_that_is_not_finite_is_named(kind: str) -> None:
    batch, scored = step([2] * 4, [1, 0, 1, 0], [0, 1, 1, 1], reward=[1.0, 0.0, 1.0, math.nan])
    with pytest.raises(TrainingError, match=r"reward: NaN in sample 2 of problem 'problem-1'"):
        build(PLAIN[kind]).estimator(batch, scored)


# --- losses and reductions ------------------------------------------------------------------------------------------


def loss_and_gradient(config: SurrogateConfig, whole: TrainBatch, now: PolicyOutputs, splits: list[Tensor]) -> Tensor:
    """[N, T] gradient of the mini-batch's loss, summed over these micro-batches, with the loss as one more column."""
    loss, total = build(config).loss, torch.zeros(())
    now.logprobs.grad = None
    for rows in splits:
        part = whole.slice(rows)
        share = (part.weights * loss(now.slice(rows), part).loss).sum()
        share.backward(retain_graph=True)
        total = total + share.detach()
    return torch.cat([now.logprobs.grad, total.expand(len(now.logprobs), 1)], dim=1)


@EACH
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "constant-length"])
def test_losses_do_not_depend_on_micro_batches_or_padding(config: SurrogateConfig, reduction: str) -> None:
    terms = {"entropy_coef": 0.01, "dual_clip": 3.0, "importance_cap": 2.0, "reduction": reduction}
    config = replace(config, **terms, length=9 if reduction == "constant-length" else None)
    config = replace(config, beta=config.beta or 0.1)
    batch, scored = uneven()
    algorithm, now = build(config), current(batch, scored)
    whole = train_batch(batch, scored, advantages(algorithm, batch, scored), algorithm.reduction(batch))
    want = loss_and_gradient(config, whole, now, [torch.arange(15)])
    assert want.isfinite().all() and want[:, :-1].any() and not want[:, :-1][~batch.response_mask].any()
    parts = list(torch.randperm(15, generator=torch.Generator().manual_seed(2)).split([1, 6, 8]))
    torch.testing.assert_close(loss_and_gradient(config, whole, now, parts), want, **CLOSE)
    wide, wide_now = wider(whole), wider(now)
    wide_now.logprobs.retain_grad()
    wide_loss = (wide.weights * build(config).loss(wide_now, wide).loss).sum()
    torch.testing.assert_close(wide_loss.detach(), want[0, -1], **CLOSE)


@EACH
@pytest.mark.parametrize("broken", ["logprobs", "entropy"])
def test_a_broken_policy_makes_the_loss_non_finite_and_raises_nothing(config: SurrogateConfig, broken: str) -> None:
    config = replace(config, entropy_coef=0.01)
    batch, scored = uneven()
    algorithm, now = build(config), current(batch, scored)
    bad = torch.where(batch.response_mask, math.nan, 0.0)
    now = replace(now, entropy=bad, logprobs=now.logprobs + bad if broken == "logprobs" else now.logprobs)
    whole = train_batch(batch, scored, advantages(algorithm, batch, scored), algorithm.reduction(batch))
    assert not (whole.weights * algorithm.loss(now, whole).loss).sum().isfinite()


@EACH_KIND
def test_needs_are_the_algorithms_own_and_those_of_the_options(config: SurrogateConfig) -> None:
    algorithm = build(replace(config, beta=0.0))
    assert algorithm.name == config.kind
    own = {"capo": {Signal.REF_LOGPROBS}, "scapo": {Signal.PERTURBED}}.get(config.kind, set())
    assert algorithm.needs == own
    own_in_loss = {Signal.ENTROPY, Signal.TOPK} if config.kind == "simko" else set()
    assert algorithm.loss_needs == own_in_loss
    assert algorithm.top_k == (3 if config.kind == "simko" else 0)
    extra = build(replace(config, beta=0.1, entropy_coef=0.1))
    assert extra.needs == own | {Signal.REF_LOGPROBS}
    assert extra.loss_needs == own_in_loss | {Signal.ENTROPY}
    assert build(replace(config, beta=0.0, mask="on")).needs == own | {Signal.REF_LOGPROBS}
