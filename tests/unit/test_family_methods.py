"""What sets each algorithm apart, through the parts that the trainer calls."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capo_megatron.algorithms import (
    CdeConfig,
    CodapoConfig,
    DapoConfig,
    DcpoConfig,
    GrpoConfig,
    GspoConfig,
    ScapoConfig,
    SimkoConfig,
    build,
)
from capo_megatron.algorithms.equations import (
    codapo_select,
    grpo_advantage,
    gspo_surrogate,
    scapo_credit,
)
from capo_megatron.algorithms.schedule import scheduled
from capo_megatron.errors import CheckpointError, ShapeError, TrainingError
from capo_megatron.seams import Signal
from capo_megatron.types import PolicyOutputs, RolloutBatch, Segment, Signals, TopK
from tests.family import PLAIN, advantages, current, step, uneven
from tests.golden.cases import CASES, assert_golden
from tests.rollouts import make_batch, signals, spread, train_batch

FIRST = 1  # column of the first response token, after a prompt of two


def rows_of(value: Tensor, batch: RolloutBatch) -> list[float]:
    """The first response token's value of each row."""
    return value[:, FIRST].tolist()


def laid_out(values: list[list[float]], batch: RolloutBatch) -> Tensor:
    """Numbers of response tokens where the batch has them."""
    found = torch.zeros(batch.response_mask.shape)
    found[:, FIRST : FIRST + len(values[0])] = torch.tensor(values, dtype=torch.float32)
    return found


# --- GSPO -----------------------------------------------------------------------------------------------------------


def test_gspo_loss_and_gradient_are_those_of_the_golden_case() -> None:
    case = CASES["gspo_loss_wide_clip"]
    given, want = case["inputs"], case["expected"]
    batch = make_batch([3, 4, 1], [1, 0, 1], [0, 0, 0])
    adv = laid_out([[a * m for m in row] for a, row in zip(given["advantage_seq"], given["mask"], strict=True)], batch)
    algorithm = build(GspoConfig(clip_low=0.2, clip_high=0.2))
    logp = laid_out(given["logp"], batch).requires_grad_()
    part = train_batch(batch, Signals(laid_out(given["old_logp"], batch)), adv, algorithm.reduction(batch))
    token = algorithm.loss(PolicyOutputs(logp), part)
    loss = (part.weights * token.loss).sum()
    loss.backward()
    assert_golden(loss, want["loss"], case)
    assert_golden(logp.grad[:, FIRST : FIRST + 4], want["dloss_dlogp"], case)
    assert_golden(torch.tensor(rows_of(token.metrics["ratio_max"], batch)), want["seq_ratio"], case)
    assert rows_of(token.metrics["clip_share"], batch) == [0.0, 0.0, 0.0]


def test_what_makes_gspos_ratio_something_else_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for fine in (GspoConfig(), GrpoConfig(ratio="sequence", clip_low=3e-4, clip_high=4e-4), CdeConfig()):
        build(fine)
    assert not caplog.messages
    for _ in range(2):
        build(GspoConfig(reduction="token-mean"))
        build(GrpoConfig(ratio="sequence"))
    by_length, clips = caplog.messages
    assert by_length.startswith("algorithm.reduction=token-mean: with one ratio per response, only seq-mean-token-mean")
    assert clips.startswith("algorithm.clip_low=0.2, algorithm.clip_high=0.2: clips of a ratio per token.")


@pytest.mark.parametrize("kind", ["capo", "dcpo", "scapo", "cde"])
def test_any_estimator_may_train_on_the_sequence_ratio(kind: str) -> None:
    batch, scored = uneven()
    algorithm = build(replace(PLAIN[kind], ratio="sequence", beta=0.0, dual_clip=None, clip_low=3e-4, clip_high=4e-4))
    part = train_batch(batch, scored, advantages(algorithm, batch, scored))
    now = current(batch, scored)
    want = gspo_surrogate(now.logprobs, scored.old_logprobs, part.advantages, batch.response_mask)
    assert torch.equal(algorithm.loss(now, part).loss, want)


# --- DAPO -----------------------------------------------------------------------------------------------------------


