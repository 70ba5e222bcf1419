"""The embedded engine: what it samples is what Hugging Face's model says, whatever the batching."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.seams import SamplingParams
from capo_megatron.types import Problem, Sample
from tests.unit.tiny_qwen2 import NumberTokenizer, engine_of, mixed_problems, tiny_config, tiny_model, weights_of

# Log-probs of one sequence computed in batches of other shapes, with and without KV cache, in float32.
ROUNDING = 1e-5
STOP = 3


def reference_logprobs(
    model: torch.nn.Module, problem: Problem, sample: Sample, temperature: float = 1.0
) -> list[float]:
    """Hugging Face's own forward pass over one unpadded sequence."""
    ids = torch.tensor([[*problem.prompt_ids, *sample.ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(problem.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.ids).unsqueeze(1)).squeeze(1).tolist()


def tokens_of(groups: list[list[Sample]]) -> list[list[tuple[int, ...]]]:
    return [[sample.ids for sample in group] for group in groups]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_recorded_logprobs_equal_teacher_forced_ones(temperature: float, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    engine, problems = engine_of(model), mixed_problems(6)
    # 150 tokens: the cache grows twice; rows end and leave the batch all along.
    params = SamplingParams(150, temperature=temperature, stop_ids=(STOP,), seed=5)
    groups = engine.generate(problems, 4, params)
    assert len({len(sample.ids) for group in groups for sample in group}) > 8
    for problem, group in zip(problems, groups, strict=True):
        for sample in group:
            expected = reference_logprobs(model, problem, sample, temperature)
            np.testing.assert_allclose(sample.logprobs, expected, atol=ROUNDING)


def test_samples_do_not_depend_on_batch_size_share_or_neighbours() -> None:
    model, problems = tiny_model(), mixed_problems(6)
    params = SamplingParams(16, stop_ids=(STOP,), seed=1)
    whole = engine_of(model, batch_size=64).generate(problems, 3, params)
    for batch_size in (1, 4):
        other = engine_of(model, batch_size=batch_size).generate(problems, 3, params)
        assert tokens_of(other) == tokens_of(whole)
        for ours, theirs in zip(other, whole, strict=True):
            for sample, twin in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(sample.logprobs, twin.logprobs, atol=ROUNDING)
    engine = engine_of(model, batch_size=5)
    assert tokens_of(engine.generate(problems[4:], 3, params)) == tokens_of(whole[4:])
    assert tokens_of(engine.generate(problems[::-1], 3, params)) == tokens_of(whole[::-1])
    assert tokens_of(engine.generate(problems, 2, params)) == [group[:2] for group in tokens_of(whole)]


def test_seed_problem_and_sample_index_change_the_samples() -> None:
    engine = engine_of(tiny_model(initializer_range=0.1))
    problem, twin = Problem("a", "", (1, 2), ""), Problem("b", "", (1, 2), "")
    first, second = engine.generate([problem, twin], 2, SamplingParams(20, seed=1))
    other = engine.generate([problem], 2, SamplingParams(20, seed=2))[0]
    assert len({sample.ids for sample in (*first, *second, *other)}) == 6


# Chi-square at p = 0.01: 25 pairs of tokens have 24 degrees of freedom, the 9 pairs that top-3 leaves have 8.
@pytest.mark.parametrize(
    ("params", "critical"),
    [(SamplingParams(2, seed=9), 42.98), (SamplingParams(2, temperature=1.5, top_k=3, seed=9), 20.09)],
)
def test_sampling_frequencies_match_the_models_probabilities(params: SamplingParams, critical: float) -> None:
    model = tiny_model(vocab_size=5, initializer_range=0.1)
    problem = Problem("coin", "", (1, 2, 0), "")
    group = engine_of(model, batch_size=2000).generate([problem], 4000, params)[0]
    counts = np.zeros((5, 5))
    for sample in group:
        counts[sample.ids] += 1
    joint = np.zeros((5, 5))  # probability of both tokens
    with torch.no_grad():
        for token in range(5):
            logits = model(torch.tensor([[1, 2, 0, token]])).logits[0, 2:].double() / params.temperature
            if params.top_k:
                logits[logits < logits.topk(params.top_k).values[:, -1:]] = -torch.inf
            first, second = logits.softmax(-1)
            joint[token] = (first[token] * second).numpy()
    possible = joint > 0
    assert counts[~possible].sum() == 0
    expected = joint[possible] * len(group)
    assert ((counts[possible] - expected) ** 2 / expected).sum() < critical


def test_greedy_equals_hugging_face_greedy_on_left_padded_prompts() -> None:
    model, problems = tiny_model(seed=4), mixed_problems(9)
    width = max(len(problem.prompt_ids) for problem in problems)
    ids = torch.tensor([[0] * (width - len(problem.prompt_ids)) + list(problem.prompt_ids) for problem in problems])
    mask = torch.tensor(
        [[0] * (width - len(problem.prompt_ids)) + [1] * len(problem.prompt_ids) for problem in problems]
    )
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0)[:, width:]
    found = engine_of(model).generate(problems, 1, SamplingParams(25, temperature=0))
    assert [list(group[0].ids) for group in found] == expected.tolist()


def test_responses_end_with_a_stop_token_or_are_truncated() -> None:
    engine = engine_of(tiny_model(initializer_range=0.1), version=7)
    stops = (STOP, 8)
    samples = [
        sample
        for group in engine.generate(mixed_problems(10), 8, SamplingParams(12, stop_ids=stops))
        for sample in group
    ]
    assert {sample.truncated for sample in samples} == {True, False}
    for sample in samples:
        inner = sample.ids if sample.truncated else sample.ids[:-1]
        assert not set(inner) & set(stops)
        assert sample.truncated == (sample.ids[-1] not in stops)
        assert len(sample.ids) == 12 if sample.truncated else 1 <= len(sample.ids) <= 12
        assert sample.text == " ".join(map(str, inner))
        assert len(sample.logprobs) == len(sample.ids)
        assert sample.version == 7
    assert {sample.ids[-1] for sample in samples if not sample.truncated} == set(stops)


def test_a_stop_token_at_the_last_position_is_no_truncation() -> None:
    engine, problem = engine_of(tiny_model()), mixed_problems(1)[0]
    token = engine.generate([problem], 1, SamplingParams(1))[0][0].ids[0]
    sample = engine.generate([problem], 1, SamplingParams(1, stop_ids=(token,)))[0][0]
    assert (sample.ids, sample.truncated, sample.text) == ((token,), False, "")


def test_logprobs_of_given_sequences_equal_hugging_faces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, problems = tiny_model(), mixed_problems(6)
    engine = engine_of(model)
    groups = engine.generate(problems, 2, SamplingParams(20, stop_ids=(STOP,)))
    pairs = [(problem, sample) for problem, group in zip(problems, groups, strict=True) for sample in group]
    sequences = [(problem.prompt_ids, sample.ids) for problem, sample in pairs]
    expected = [reference_logprobs(model, *pair, temperature=0.8) for pair in pairs]
    # Whole, then one sequence at a time with the head applied to 3 tokens at a time.
    for tokens, logits in ((16_384, 1_024), (1, 3)):
        monkeypatch.setattr("capo_megatron.rollout.transformers._SCORED_TOKENS", tokens)
        monkeypatch.setattr("capo_megatron.rollout.transformers._LOGITS_TOKENS", logits)
        for found, wanted in zip(engine.logprobs(sequences, 0.8), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=ROUNDING)


def test_bfloat16_samples_and_scores_alike() -> None:
    engine, problems = engine_of(tiny_model(), dtype=torch.bfloat16), mixed_problems(4)
    groups = engine.generate(problems, 2, SamplingParams(20))
    pairs = [
        (problem.prompt_ids, sample.ids) for problem, group in zip(problems, groups, strict=True) for sample in group
    ]
    recorded = np.concatenate([sample.logprobs for group in groups for sample in group])
    # bfloat16 keeps 8 bits: the logits of up to 10 differ by up to about 0.1 between batch shapes.
    assert np.median(np.abs(np.concatenate(engine.logprobs(pairs, 1.0)) - recorded)) < 0.05


def test_refit_changes_the_weights_and_the_version() -> None:
    first, second, problems = tiny_model(seed=0), tiny_model(seed=1), mixed_problems(3)
    engine = engine_of(first)
    before = tokens_of(engine.generate(problems, 2, SamplingParams(10)))
    engine.load_weights(weights_of(second), 1)
    groups = engine.generate(problems, 2, SamplingParams(10))
    assert tokens_of(groups) != before
    assert tokens_of(groups) == tokens_of(engine_of(second).generate(problems, 2, SamplingParams(10)))
    assert {sample.version for group in groups for sample in group} == {1} == {engine.version}


def _without_a_bias(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [pair for pair in weights if pair[0] != "model.layers.1.self_attn.k_proj.bias"]


def _with_one_more(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [*weights, ("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32))]


def _with_a_longer_embedding(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, torch.zeros(16, 32) if name == "model.embed_tokens.weight" else weight) for name, weight in weights]


def _with_another_head(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [("lm_head.weight", torch.zeros(13, 32)), *weights]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_bias, "1 missing: model.layers.1.self_attn.k_proj.bias"),
        (_with_one_more, "model.layers.2.mlp.up_proj.weight is no weight of this model"),
        (_with_a_longer_embedding, r"model.embed_tokens.weight has shape \(16, 32\), expected \(13, 32\)"),
        (_with_another_head, "tied to a weight that it does not equal"),
    ],
)
def test_a_partial_refit_is_refused_and_leaves_no_usable_weights(change: object, message: str) -> None:
    model, problems = tiny_model(), mixed_problems(1)
    engine = engine_of(model, version=4)
    assert callable(change)
    stream = iter(change(weights_of(model)))
    with pytest.raises(RolloutError, match=message):
        engine.load_weights(stream, 5)
    assert next(stream, None) is None, "a collective iterator must be read to its end"
    assert engine.version == -1
    with pytest.raises(RolloutError, match="without weights"):
        engine.generate(problems, 1, SamplingParams(1))
    with pytest.raises(RolloutError, match="without weights"):
        engine.logprobs([((1,), (2,))], 1.0)
    engine.load_weights(weights_of(model), 5)
    assert engine.generate(problems, 1, SamplingParams(1))[0][0].version == 5


def test_a_tied_head_may_come_under_its_own_name() -> None:
    model, problems = tiny_model(), mixed_problems(2)
    engine = engine_of(model)
    expected = tokens_of(engine.generate(problems, 1, SamplingParams(10)))
    head = ("lm_head.weight", model.lm_head.weight.detach())
    for weights in ([head, *weights_of(model)], [*weights_of(model), head]):
        engine.load_weights(weights, 1)
        assert tokens_of(engine.generate(problems, 1, SamplingParams(10))) == expected


def test_a_fresh_engine_refuses_to_sample() -> None:
    engine = TransformersEngine(tiny_config(), NumberTokenizer(), torch.float32)
    assert engine.version == -1
    with pytest.raises(RolloutError, match="without weights"):
        engine.generate(mixed_problems(1), 1, SamplingParams(1))


def test_sleep_refuses_work_until_wake() -> None:
    engine, problems = engine_of(tiny_model()), mixed_problems(1)
    before = tokens_of(engine.generate(problems, 1, SamplingParams(10)))
    engine.sleep()
    with pytest.raises(RolloutError, match=r"generate while it sleeps. Call wake\(\) first"):
        engine.generate(problems, 1, SamplingParams(10))
    engine.wake()
    assert tokens_of(engine.generate(problems, 1, SamplingParams(10))) == before


@pytest.mark.parametrize(
    ("problem", "params", "message"),
    [
        (
            Problem("long", "", (1,) * 250, ""),
            SamplingParams(7),
            "'long': 250 prompt tokens.*max_tokens=7 need 257.* 256",
        ),
        (Problem("empty", "", (), ""), SamplingParams(7), "'empty': the prompt is empty"),
        (Problem("other", "", (1, 13), ""), SamplingParams(7), "'other': token ids 1 to 13 .* ids 0 to 12"),
        (Problem("a", "", (1,), ""), SamplingParams(0), "max_tokens=0"),
        (Problem("a", "", (1,), ""), SamplingParams(1, temperature=-1.0), "temperature=-1.0"),
        (Problem("a", "", (1,), ""), SamplingParams(1, top_p=0.0), "top_p=0.0"),
        (Problem("a", "", (1,), ""), SamplingParams(1, top_k=-1), "top_k=-1"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_sampled(
    problem: Problem, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        engine_of(tiny_model()).generate([*mixed_problems(2), problem], 1, params)


def test_a_prompt_that_just_fits_is_sampled() -> None:
    model = tiny_model(max_position_embeddings=16)
    problem = Problem("tight", "", (1,) * 10, "")
    sample = engine_of(model).generate([problem], 1, SamplingParams(6))[0][0]
    np.testing.assert_allclose(sample.logprobs, reference_logprobs(model, problem, sample), atol=ROUNDING)


def test_non_finite_logits_name_the_problem() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    healthy, sick = Problem("healthy", "", (1, 2), ""), Problem("sick", "", (5, 2), "")
    # Tied head: the NaN row of the embedding reaches the logits of everybody.
    with pytest.raises(RolloutError, match="problem 'healthy': non-finite logits at response token 0"):
        engine_of(model).generate([healthy, sick], 2, SamplingParams(4))
    untied = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        untied.model.embed_tokens.weight[5] = torch.nan
    with pytest.raises(RolloutError, match="problem 'sick': non-finite logits"):
        engine_of(untied).generate([healthy, sick], 2, SamplingParams(4, top_k=1))


def test_an_engine_reads_the_config_of_a_directory_and_nothing_else_of_it(tmp_path: Path) -> None:
    model, problems = tiny_model(), mixed_problems(2)
    model.config.save_pretrained(tmp_path)
    odd = {
        "repetition_penalty": 5.0,
        "eos_token_id": list(range(13)),
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(odd))
    engine = TransformersEngine(tmp_path, NumberTokenizer(), torch.float32)
    engine.load_weights(weights_of(model), 0)
    expected = engine_of(model).generate(problems, 2, SamplingParams(20))
    assert tokens_of(engine.generate(problems, 2, SamplingParams(20))) == tokens_of(expected)
    with pytest.raises(RolloutError, match=r"no config\.json there"):
        TransformersEngine(tmp_path / "absent", NumberTokenizer())


def test_sliding_window_attention_is_refused() -> None:
    config = tiny_config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(RolloutError, match="qwen2: DynamicSlidingWindowLayer"):
        TransformersEngine(config, NumberTokenizer())


def test_building_an_engine_leaves_the_random_state_and_the_given_config_alone() -> None:
    config, state = tiny_config(), torch.get_rng_state()
    before = config.to_dict()
    TransformersEngine(config, NumberTokenizer(), torch.bfloat16)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
