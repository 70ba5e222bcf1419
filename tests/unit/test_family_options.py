"""Options that go with several algorithms, and CAPO's variants, on whole steps."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms import (
    CapoConfig,
    CdeConfig,
    GrpoConfig,
    build,
)
from capo_megatron.algorithms.equations import (
    capo_advantage,
    grpo_advantage,
    kl_penalty,
    sequence_logprob_mean,
)
from tests.family import PLAIN, advantages, current, uneven
from tests.rollouts import train_batch


def test_the_noise_mask_alone_zeroes_grpos_advantages_where_capo_would() -> None:
    batch, scored = uneven()
    masked, capo, plain = build(GrpoConfig(mask="on")), build(CapoConfig()), build(GrpoConfig())
    (mask,), (same,) = masked.masks, capo.masks
    keep = mask(batch, scored)
    assert torch.equal(keep, same(batch, scored)) and not keep.all()
    assert torch.equal(advantages(masked, batch, scored), plain.estimator(batch, scored) * keep)
    assert torch.equal(masked.reduction(batch), plain.reduction(batch))
    assert masked.report() == {"mask/ref_high": 2.5, "mask/ref_low": 1.05}


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_kl_in_the_reward_is_subtracted_before_groups_are_compared(kl: str) -> None:
    batch, scored = uneven()
    counted = batch.gradable
    penalty = 0.3 * (kl_penalty(scored.old_logprobs, scored.ref_logprobs, kl) * batch.response_mask).sum(dim=1)
    got = build(GrpoConfig(beta=0.3, kl=kl, kl_in="reward")).estimator(batch, scored)
    want = torch.zeros(len(batch))
    want[counted] = grpo_advantage((batch.rewards["reward"] - penalty)[counted], batch.group[counted])
    torch.testing.assert_close(got, want.unsqueeze(1) * batch.response_mask)
    pairs = build(CapoConfig(mask="off")).estimator(batch, scored)
    centred = torch.zeros(len(batch))
    centred[counted] = grpo_advantage(penalty[counted], batch.group[counted], scale_by_std=False)
    got = build(CapoConfig(mask="off", beta=0.3, kl=kl, kl_in="reward")).estimator(batch, scored)
    torch.testing.assert_close(got, pairs - centred.unsqueeze(1) * batch.response_mask)
    now = current(batch, scored)
    inside, without = (
        build(GrpoConfig(beta=beta, kl=kl, kl_in="reward")).loss(now, train_batch(batch, scored, got)).loss
        for beta in (0.3, 0.0)
    )
    assert torch.equal(inside, without)


@pytest.mark.parametrize("kind", PLAIN)
def test_the_kl_in_the_reward_is_logged_as_that_in_the_loss_is(kind: str) -> None:
    batch, scored = uneven()
    algorithm = build(replace(PLAIN[kind], beta=0.3, kl="k2", kl_in="reward"))
    advantages(algorithm, batch, scored)
    want = kl_penalty(scored.old_logprobs, scored.ref_logprobs, "k2")[batch.response_mask].mean()
    assert algorithm.report()["reward/reference_kl"] == pytest.approx(float(want))
    for without in (replace(PLAIN[kind], beta=0.3), replace(PLAIN[kind], beta=0.0, kl_in="reward")):
        algorithm = build(without)
        advantages(algorithm, batch, scored)
        assert "reward/reference_kl" not in algorithm.report()


@pytest.mark.parametrize("kind", PLAIN)
def test_importance_weights_multiply_any_policy_loss_and_leave_the_other_terms(kind: str) -> None:
    batch, scored = uneven()
    config = replace(PLAIN[kind], beta=0.0)
    weight = (scored.old_logprobs - batch.sampler_logprobs).exp().clamp(max=1.02)
    now = current(batch, scored)
    plain = build(config)
    part = train_batch(batch, scored, advantages(plain, batch, scored))
    capped = build(replace(config, importance_cap=1.02)).loss(now, part)
    torch.testing.assert_close(capped.loss, plain.loss(now, part).loss * weight)
    torch.testing.assert_close(capped.metrics["importance_weight"], weight)
    both = build(replace(config, importance_cap=1.02, beta=0.2)).loss(now, part).loss
    penalty = kl_penalty(now.logprobs, scored.ref_logprobs)
    torch.testing.assert_close(both, capped.loss + 0.2 * penalty)


@pytest.mark.parametrize("kind", PLAIN)
def test_importance_weights_of_responses_and_the_share_that_is_cut_off(kind: str) -> None:
    batch, scored = uneven()
    mask = batch.response_mask
    gap = ((scored.old_logprobs - batch.sampler_logprobs) * mask).sum(dim=1)
    cap = float(gap.exp().median()) + 1e-3
    config = replace(PLAIN[kind], beta=0.0)
    plain = build(config)
    part = train_batch(batch, scored, advantages(plain, batch, scored))
    now = current(batch, scored)
    algorithm = build(replace(config, importance_cap=cap, importance_level="sequence"))
    got = algorithm.loss(now, part)
    want = plain.loss(now, part).loss * gap.exp().clamp(max=cap).unsqueeze(1)
    torch.testing.assert_close(got.loss * mask, want * mask)
    clipped = got.metrics["importance_clip_share"]
    assert torch.equal(clipped[mask], (gap.exp() > cap).float().unsqueeze(1).expand_as(mask)[mask])
    assert 0 < clipped[mask].mean() < 1
    assert algorithm.corrects_sampler and not plain.corrects_sampler
    same = replace(batch, sampler_logprobs=scored.old_logprobs)
    equal = algorithm.loss(now, train_batch(same, scored, part.advantages))
    assert cap > 1 and torch.equal(equal.loss, plain.loss(now, part).loss)


@pytest.mark.parametrize("kind", PLAIN)
def test_responses_beyond_the_bound_train_nothing_and_stay_in_every_denominator(kind: str) -> None:
    batch, scored = uneven()
    gap = ((scored.old_logprobs - batch.sampler_logprobs) * batch.response_mask).sum(dim=1)
    bound = float(gap.abs().median().exp()) + 1e-4
    config = replace(PLAIN[kind], beta=0.1, entropy_coef=0.1)
    free, bounded = build(config), build(replace(config, importance_bound=bound))
    kept = gap.abs() <= math.log(bound)
    assert kept.any() and not kept.all() and bounded.report().get("importance/rejected") is None
    before, after = advantages(free, batch, scored), advantages(bounded, batch, scored)
    assert torch.equal(after, before * kept.unsqueeze(1))
    rejected = int((~kept & batch.gradable).sum())
    assert bounded.report()["importance/rejected"] == rejected
    assert bounded.report()["importance/rejected_share"] == pytest.approx(rejected / int(batch.gradable.sum()))
    assert torch.equal(bounded.reduction(batch), free.reduction(batch))
    now = current(batch, scored)
    theirs, ours = (a.loss(now, train_batch(batch, scored, before)).loss for a in (free, bounded))
    assert torch.equal(ours, torch.where(kept.unsqueeze(1), theirs, 0.0))


def test_capos_tau_follows_its_schedule_and_its_variants_reach_the_equation() -> None:
    batch, scored = uneven()
    mean, answered = sequence_logprob_mean(scored.old_logprobs, batch.response_mask)
    counted = answered & batch.gradable

    def want(tau: float, **options: object) -> Tensor:
        rows = capo_advantage(mean, batch.correct, batch.group, tau, valid=counted, **options)
        return rows.unsqueeze(1) * batch.response_mask

    algorithm = build(CapoConfig(tau=0.8, tau_schedule="linear", tau_end=0.2, tau_until=0.5))
    for progress, tau in ((0.0, 0.8), (0.25, 0.5), (0.5, 0.2), (0.9, 0.2)):
        got = algorithm.estimator(replace(batch, progress=progress), scored)
        torch.testing.assert_close(got, want(tau), rtol=1e-5, atol=1e-6)
        assert algorithm.report()["capo/tau"] == pytest.approx(tau)
    assert "capo/tau" not in build(CapoConfig()).report()
    for options in ({"weight_floor": 0.5}, {"norm": "mass", "mass_exponent": 0.5}, {"norm": "mass"}):
        got = build(CapoConfig(**options)).estimator(batch, scored)
        assert torch.equal(got, want(0.6, **options)) and not torch.equal(got, want(0.6))


def test_algorithms_that_follow_a_schedule_say_so() -> None:
    scheduled = {name for name, config in PLAIN.items() if build(config).scheduled}
    assert scheduled == {"cde"}
    assert build(CapoConfig(tau_schedule="cosine", tau_end=0.3)).scheduled
    assert not build(CdeConfig(omega_schedule="constant")).scheduled


def test_options_without_effect_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(CapoConfig(mask="off", ref_high=3.0, kl="k2"))
    assert "algorithm.kl=k2: without effect with beta=0." in caplog.text
    assert "algorithm.ref_high=3.0: without effect with mask=off." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build(CapoConfig(ref_high=3.0, kl="k1", beta=0.1))
        build(GrpoConfig(kl_in="reward", beta=0.1, scale_by_std=False))
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        build(GrpoConfig(kl_in="reward", beta=0.1))
    assert "such groups train as much as others" in caplog.text