def test_dapo_keeps_groups_by_the_verdicts_of_the_rows_that_count() -> None:
    def keeps(correct: list[int], config: DapoConfig | None = None, **marks: list[int]) -> bool:
        batch = make_batch([1, 5, 3], correct, [0, 0, 0], reward=[0.3, 0.5, 0.7], **marks)
        return build(config or DapoConfig(overlong_buffer=4, max_length=5)).keep_group(batch)

    assert keeps([1, 0, 1])
    assert not keeps([1, 1, 1]) and not keeps([0, 0, 0])  # although lengths and rewards differ
    assert not keeps([1, 0, 1], gradable=[1, 0, 1])
    assert keeps([1, 0, 1], truncated=[0, 1, 0])
    assert not keeps([1, 0, 1], DapoConfig(truncated="drop"), truncated=[0, 1, 0])
    assert not keeps([1, 0, 1], gradable=[0, 0, 0])
    assert build(DapoConfig(dynamic_sampling=False)).keep_group is None
    assert build(DapoConfig(max_refills=3)).max_refills == 3


def test_dapo_rewards_verdicts_and_punishes_length() -> None:
    case = CASES["dapo_overlong_and_filter"]
    lengths = case["inputs"]["length"]
    batch = make_batch(lengths, [1, 0, 1, 0, 1, 1, 0], [0] * 7)
    algorithm = build(DapoConfig(overlong_buffer=50, max_length=200))
    got = algorithm.estimator(batch, signals([-0.5] * 7, batch))
    shaped = torch.tensor([1.0, -1, 1, -1, 1, 1, -1]) + torch.tensor(case["expected"]["penalty"])
    torch.testing.assert_close(got[:, FIRST], grpo_advantage(shaped, batch.group))
    assert algorithm.report() == pytest.approx({"dapo/overlong_share": 4 / 7, "dapo/overlong_penalty": -2.2 / 7})
    binary = build(DapoConfig(reward_range="01")).estimator(batch, signals([-0.5] * 7, batch))
    torch.testing.assert_close(binary[:, FIRST], grpo_advantage(batch.rewards["correct"], batch.group))


# --- CoDaPO ---------------------------------------------------------------------------------------------------------


def codapo_batch() -> tuple[RolloutBatch, Signals]:
    given = CASES["codapo_weights_and_selection"]["inputs"]
    batch = make_batch([2] * 16, given["reward"], given["group"])
    return batch, signals(given["lpm_old"], batch)


def test_codapo_weighs_and_then_refocuses_every_other_step() -> None:
    case = CASES["codapo_weights_and_selection"]
    batch, scored = codapo_batch()
    algorithm = build(CodapoConfig())
    assert_golden(algorithm.estimator(batch, scored)[:, FIRST], case["expected"]["advantage"], case)
    weights = case["expected"]["group_weight"]
    want = {"codapo/weight": sum(weights) / 4, "codapo/weight_max": max(weights), "codapo/refocused": 0.0}
    assert algorithm.report() == pytest.approx(want, abs=1e-5)
    assert algorithm.reselect(batch, scored) == case["expected"]["refocused_batch_group_order"]
    assert algorithm.report()["codapo/refocused"] == 1.0
    assert algorithm.reselect(batch, scored) is None
    assert algorithm.reselect(batch, scored) == [0, 0, 0, 0]


def test_codapo_continues_in_the_phase_in_which_it_was_saved() -> None:
    batch, scored = codapo_batch()
    algorithm, resumed = build(CodapoConfig()), build(CodapoConfig())
    for again in (True, False):
        selected = algorithm.reselect(batch, scored)
        assert (selected is not None) == again
        resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
        assert resumed.report()["codapo/refocused"] == float(again)
    assert resumed.reselect(batch, scored) == [0, 0, 0, 0]
    with pytest.raises(CheckpointError, match=r"focus\.again=1"):
        resumed.load_state_dict({"focus": {"again": 1}})
    with pytest.raises(CheckpointError, match=r"none for \['focus'\]"):
        resumed.load_state_dict({})


def test_saved_state_that_no_option_uses_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    state = build(CodapoConfig(mask="on")).state_dict()
    for _ in range(2):
        build(CodapoConfig(refocus=False)).load_state_dict(state)
    (warning,) = caplog.messages
    assert warning.startswith("algorithm state: the checkpoint remembers ['focus', 'reference_mask'], of which the pre")
    caplog.clear()
    build(CodapoConfig(mask="on")).load_state_dict(state)
    assert not caplog.messages


