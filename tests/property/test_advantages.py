"""Laws that advantages, masks, losses and reductions obey for any rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capo_megatron.algorithms import CapoConfig, DrGrpoConfig, GrpoConfig, SurrogateConfig, build
from capo_megatron.algorithms.equations import (
    capo_advantage,
    capo_noise_mask,
    clipped_surrogate,
    grpo_advantage,
    reduction_weights,
    sequence_logprob_mean,
)
from tests.rollouts import make_batch, signals

many = settings(max_examples=200, deadline=None)
NORMS = ("sum", "group", "opposite_mean", "pairs")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length")
IDS = (-7, 0, 2**40)  # any integers
# Float64 sums of at most 16 terms in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class Rows:
    """Responses of a few problems in any order, with ties."""

    mean: Tensor
    correct: Tensor
    group: Tensor

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.mean[rows], self.correct[rows], self.group[rows])


def sixteenths(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low * 16, high * 16).map(lambda value: value / 16)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    row = st.tuples(sixteenths(-4, 0), st.booleans(), st.sampled_from(IDS))
    mean, correct, group = zip(*draw(st.lists(row, min_size=1, max_size=16)), strict=True)
    return Rows(torch.tensor(mean, dtype=torch.float64), torch.tensor(correct), torch.tensor(group))


def permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


taus = st.sampled_from([0.05, 0.4, 0.6, 2.0])
norms = st.sampled_from(NORMS)
surrogates = st.sampled_from(["logistic", "linear"])
seeds = st.integers(0, 2**31)


@many
@given(rows(), taus, norms, surrogates, seeds)
def test_capo_advantages_follow_their_rows_and_need_only_their_group(r: Rows, tau, norm, surrogate, seed) -> None:
    got = capo_advantage(r.mean, r.correct, r.group, tau, surrogate, norm)
    order = permutation(len(got), seed)
    moved = r[order]
    torch.testing.assert_close(
        capo_advantage(moved.mean, moved.correct, moved.group, tau, surrogate, norm), got[order], **EXACT
    )
    for one in r.group.unique():
        own = r[r.group == one]
        alone = capo_advantage(own.mean, own.correct, own.group, tau, surrogate, norm)
        torch.testing.assert_close(alone, got[r.group == one], **EXACT)


@many
@given(rows(), sixteenths(-1, 1), seeds, st.booleans())
def test_grpo_advantages_follow_their_rows_and_need_only_their_group(r: Rows, shift, seed, scale) -> None:
    got = grpo_advantage(r.mean, r.group, scale_by_std=scale)
    order = permutation(len(got), seed)
    torch.testing.assert_close(grpo_advantage(r.mean[order], r.group[order], scale_by_std=scale), got[order], **EXACT)
    torch.testing.assert_close(grpo_advantage(r.mean + shift, r.group, scale_by_std=scale), got, **EXACT)
    for one in r.group.unique():
        own = r.group == one
        alone = grpo_advantage(r.mean[own], r.group[own], scale_by_std=scale)
        torch.testing.assert_close(alone, got[own], **EXACT)
        assert abs(got[own].sum()) < 1e-9
        if r.mean[own].min() == r.mean[own].max():
            assert got[own].abs().max() == 0


@many
@given(rows(), st.sampled_from([0.25, 3.0, 100.0]))
def test_scaling_rewards_scales_dr_grpo_and_leaves_grpo(r: Rows, factor) -> None:
    plain, scaled = (grpo_advantage(r.mean * c, r.group, scale_by_std=False) for c in (1.0, factor))
    torch.testing.assert_close(scaled, plain * factor, **EXACT)
    plain, scaled = (grpo_advantage(r.mean * c, r.group, eps=0.0) for c in (1.0, factor))
    torch.testing.assert_close(scaled, plain, **EXACT)


@many
@given(rows(), taus)
def test_capo_advantages_have_the_sign_of_the_verdict_sum_to_zero_and_are_bounded(r: Rows, tau) -> None:
    got = capo_advantage(r.mean, r.correct, r.group, tau)
    for one in r.group.unique():
        own = r[r.group == one]
        here = got[r.group == one]
        right, wrong = int(own.correct.sum()), int((~own.correct).sum())
        assert abs(here.sum()) < 1e-9
        if right and wrong:
            assert (here[own.correct] > 0).all() and (here[~own.correct] < 0).all()
            assert here[own.correct].max() <= wrong / tau and -here[~own.correct].min() <= right / tau
        else:
            assert here.abs().max() == 0


@many
@given(rows())
def test_the_linear_surrogate_over_the_group_is_dr_grpo(r: Rows) -> None:
    got = capo_advantage(r.mean, r.correct, r.group, surrogate="linear", norm="group")
    torch.testing.assert_close(got, grpo_advantage(r.correct.double(), r.group, scale_by_std=False), **EXACT)


@many
@given(rows(), taus, sixteenths(-8, 8), st.sampled_from([0.125, 4.0]))
def test_capo_sees_only_differences_relative_to_tau(r: Rows, tau, shift, factor) -> None:
    got = capo_advantage(r.mean, r.correct, r.group, tau)
    torch.testing.assert_close(capo_advantage(r.mean + shift, r.correct, r.group, tau), got, **EXACT)
    scaled = capo_advantage(r.mean * factor, r.correct, r.group, tau * factor)
    torch.testing.assert_close(scaled, got / factor, **EXACT)
    torch.testing.assert_close(capo_advantage(r.mean, r.correct, r.group, tau, inv_tau=False), got * tau, **EXACT)


@many
@given(rows(), norms, seeds)
def test_invalid_rows_are_as_if_absent(r: Rows, norm, seed) -> None:
    valid = torch.rand(len(r.mean), generator=torch.Generator().manual_seed(seed)) < 0.6
    got = capo_advantage(r.mean, r.correct, r.group, norm=norm, valid=valid)
    rest = r[valid]
    torch.testing.assert_close(got[valid], capo_advantage(rest.mean, rest.correct, rest.group, norm=norm), **EXACT)
    assert (got[~valid] == 0).all()


@many
@given(rows(), sixteenths(1, 9), sixteenths(1, 9), sixteenths(0, 2))
def test_wider_thresholds_keep_more(r: Rows, high, low, more) -> None:
    keep = capo_noise_mask(r.mean, r.correct, high, low)
    wider = capo_noise_mask(r.mean, r.correct, high + more, low / (1 + more))
    assert (wider | ~keep).all()
    assert torch.equal(keep, torch.where(r.correct, (-r.mean).exp() <= high, (-r.mean).exp() >= low))


# --- losses and reductions --------------------------------------------------------------------------------------------

tokens = st.tuples(sixteenths(-30, 0), sixteenths(-30, 0), sixteenths(-3, 3))


@many
@given(
    st.lists(tokens, min_size=1, max_size=16),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.2, 0.28]),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_clipped_loss_and_gradient_follow_the_formula(values, low, high, dual) -> None:
    logp, old, adv = (torch.tensor(column).double().unsqueeze(0) for column in zip(*values, strict=True))
    logp.requires_grad_()
    loss = clipped_surrogate(logp, old, adv, low, high, dual)
    loss.sum().backward()
    for index, (now, before, a) in enumerate(values):
        ratio = torch.tensor(min(max(now - before, -20.0), 20.0)).double().exp().item()
        active, want = -a * ratio, max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        moves = active == want and abs(now - before) <= 20
        if dual is not None and a < 0 and want > -a * dual:
            want, moves = -a * dual, False
        assert loss[0, index].item() == pytest.approx(want, rel=1e-12)
        assert logp.grad[0, index].item() == pytest.approx(active if moves else 0.0, rel=1e-12)


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=8).map(torch.tensor)


@many
@given(masks, st.sampled_from(MODES), seeds, st.integers(0, 3))
def test_reduction_weights_sum_to_what_they_promise_and_ignore_padding_and_order(mask, mode, seed, padding) -> None:
    weights = reduction_weights(mask.double(), mode, length=7)
    count = mask.sum(dim=1)
    answered = max(int((count > 0).sum()), 1)
    promised = {
        "token-mean": float(mask.any()),
        "seq-mean-token-mean": float(mask.any()),
        "seq-mean-token-sum": count.sum().item() / answered,
        "constant-length": count.sum().item() / (7 * len(mask)),
    }
    assert weights.sum().item() == pytest.approx(promised[mode])
    assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
    padded = torch.nn.functional.pad(mask, (0, padding))
    assert torch.equal(reduction_weights(padded.double(), mode, length=7)[:, :5], weights)
    order = permutation(len(mask), seed)
    torch.testing.assert_close(reduction_weights(mask[order].double(), mode, length=7), weights[order], **EXACT)


@many
@given(masks, seeds, st.integers(0, 3))
def test_mean_log_prob_ignores_padding_and_its_perplexity_is_at_least_one(mask, seed, padding) -> None:
    logp = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean, valid = sequence_logprob_mean(logp, mask)
    wide, same = sequence_logprob_mean(
        torch.nn.functional.pad(logp, (0, padding), value=float("nan")), torch.nn.functional.pad(mask, (0, padding))
    )
    torch.testing.assert_close(mean, wide, **EXACT)
    assert torch.equal(valid, same) and torch.equal(valid, mask.any(dim=1))
    assert ((-mean).exp() >= 1).all()


# --- whole algorithms -------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.booleans(),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        sixteenths(-3, 0),
        sixteenths(-3, 0),
    ),
    min_size=1,
    max_size=12,
)
configs = st.one_of(
    st.builds(
        CapoConfig,
        norm=norms,
        surrogate=surrogates,
        mask=st.sampled_from(["on", "off"]),
        mask_scope=st.sampled_from(["output", "pairs"]),
        truncated=st.sampled_from(["keep", "drop", "mask_loss"]),
    ),
    st.builds(
        GrpoConfig, truncated=st.sampled_from(["keep", "drop", "mask_loss"]), reduction=st.sampled_from(MODES[:3])
    ),
    st.builds(DrGrpoConfig, length=st.just(9), truncated=st.sampled_from(["keep", "drop", "mask_loss"])),
)


@many
@given(steps, configs, seeds)
def test_whole_steps_are_finite_and_neither_row_order_nor_padding_matters(
    values, config: SurrogateConfig, seed
) -> None:
    length, correct, group, gradable, truncated, old, ref = map(list, zip(*values, strict=True))
    batch = make_batch(length, correct, group, gradable=gradable, truncated=truncated)
    scored = signals(old, batch, ref)

    def outcome(rows: Tensor) -> tuple[Tensor, Tensor]:
        algorithm, part, seen = build(config), batch.slice(rows), scored.slice(rows)
        advantage = algorithm.estimator(part, seen)
        for mask in algorithm.masks:
            keep = mask(part, seen)
            assert keep.dtype == torch.bool and keep.shape == advantage.shape
            advantage = advantage * keep  # masks only remove
        return advantage, algorithm.reduction(part)

    advantage, weights = outcome(torch.arange(len(values)))
    order = permutation(len(values), seed)
    for got, moved in zip((advantage, weights), outcome(order), strict=True):
        assert got.isfinite().all() and (got[~batch.response_mask] == 0).all()
        torch.testing.assert_close(moved, got[order], rtol=1e-5, atol=1e-6)  # float32 sums in another order
    out = ~batch.gradable | (batch.truncated if config.truncated == "drop" else False)
    assert (advantage[out] == 0).all() and (weights[out] == 0).all()


@many
@given(steps, configs)
def test_advantages_carry_no_gradient(values, config: SurrogateConfig) -> None:
    length, correct, group, _, _, old, ref = map(list, zip(*values, strict=True))
    batch = make_batch(length, correct, group)
    scored = signals(old, batch, ref)
    scored.old_logprobs.requires_grad_()
    scored.ref_logprobs.requires_grad_()
    algorithm = build(config)
    advantage = algorithm.estimator(batch, scored)
    assert not advantage.requires_grad
    assert not any(mask(batch, scored).requires_grad for mask in algorithm.masks)
