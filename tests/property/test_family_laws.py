"""Laws that tie the algorithms of the family to each other, for any rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capo_megatron.algorithms import equations as eq

many = settings(max_examples=200, deadline=None)
IDS = (-7, 0, 2**40)  # any integers
WIDTH = 4
# Float64 sums of at most 48 terms in another order; z-scores divide them by at least the standard deviation's eps.
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def sixteenths(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low * 16, high * 16).map(lambda value: value / 16)


@dataclass(frozen=True)
class Rows:
    """Graded responses of a few problems in any order, with empty ones, ties and groups of one. Off the mask: NaN."""

    correct: Tensor  # [N]
    group: Tensor  # [N]
    stated: Tensor  # [N] confidence, or -1
    mask: Tensor  # [N, WIDTH]
    old: Tensor  # [N, WIDTH]
    now: Tensor  # [N, WIDTH]
    moved: Tensor  # [2, N, WIDTH]
    available: Tensor  # [2, N]

    def __getitem__(self, rows: Tensor) -> Rows:
        flat = (self.correct, self.group, self.stated, self.mask, self.old, self.now)
        return Rows(*(one[rows] for one in flat), self.moved[:, rows], self.available[:, rows])

    def padded(self) -> Rows:
        wide = (torch.nn.functional.pad(one, (0, 3), value=torch.nan) for one in (self.old, self.now, self.moved))
        mask = torch.nn.functional.pad(self.mask, (0, 3))
        return Rows(self.correct, self.group, self.stated, mask, *wide, self.available)

    @property
    def mean(self) -> Tensor:
        return eq.sequence_logprob_mean(self.old, self.mask)[0]

    @property
    def answered(self) -> Tensor:
        return self.mask.any(dim=1)

    @property
    def reward(self) -> Tensor:
        """+-0.1: constant where all are right, and not representable."""
        return torch.where(self.correct, 0.1, -0.1).double()


def build(kinds: Sequence[int], seed: int) -> Rows:
    """Each kind says a row's verdict, group and length; the seed all numbers, on grids coarse enough for ties."""
    kind, generator = torch.tensor(kinds), torch.Generator().manual_seed(seed)

    def pick(choices: Sequence[float], *shape: int) -> Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), shape, generator=generator)].double()

    mask = torch.arange(WIDTH) < (kind // 6).unsqueeze(1)
    logprobs = torch.where(mask, pick([-3.0, -1.25, -0.5, -0.4, -0.0625, 0.0], 4, *mask.shape), torch.nan)
    return Rows(
        correct=kind % 2 == 1,
        group=torch.tensor(IDS)[kind // 2 % 3],
        stated=pick([-1.0, 0.0, 0.1, 0.7, 1.0], len(kind)),
        mask=mask,
        old=logprobs[0],
        now=logprobs[1],
        moved=logprobs[2:],
        available=pick([0, 1, 1], 2, len(kind)) > 0,
    )


def rollouts() -> st.SearchStrategy[Rows]:
    kinds = st.lists(st.integers(0, 6 * (WIDTH + 1) - 1), min_size=1, max_size=12)
    return st.builds(build, kinds, st.integers(0, 2**31))


def dcpo_advantage(r: Rows, share: float, distance: eq.Distance) -> Tensor:
    reward = eq.dcpo_confidence_reward(r.stated, eq.dcpo_targets(r.correct.double(), r.group, share), distance)
    return eq.grpo_advantage(reward, r.group)


def simko(r: Rows, alpha: float = 0.3) -> Tensor:
    chosen = eq.simko_selected(-r.now, r.mask, 0.5)
    return eq.simko_ratio(r.now, r.old, torch.stack([r.now, r.old], 2), chosen, r.correct, alpha)


BY_ROW: dict[str, Callable[[Rows], Tensor]] = {
    "capo": lambda r: eq.capo_advantage(r.mean, r.correct, r.group, valid=r.answered),
    "capo floor": lambda r: eq.capo_advantage(r.mean, r.correct, r.group, valid=r.answered, weight_floor=0.4),
    "capo mass": lambda r: eq.capo_advantage(r.mean, r.correct, r.group, valid=r.answered, norm="mass"),
    "grpo": lambda r: eq.grpo_advantage(r.reward, r.group),
    "dapo keep": lambda r: eq.dapo_keep_group(r.correct, r.group),
    "dapo keep valid": lambda r: eq.dapo_keep_group(r.correct, r.group, r.answered),
    "dapo penalty": lambda r: eq.dapo_overlong_penalty(r.mask.sum(dim=1).double(), WIDTH, 3),
    "codapo": lambda r: eq.codapo_weight(r.mean, r.correct, r.group, valid=r.answered),
    "cde": lambda r: eq.grpo_advantage(eq.cde_shaped_reward(r.reward, r.mean, 1.0, valid=r.answered), r.group),
    "dcpo": lambda r: dcpo_advantage(r, 0.5, "abs"),
    "dcpo group": lambda r: dcpo_advantage(r, 1.0, "square"),
    "bound": lambda r: eq.within_importance_bound(r.old, r.now, 2.0, r.mask),
}
BY_TOKEN: dict[str, Callable[[Rows], Tensor]] = {
    "scapo": lambda r: eq.scapo_credit(r.old, r.moved, r.mask, r.group, available=r.available),
    "gspo": lambda r: eq.gspo_surrogate(r.now, r.old, r.stated.unsqueeze(1), r.mask, 0.2, 0.3),
    "simko selected": lambda r: eq.simko_selected(-r.now, r.mask, 0.6),
    "simko": simko,
    "sampler": lambda r: eq.importance_weight(r.old, r.now, 2.0, r.mask),
    "sampler sequence": lambda r: eq.importance_weight(r.old, r.now, 2.0, r.mask, "sequence"),
}


@pytest.mark.parametrize("name", [*BY_ROW, *BY_TOKEN])
@many
@given(r=rollouts(), seed=st.integers(0, 2**31))
def test_results_are_finite_follow_their_rows_need_only_their_group_and_ignore_padding(
    name: str, r: Rows, seed: int
) -> None:
    per_token = name in BY_TOKEN
    inner = (BY_TOKEN if per_token else BY_ROW)[name]

    def function(rows: Rows) -> Tensor:
        got = inner(rows)
        assert got[rows.mask].isfinite().all() if per_token else got.isfinite().all()
        return torch.where(rows.mask, got, 0) if per_token else got

    whole = function(r)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(function(r[order]), whole[order], **EXACT)
    wide = function(r.padded())
    torch.testing.assert_close(wide[:, :WIDTH] if per_token else wide, whole, **EXACT)
    for one in r.group.unique():
        torch.testing.assert_close(function(r[r.group == one]), whole[r.group == one], **EXACT)


@many
@given(rollouts(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.4, 1.0]))
def test_capos_variants_keep_its_signs_and_its_sum_of_zero(r: Rows, exponent, floor) -> None:
    got = eq.capo_advantage(
        r.mean, r.correct, r.group, norm="mass", inv_tau=False, weight_floor=floor, mass_exponent=exponent
    )
    for one in r.group.unique():
        here, right = got[r.group == one], r.correct[r.group == one]
        assert abs(here.sum()) < 1e-9
        mixed = right.any() and not right.all()
        assert (here[right] > 0).all() and (here[~right] < 0).all() if mixed else here.abs().max() == 0
        if exponent == 1:  # the whole weight of the linear surrogate
            assert here[right].sum().item() == pytest.approx(int(right.sum()) * int((~right).sum()))
    if exponent == 0:
        plain = eq.capo_advantage(r.mean, r.correct, r.group, inv_tau=False, weight_floor=floor)
        torch.testing.assert_close(got, plain, **EXACT)
    if floor == 1:
        linear = eq.capo_advantage(r.mean, r.correct, r.group, surrogate="linear")
        torch.testing.assert_close(got, linear, **EXACT)


@many
@given(rollouts(), st.floats(0.1, 9.0), st.floats(1.01, 9.0))
def test_an_engine_that_is_the_policy_changes_nothing_and_any_other_obeys_cap_and_bound(r: Rows, cap, bound) -> None:
    assert (eq.importance_weight(r.old, r.old, max(1.0, cap), r.mask, "sequence") == 1).all()
    assert (eq.importance_weight(r.old, r.old, max(1.0, cap), r.mask) == 1).all()
    assert eq.within_importance_bound(r.old, r.old, bound, r.mask).all()
    token, sequence = (eq.importance_weight(r.old, r.now, math.inf, r.mask, level) for level in ("token", "sequence"))
    whole = torch.where(r.mask, token, 1.0).log().sum(dim=1).clamp(-20, 20).exp()
    torch.testing.assert_close(sequence, torch.where(r.mask, whole.unsqueeze(1), 1.0))
    for level, free in (("token", token), ("sequence", sequence)):
        weight = eq.importance_weight(r.old, r.now, cap, r.mask, level)
        torch.testing.assert_close(weight[r.mask], free[r.mask].clamp(max=cap), **EXACT)
    kept, swapped = (eq.within_importance_bound(*pair, bound, r.mask) for pair in ((r.old, r.now), (r.now, r.old)))
    assert torch.equal(kept, swapped), "in either direction alike"
    clear = (whole.log().abs() - math.log(bound)).abs() > 1e-6
    assert torch.equal(kept[clear], ((whole < bound) & (whole > 1 / bound))[clear])


@many
@given(rollouts())
def test_codapo_without_confidence_and_with_offset_one_is_grpo(r: Rows) -> None:
    hopeless = torch.full_like(r.mean, -1e4)  # exp(-1e4) is 0
    weight = eq.codapo_weight(hopeless, r.correct, r.group, offset=1.0)
    base = eq.grpo_advantage(r.reward, r.group)
    assert torch.equal(weight * base, base)


@many
@given(rollouts(), sixteenths(0, 1))
def test_codapo_weighs_all_rows_of_a_group_alike_and_one_class_groups_by_the_offset(r: Rows, offset) -> None:
    weight = eq.codapo_weight(r.mean, r.correct, r.group, offset, r.answered)
    for one in r.group.unique():
        here, right = weight[r.group == one], r.correct[r.group == one]
        assert (here == here[0]).all() and offset <= here[0] <= 1 + offset
        if right.all() or not right.any():
            assert here[0] == offset


@many
@given(st.lists(sixteenths(0, 1), min_size=1, max_size=24), sixteenths(0, 1), st.integers(1, 5))
def test_codapo_refocuses_on_the_heaviest_groups_in_batch_order(weights: Sequence[float], percentile, repeat) -> None:
    weight = torch.tensor(weights, dtype=torch.float64)
    got = eq.codapo_select(weight, percentile, repeat)
    threshold = torch.quantile(weight, percentile)
    chosen = [index for index, value in enumerate(weights) if value >= threshold - 1e-12]
    cycle = [index for index in chosen for _ in range(repeat)]
    assert got.tolist() == (cycle * len(weights))[: len(weights)]
    assert got.dtype == torch.int64


@many
@given(rollouts())
def test_cde_without_its_bonus_is_grpo_and_with_it_no_sign_changes(r: Rows) -> None:
    shaped = eq.cde_shaped_reward(r.reward, r.mean, 0.0, valid=r.answered)
    assert torch.equal(shaped, r.reward)
    bonus = eq.cde_shaped_reward(r.reward, r.mean, 1.0, valid=r.answered)
    assert (bonus * r.reward > 0).all() and (bonus >= r.reward).all()
    assert torch.equal(bonus[~r.answered], r.reward[~r.answered])


@many
@given(rollouts())
def test_scapo_with_lambda_zero_is_grpo_and_its_credit_only_lowers(r: Rows) -> None:
    credit = BY_TOKEN["scapo"](r)
    base = eq.grpo_advantage(r.reward, r.group).unsqueeze(1)
    assert torch.equal(base + 0.0 * credit, base.expand_as(credit))
    assert (credit <= 0).all() and (credit[~r.mask] == 0).all() and (credit[~r.available.any(dim=0)] == 0).all()
    # Where every rewording leaves every token as it was, nothing is unstable.
    assert eq.scapo_credit(r.old, r.old.unsqueeze(0), r.mask, r.group).abs().max() == 0


@many
@given(rollouts(), sixteenths(0, 1), st.sampled_from(["abs", "square"]))
def test_dcpo_without_a_confidence_segment_is_grpo_on_correctness(r: Rows, share, distance) -> None:
    answer, stated = eq.grpo_advantage(r.correct.double(), r.group), dcpo_advantage(r, share, distance)
    segment = torch.zeros_like(r.mask)
    got = torch.where(segment, stated.unsqueeze(1), answer.unsqueeze(1))
    assert torch.equal(got, answer.unsqueeze(1).expand_as(got))
    target = eq.dcpo_targets(r.correct, r.group, share)
    assert ((target >= 0) & (target <= 1)).all()
    for one in r.group.unique():
        rows = r.group == one
        if r.stated[rows].unique().numel() == 1 and r.correct[rows].unique().numel() == 1:
            assert stated[rows].abs().max() == 0


def gradient(loss: Callable[[Tensor], Tensor], logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.nan_to_num(logprobs).requires_grad_()
    value = (weights * loss(logprobs)).sum()
    value.backward()
    return value.detach(), logprobs.grad


@many
@given(rollouts(), sixteenths(0, 1))
def test_simko_has_grpos_loss_for_any_alpha_and_its_gradient_for_alpha_zero(r: Rows, alpha) -> None:
    weights = eq.reduction_weights(r.mask.double(), "token-mean")
    adv, old = eq.grpo_advantage(r.reward, r.group).unsqueeze(1), torch.nan_to_num(r.old)
    chosen = eq.simko_selected(-r.now, r.mask, 0.5)

    def loss(share: float) -> Callable[[Tensor], Tensor]:
        def of(now: Tensor) -> Tensor:
            top = torch.stack([now * 0.9, now * 0.5], 2)
            return eq.clipped_ratio_loss(eq.simko_ratio(now, old, top, chosen, r.correct, share), adv)

        return of

    want = gradient(lambda now: eq.clipped_surrogate(now, old, adv), r.now, weights)
    assert gradient(loss(alpha), r.now, weights)[0] == want[0]
    torch.testing.assert_close(gradient(loss(0.0), r.now, weights), want, **EXACT)


@many
@given(rollouts())
def test_gspo_on_policy_is_grpo_with_the_mean_over_responses(r: Rows) -> None:
    weights = eq.reduction_weights(r.mask.double(), "seq-mean-token-mean")
    adv, old = eq.grpo_advantage(r.reward, r.group).unsqueeze(1), torch.nan_to_num(r.old)
    got = gradient(lambda now: eq.gspo_surrogate(now, old, adv, r.mask), r.old, weights)
    torch.testing.assert_close(got, gradient(lambda now: eq.clipped_surrogate(now, old, adv), r.old, weights), **EXACT)


@many
@given(rollouts(), st.sampled_from([(3e-4, 4e-4), (0.2, 0.28), (5.0, 50.0)]))
def test_gspo_loss_and_gradient_follow_the_formula_of_whole_responses(r: Rows, clip) -> None:
    weights = eq.reduction_weights(r.mask.double(), "seq-mean-token-mean")
    adv, old = eq.grpo_advantage(r.reward, r.group), torch.nan_to_num(r.old)
    got = gradient(lambda now: eq.gspo_surrogate(now, old, adv.unsqueeze(1), r.mask, *clip), r.now, weights)

    now = torch.nan_to_num(r.now).requires_grad_()
    length = r.mask.sum(dim=1)
    ratio = (((now - old) * r.mask).sum(dim=1) / length.clamp(min=1)).exp()
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip[0], 1 + clip[1]))
    total = loss[length > 0].sum() / max(int((length > 0).sum()), 1)
    total.backward()
    torch.testing.assert_close(got[0], total.detach(), **EXACT)
    inside = ((ratio - 1).abs() > 1e-12).unsqueeze(1)  # at a ratio of 1 torch.maximum halves the gradient between ties
    torch.testing.assert_close(got[1] * inside, now.grad * inside, **EXACT)