def test_codapo_takes_copies_of_a_problem_for_groups_of_their_own() -> None:
    batch, scored = codapo_batch()
    twins = replace(batch, problems=(batch.problems[0],) * 4)
    got = build(CodapoConfig()).estimator(twins, scored)
    assert torch.equal(got, build(CodapoConfig()).estimator(batch, scored))


def test_codapo_weighs_a_group_of_which_nothing_counts_by_the_offset_and_can_do_without_refocusing() -> None:
    batch, scored = codapo_batch()
    hidden = replace(batch, gradable=batch.group != 0)
    algorithm = build(CodapoConfig())
    order = algorithm.reselect(hidden, scored)
    expected = torch.tensor([0.1, *CASES["codapo_weights_and_selection"]["expected"]["group_weight"][1:]])
    assert order == codapo_select(expected).tolist() == [3, 3, 3, 3]
    plain = build(CodapoConfig(refocus=False))
    assert plain.reselect is None and plain.state_dict() == {}
    assert torch.equal(plain.estimator(batch, scored), build(CodapoConfig()).estimator(batch, scored))


def test_codapo_gives_an_empty_response_no_confidence() -> None:
    batch = make_batch([2, 3, 0, 1], [1, 0, 0, 1], [0] * 4)
    algorithm = build(CodapoConfig())
    algorithm.estimator(batch, signals([-0.3, -0.6, 0.0, -0.9], batch))
    assert algorithm.report()["codapo/weight"] == pytest.approx(math.exp(-0.6) + 0.1)  # half of the four are right


# --- CDE and schedules ----------------------------------------------------------------------------------------------


def test_cde_advantages_are_those_of_the_golden_case() -> None:
    case = CASES["cde_ppl_bonus_pm1"]
    given = case["inputs"]
    batch = make_batch([3] * len(given["reward"]), [int(value > 0) for value in given["reward"]], given["group"])
    algorithm = build(CdeConfig())
    got = algorithm.estimator(batch, signals(given["lpm_old"], batch))
    assert_golden(got[:, FIRST], case["expected"]["advantage"], case)
    assert algorithm.report()["cde/omega"] == 1.0
    assert algorithm.report()["cde/bonus"] == pytest.approx(sum(case["expected"]["bonus"]) / len(batch), abs=1e-6)
    assert algorithm.report()["cde/capped_share"] == 0.25
    # With 0 and 1 the wrong ones have no bonus; a group of wrong ones has one with -1 and still compares it.
    binary = build(CdeConfig(reward_range="01")).estimator(batch, signals(given["lpm_old"], batch))
    torch.testing.assert_close(binary[:, FIRST], grpo_advantage(torch.tensor([1.1, 4 / 3, 0.0, 0.0]), batch.group))
    wrong = make_batch([3] * 4, [0] * 4, [0] * 4)
    got = algorithm.estimator(wrong, signals(given["lpm_old"], wrong))
    bonus = torch.tensor(given["lpm_old"]).neg().clamp(max=1 / 3)
    torch.testing.assert_close(got[:, FIRST], grpo_advantage(bonus, batch.group), rtol=1e-5, atol=1e-5)
    capped = algorithm.estimator(wrong, signals([-0.4, -0.9, -0.5, -0.6], wrong))
    assert not capped.any()


def test_cde_takes_its_bonus_away_when_its_share_of_the_run_is_over() -> None:
    batch, scored = uneven()
    algorithm = build(CdeConfig(omega_until=0.5))
    without = build(GrpoConfig()).estimator(batch, scored)
    for progress, omega in ((0.0, 1.0), (0.49, 1.0), (0.5, 0.0), (0.99, 0.0)):
        got = algorithm.estimator(replace(batch, progress=progress), scored)
        assert algorithm.report()["cde/omega"] == omega
        assert torch.allclose(got, without, atol=1e-5) == (omega == 0.0)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.75, 1.5, 1.0, 1.0]),
        ("cosine", [2.0, 2 - (1 - math.sqrt(0.5)) / 2, 1.5, 1.0, 1.0]),
        ("staircase", [2.0, 2.0, 2.0, 1.0, 1.0]),
    ],
)
def test_schedules_lead_from_start_to_end_and_stay_there(kind: str, at: list[float]) -> None:
    got = [scheduled(kind, 2.0, 1.0, 0.8, progress) for progress in (0.0, 0.2, 0.4, 0.8, 0.95)]
    assert got == pytest.approx(at)


