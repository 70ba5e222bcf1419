"""The vLLM engine is the policy: its tokens, its log-probs, and what it holds after each refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.seams import SamplingParams, Solo
from tests.unit.tiny_qwen2 import ModelPolicy, Prompts, engine_of, weights_of
from tests.vllm_engine.engines import engine, long_problems, wide_model

ROUNDING = 1e-5
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@TIED
def test_every_refit_gives_the_tokens_of_the_transformers_engine(tied: bool) -> None:
    ours, params = engine(tied), SamplingParams(24, temperature=0.0, stop_ids=(3,))
    for version in range(3):
        model = wide_model(version, tied)
        ours.load_weights(weights_of(model), version)
        other = engine_of(model, version=version)
        found, wanted = (side.generate(long_problems(4), 2, params) for side in (ours, other))
        assert [[sample.ids for sample in group] for group in found] == [[s.ids for s in group] for group in wanted]
        assert [[sample.truncated for sample in group] for group in found] == [
            [sample.truncated for sample in group] for group in wanted
        ]
        assert {sample.version for group in found for sample in group} == {version} == {ours.version}


@TIED
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_at_the_sampling_temperature(tied: bool, temperature: float) -> None:
    model, ours = wide_model(3, tied), engine(tied)
    ours.load_weights(weights_of(model), 0)
    problems = long_problems(3)
    groups = ours.generate(problems, 3, SamplingParams(20, temperature, stop_ids=(3,), seed=2))
    pairs = [(p.prompt_ids, sample.ids) for p, group in zip(problems, groups, strict=True) for sample in group]
    wanted = engine_of(model).logprobs(pairs, temperature)
    recorded = [list(sample.logprobs) for group in groups for sample in group]
    for found in (recorded, ours.logprobs(pairs, temperature)):
        for row, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(row), torch.tensor(expected), atol=1e-4, rtol=0)


def test_a_response_is_decided_by_seed_problem_and_index_alone() -> None:
    ours = engine(True)
    ours.load_weights(weights_of(wide_model()), 0)
    problems, params = long_problems(4), SamplingParams(8, seed=7)
    whole = ours.generate(problems, 3, params)
    assert ours.generate(problems[2:], 3, params) == whole[2:]
    assert [group[:2] for group in whole] == ours.generate(problems, 2, params)
    assert len({sample.ids for group in whole for sample in group}) == 12
    assert ours.generate(problems, 3, SamplingParams(8, seed=8)) != whole


@TIED
def test_what_vllm_holds_is_what_was_given(tied: bool) -> None:
    model, ours = wide_model(4, tied), engine(tied)
    ours.load_weights(weights_of(model), 0)
    expected = sketches(weights_of(model))
    assert not differing(expected, ours.sketches(), ROUNDING)
    assert not differing(engine_of(model).sketches(), ours.sketches(), ROUNDING)
    others = differing(sketches(weights_of(wide_model(5, tied))), ours.sketches(), 1e-2)
    assert others == [name for name in expected if "norm" not in name]  # norms are all ones


@TIED
def test_the_probe_gap_stays_below_a_ten_thousandth(tied: bool) -> None:
    ours, probe = engine(tied), Probe(4, 1e-3, ROUNDING)
    for version in range(4):
        model = wide_model(version, tied)
        ours.load_weights(weights_of(model), version)
        policy = ModelPolicy(model, version, temperature=0.8)
        params = SamplingParams(12, temperature=0.8)
        metrics = probe.prove(ours, policy, Prompts(long_problems(20)), params, Solo(), 0)
        assert metrics["refit/gap_max"] < 1 + 1e-4


def test_weights_that_are_not_whole_leave_no_usable_engine() -> None:
    ours, weights = engine(False), weights_of(wide_model(tied=False))
    missing, misshapen = weights[:3] + weights[4:], [*weights[1:], (weights[0][0], weights[0][1][:5])]
    strange, twice = [*weights, ("model.other.weight", weights[0][1])], [*weights, weights[2]]
    for given, message in (
        (missing, rf"1 missing: {weights[3][0]}"),
        (misshapen, rf"{weights[0][0]} has shape \(5, 128\), expected \(151, 128\)"),
        (strange, "model.other.weight is no weight of this model"),
        (twice, f"{weights[2][0]} came twice"),
    ):
        with pytest.raises(RolloutError, match=message):
            ours.load_weights(given, 1)
        assert ours.version == -1
        with pytest.raises(RolloutError, match="without weights"):
            ours.generate(long_problems(1), 1, SamplingParams(4))
    ours.load_weights(weights, 2)
    assert len(ours.generate(long_problems(1), 1, SamplingParams(4))[0][0].ids) == 4


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    ours = engine(True)
    ours.load_weights(weights_of(wide_model()), 0)
    with pytest.raises(RolloutError, match="need 350 positions, the model has 256"):
        ours.generate(long_problems(1), 1, SamplingParams(200))
    with pytest.raises(RolloutError, match=r"rollout\.temperature=-1"):
        ours.generate(long_problems(1), 1, SamplingParams(4, temperature=-1))
    ours.sleep()
    with pytest.raises(RolloutError, match="while it sleeps"):
        ours.generate(long_problems(1), 1, SamplingParams(4))
    ours.wake()


def giving_up(engine: Any, times: int) -> tuple[Any, list[int]]:
    """vLLM's `generate`, which so often gives up on the last request, and how many requests each call had."""
    generate, asked = engine._llm.generate, []

    def failing(prompts: Sequence[Any], *rest: Any, **named: Any) -> Any:
        asked.append(len(prompts))
        outputs = generate(prompts, *rest, **named)
        if len(asked) <= times:
            outputs[-1].outputs[0].finish_reason = "error"  # as after an error while it handled that request
        return outputs

    return failing, asked


@pytest.mark.parametrize(("times", "lost"), [(2, 0), (3, 1)], ids=["in the end it comes", "it never comes"])
def test_a_response_that_vllm_gives_up_on_is_asked_for_again_and_then_left_out(
    times: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: Any = engine(True)
    ours.load_weights(weights_of(wide_model()), 0)
    problems, params = long_problems(3), SamplingParams(8, seed=7)
    whole = ours.generate(problems, 2, params)
    failing, asked = giving_up(ours, times)
    monkeypatch.setattr(ours, "_retries", 2)
    monkeypatch.setattr(ours._llm, "generate", failing)
    found = ours.generate(problems, 2, params)
    assert asked == [6, 1, 1]
    tokens = [[sample.ids for sample in group] for group in whole]
    tokens[2] = tokens[2][: 2 - lost]
    assert [[sample.ids for sample in group] for group in found] == tokens, "a second attempt has the seed of the first"


def test_a_token_that_cannot_be_scored_is_no_small_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = engine(True)
    ours.load_weights(weights_of(wide_model()), 0)
    monkeypatch.setattr(ours._llm, "generate", giving_up(ours, 1)[0])
    with pytest.raises(RolloutError, match="it gave up on 1 of 4 tokens to score"):
        ours.logprobs([((1, 2), (3, 4)), ((5,), (6, 7))], 1.0)