@many
@given(rollouts())
def test_dapo_without_penalty_and_clip_higher_is_token_mean_grpo(r: Rows) -> None:
    length = r.mask.sum(dim=1)
    penalty = eq.dapo_overlong_penalty(length, 2 * WIDTH, WIDTH)  # nobody reaches the buffer
    assert penalty.abs().max() == 0 and not penalty.signbit().any()
    assert torch.equal(r.reward + penalty, r.reward)
    mixed = eq.dapo_keep_group(r.correct, r.group)
    moving = eq.grpo_advantage(r.correct.double(), r.group) != 0
    assert torch.equal(mixed, moving)  # what the filter drops has no signal


@many
@given(rollouts())
def test_no_advantage_weight_or_reward_carries_a_gradient(r: Rows) -> None:
    for one in (r.old, r.now, r.moved, r.stated):
        one.requires_grad_()
    for name, function in (BY_ROW | BY_TOKEN).items():
        if name not in ("gspo", "simko"):
            assert not function(r).requires_grad, name
    loss = torch.where(r.mask, BY_TOKEN["gspo"](r), 0.0).sum() + torch.where(r.mask, simko(r), 0.0).sum()
    if r.mask.any():
        loss.backward()
        assert r.moved.grad is None and r.stated.grad is None
        assert r.now.grad[~r.mask].nan_to_num().abs().sum() == 0