# --- SimKO ----------------------------------------------------------------------------------------------------------


def test_simko_loss_and_gradient_on_logits_are_those_of_the_golden_case() -> None:
    case = CASES["simko_loss_visible_alpha"]
    given, params, want = case["inputs"], case["params"], case["expected"]
    tokens, mask = torch.tensor(given["tokens"]), torch.tensor(given["mask"]).bool()
    batch = make_batch(mask.sum(dim=1).tolist(), given["reward"], [0] * len(mask))
    columns = slice(FIRST, FIRST + tokens.shape[1])
    ids = torch.zeros_like(batch.tokens)
    ids[:, FIRST + 1 : FIRST + 1 + tokens.shape[1]] = tokens
    batch = replace(batch, tokens=ids)
    logits = torch.tensor(given["logits"], requires_grad=True)

    def wide(value: Tensor) -> Tensor:
        found = value.new_zeros(*batch.response_mask.shape, *value.shape[2:])
        found[:, columns] = torch.where(mask.view(*mask.shape, *[1] * (value.ndim - 2)), value, 0)
        return found

    def of_sampled(values: Tensor) -> Tensor:
        return values.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    logp = logits.log_softmax(-1)
    top = logp.topk(params["K"], dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    now = PolicyOutputs(wide(of_sampled(logits)), wide(entropy), TopK(wide(top.indices), wide(top.values)))
    algorithm = build(SimkoConfig(top_k=params["K"], alpha=params["alpha"], quantile=params["entropy_quantile"]))
    scored = Signals(wide(of_sampled(torch.tensor(given["old_logits"]))))
    adv = spread(given["advantage_seq"], batch)
    part = train_batch(batch, scored, adv, algorithm.reduction(batch))
    token = algorithm.loss(now, part)
    loss = (part.weights * token.loss).sum()
    loss.backward()
    assert_golden(loss, want["loss"], case)
    assert_golden(logits.grad, want["dloss_dlogits"], case)
    assert token.metrics["selected_share"][:, columns].bool().tolist() == want["selected"]
    punished = torch.tensor(want["selected"]) & torch.tensor(want["is_argmax"]) & (adv[:, columns] < 0)
    assert token.metrics["punished_share"][:, columns].bool().equal(punished)


def test_simko_spreads_nothing_where_alpha_is_zero_and_the_penalty_one() -> None:
    batch, scored = uneven()
    simko, grpo = build(SimkoConfig(alpha=0.0, top1_penalty=1.0)), build(GrpoConfig(reduction="token-mean"))
    part = train_batch(batch, scored, advantages(grpo, batch, scored), grpo.reduction(batch))
    assert torch.equal(simko.reduction(batch), part.weights)
    gradients = []
    for algorithm in (simko, grpo):
        now = current(batch, scored)
        loss = (part.weights * algorithm.loss(now, part).loss).sum()
        loss.backward()
        gradients.append(torch.cat([now.logprobs.grad.flatten(), loss.detach().view(1)]))
    torch.testing.assert_close(*gradients)


# --- DCPO -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["abs", "square"])
def test_dcpo_trains_each_segment_by_its_own_advantage(distance: str) -> None:
    case = CASES["dcpo_hybrid"]
    given, want = case["inputs"], case["expected"]
    lengths, starts, right = given["response_length"], given["conf_start"], given["accuracy"]
    stated = torch.tensor(given["confidence"])
    batch = make_batch(lengths, right, given["group"], reward=[9.0] * 4, extra={"confidence": stated})
    place = torch.arange(batch.response_mask.shape[1]) - FIRST
    begin = torch.tensor([99 if start is None else start for start in starts]).unsqueeze(1)
    segment = torch.where(place >= begin, Segment.CONFIDENCE, Segment.REASONING).to(torch.uint8)
    batch = replace(batch, segment=segment * batch.response_mask)
    algorithm = build(DcpoConfig(group_share=case["params"]["group_share_lambda"], distance=distance))
    got = algorithm.estimator(batch, signals([-0.5] * len(lengths), batch))
    reason, sure = torch.tensor(want["adv_reason"]), torch.tensor(want[f"adv_conf_{distance}"])
    expected = torch.where(place >= begin, sure.unsqueeze(1), reason.unsqueeze(1)) * batch.response_mask
    # The released code halves the square, which only its eps can tell: 1e-6 of a deviation of about 0.5.
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5)
    if distance == "abs":
        whole = CASES["dcpo_token_advantage"]
        assert_golden(got[:, FIRST : FIRST + 7], whole["expected"]["token_advantage"], whole)
    assert algorithm.report()["dcpo/stated"] == pytest.approx(float((stated >= 0).float().mean()))
    said = stated >= 0
    brier = (stated - torch.tensor(right)).square()[said].mean()
    assert algorithm.report()["dcpo/brier"] == pytest.approx(float(brier))


