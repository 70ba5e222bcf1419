"""A refit is proven: an engine that is not the policy is found out, by all ranks together."""

from __future__ import annotations

import pytest
import torch

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.proof import Probe, batch_from_sequences
from capo_megatron.seams import SamplingParams, Solo
from tests.unit.tiny_qwen2 import (
    ModelPolicy,
    Prompts,
    ThreadTeam,
    engine_of,
    mixed_problems,
    on_ranks,
    tiny_model,
    weights_of,
)

PARAMS = SamplingParams(12, stop_ids=(3,))


def test_equal_weights_are_proven_equal() -> None:
    model = tiny_model()
    metrics = Probe(4, 0.02).prove(engine_of(model), ModelPolicy(model), Prompts(), PARAMS, Solo(), 0)
    assert metrics.keys() == {"refit/gap_median", "refit/gap_p99", "refit/gap_max"}
    assert 1 <= metrics["refit/gap_median"] <= metrics["refit/gap_p99"] <= metrics["refit/gap_max"] < 1 + 1e-5


def test_the_probe_stays_the_same_and_takes_no_problem_away() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    engine, prompts, probe = engine_of(model), Prompts(), Probe(3, 0.02)
    probe.prove(engine, ModelPolicy(model), prompts, PARAMS, Solo(), 0)
    drawn = list(probe._sequences)
    assert prompts.position == 0
    engine.load_weights(weights_of(other), 1)
    probe.prove(engine, ModelPolicy(other, 1), prompts, PARAMS, Solo(), 0)
    assert probe._sequences == drawn
    assert [prompt for prompt, _ in drawn] == [problem.prompt_ids for problem in mixed_problems(3)]


def test_one_wrong_bias_is_found_out() -> None:
    model, changed = tiny_model(), tiny_model()
    with torch.no_grad():
        changed.model.layers[0].self_attn.v_proj.bias.zero_()
    name = "model.layers.0.self_attn.v_proj.bias"
    message = f"probe_tolerance=0.02: .* factor of .* in the median.*in 1 of 26 tensors: {name} .{name} all zero"
    with pytest.raises(RolloutError, match=message):
        Probe(4, 0.02).prove(engine_of(changed), ModelPolicy(model), Prompts(), PARAMS, Solo(), 0)
    # The same gap under a wide tolerance is reported.
    metrics = Probe(4, 1e9).prove(engine_of(changed), ModelPolicy(model), Prompts(), PARAMS, Solo(), 0)
    assert metrics["refit/gap_median"] > 1.02


def test_a_wrong_engine_on_one_rank_stops_all() -> None:
    model, other = tiny_model(), tiny_model(seed=1)

    def work(team: ThreadTeam) -> dict[str, float]:
        engine = engine_of(other if team.rank == 1 else model, share=(team.rank, team.size))
        return Probe(3, 0.02).prove(engine, ModelPolicy(model), Prompts(), PARAMS, team, 0)

    outcomes = on_ranks(3, work)
    assert [type(outcome) for outcome in outcomes] == [RolloutError] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "rank 1, 3 probe responses" in str(outcomes[0])


def test_a_refit_that_did_not_run_on_one_rank_stops_all() -> None:
    model = tiny_model()

    def work(team: ThreadTeam) -> dict[str, float]:
        engine = engine_of(model, version=5 - team.rank)
        return Probe(3, 0.02).prove(engine, ModelPolicy(model, 5), Prompts(), PARAMS, team, 0)

    for outcome in on_ranks(2, work):
        with pytest.raises(RolloutError, match="rank 1: the engine holds policy version 4, the policy is at 5"):
            raise outcome


def test_non_finite_logprobs_are_never_a_small_gap() -> None:
    model, broken = tiny_model(), tiny_model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    engine, probe = engine_of(model), Probe(3, 1e9)
    probe.prove(engine, ModelPolicy(model), Prompts(), PARAMS, Solo(), 0)
    for weights, policy in ((weights_of(broken), ModelPolicy(model)), (weights_of(model), ModelPolicy(broken))):
        engine.load_weights(weights, 0)
        with pytest.raises(RolloutError, match="not finite"):
            probe.prove(engine, policy, Prompts(), PARAMS, Solo(), 0)


def test_zero_rows_prove_nothing() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    assert Probe(0, 0.0).prove(engine_of(other), ModelPolicy(model), Prompts(), PARAMS, Solo(), 0) == {}


def test_sequences_become_an_aligned_batch() -> None:
    batch = batch_from_sequences([((1, 2), (3, 4, 5)), ((6,), (7,))], pad_id=9, version=4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]]
    assert batch.response_mask.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert [problem.prompt_ids for problem in batch.problems] == [(1, 2), (6,)]
    assert (batch.group.tolist(), batch.policy_version) == ([0, 1], 4)