def test_dcpo_trains_confidence_where_answers_teach_nothing() -> None:
    batch, scored = step([3, 3, 3], [1, 1, 1], [0, 0, 0], confidence=[0.9, 0.2, 0.5])
    got = advantages(build(DcpoConfig()), batch, scored)
    line = batch.segment == Segment.CONFIDENCE
    assert not got[batch.response_mask & ~line].any()
    surest, least, between = got[line].tolist()
    assert surest > between > least and surest > 0 > least


# --- SCAPO ----------------------------------------------------------------------------------------------------------


def test_scapo_adds_the_golden_credit_until_its_steps_are_over() -> None:
    case = CASES["scapo_credit"]
    given = case["inputs"]
    batch = make_batch([3, 2], given["reward"], [0, 0])
    perturbed = torch.stack([laid_out(rows, batch) for rows in given["perturbed_logp"]], dim=2)
    scored = Signals(laid_out(given["old_logp"], batch), perturbed_logprobs=perturbed)
    algorithm = build(ScapoConfig(credit=0.01, credit_steps=6))
    got = algorithm.estimator(replace(batch, policy_version=5), scored)
    assert_golden(got[:, FIRST : FIRST + 3], case["expected"]["token_advantage"], case)
    assert algorithm.report()["scapo/lambda"] == 0.01 and algorithm.report()["scapo/credit"] < 0
    assert algorithm.idle(replace(batch, policy_version=5)) == frozenset()
    late = replace(batch, policy_version=6)
    assert algorithm.idle(late) == {Signal.PERTURBED}
    plain = build(GrpoConfig()).estimator(batch, Signals(scored.old_logprobs))
    assert torch.equal(algorithm.estimator(late, Signals(scored.old_logprobs)), plain)
    assert algorithm.report() == {"scapo/lambda": 0.0}
    with pytest.raises(ShapeError, match="perturbed_logprobs: None"):
        algorithm.estimator(batch, Signals(scored.old_logprobs))
    assert build(ScapoConfig(credit=0.0)).needs == build(ScapoConfig(credit_steps=0)).needs == frozenset()


def test_scapo_uses_the_wordings_that_a_problem_has() -> None:
    batch, scored = step([3, 4, 2, 3], [1, 0, 1, 0], [0, 0, 1, 1])
    none = replace(scored, perturbed_logprobs=scored.perturbed_logprobs.clone())
    none.perturbed_logprobs[batch.group == 1] = math.nan
    algorithm = build(ScapoConfig(credit=1.0))
    base = build(GrpoConfig()).estimator(batch, scored)
    got = algorithm.estimator(batch, scored) - base
    both, one = (scored.perturbed_logprobs[rows].permute(2, 0, 1) for rows in (batch.group == 0, batch.group == 1))
    for rows, known in ((batch.group == 0, both), (batch.group == 1, one[:1])):
        want = scapo_credit(scored.old_logprobs[rows], known, batch.response_mask[rows], batch.group[rows])
        torch.testing.assert_close(got[rows], want, rtol=1e-5, atol=1e-6)
    assert torch.equal(algorithm.estimator(batch, none)[batch.group == 1], base[batch.group == 1])
    nothing = replace(scored, perturbed_logprobs=scored.perturbed_logprobs[..., :0])  # a step of problems without any
    assert torch.equal(algorithm.estimator(batch, nothing), base)
    assert algorithm.report()["scapo/drift"] == 0.0


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_scapo_does_not_take_a_broken_number_for_a_lacking_wording(value: float) -> None:
    batch, scored = step([3, 4, 2, 3], [1, 0, 1, 0], [0, 0, 0, 0])
    scored.perturbed_logprobs[1, 3, 0] = value
    with pytest.raises(TrainingError, match=r"perturbed_logprobs\[0\]: .* in sample 1 of problem 'problem-0'"):
        build(ScapoConfig()).estimator(batch, scored)
