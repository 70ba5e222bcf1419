"""Sampling is a pure function of logits and a hashed uniform number."""

from __future__ import annotations

import math

import numpy as np
import torch

from capo_megatron.rollout.sampling import choose, row_seed, uniforms
from capo_megatron.seams import SamplingParams

LAST_DRAW = 1 - 2.0**-53  # the largest number that `uniforms` can give


def test_uniforms_are_the_splitmix64_stream_of_their_seed() -> None:
    # The published first outputs for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert uniforms([1234567], 4).tolist() == [[(word >> 11) * 2.0**-53 for word in published]]


def test_uniforms_of_hashed_rows_are_flat_and_uncorrelated() -> None:
    draws = uniforms([row_seed(7, f"problem-{index // 8}", index % 8) for index in range(2000)], 50)
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    expected = draws.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    for shifted in (np.roll(draws, 1, axis=0), np.roll(draws, 1, axis=1)):
        correlation = np.corrcoef(draws.ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(draws.size)


def test_row_seed_depends_on_seed_problem_and_sample() -> None:
    seeds = {
        row_seed(seed, problem, sample) for seed in (0, 1, 11) for problem in ("a", "1", "") for sample in (0, 1, 11)
    }
    assert len(seeds) == 27
    assert row_seed(3, "a", 1) == row_seed(3, "a", 1)


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf], [-math.inf, -math.inf, -math.inf, 2.0]])
    for draw in (0.0, 0.5, LAST_DRAW):
        tokens, logprobs, finite = choose(logits, torch.full((2,), draw, dtype=torch.float64), SamplingParams(1))
        assert tokens[0] in (1, 2)
        assert tokens[1] == 3
        assert finite.all()
        assert logprobs[1] == 0.0


def test_draws_pick_tokens_by_cumulative_probability() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(5, 1)
    draws = torch.tensor([0.0, 0.09, 0.11, 0.59, 0.61], dtype=torch.float64)
    tokens, logprobs, _ = choose(logits, draws, SamplingParams(1))
    assert tokens.tolist() == [0, 0, 1, 2, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.3, 0.4]))


def test_truncation_limits_the_tokens_and_leaves_the_logprobs_of_the_whole_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(100, 1)
    draws = torch.linspace(0, LAST_DRAW, 100, dtype=torch.float64)
    top_two, logprobs, _ = choose(logits, draws, SamplingParams(1, top_k=2))
    assert set(top_two.tolist()) == {2, 3}
    # 3/7 and 4/7 of the draws, each within one draw.
    assert abs((top_two == 2).sum().item() - 100 * 3 / 7) <= 1
    torch.testing.assert_close(logprobs.exp(), torch.where(top_two == 2, 0.3, 0.4))
    nucleus, logprobs, _ = choose(logits, draws, SamplingParams(1, top_p=0.8))
    assert set(nucleus.tolist()) == {1, 2, 3}
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.2, 0.3, 0.4])[nucleus - 1])


def test_temperature_shapes_choice_and_logprob_alike() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    for temperature in (0.5, 2.0):
        probabilities = (logits[0] / temperature).softmax(0)
        for token in range(3):
            draw = probabilities[:token].sum().double() + probabilities[token].double() / 2
            tokens, logprobs, _ = choose(logits, draw.reshape(1), SamplingParams(1, temperature=temperature))
            assert tokens.item() == token
            torch.testing.assert_close(logprobs[0].exp(), probabilities[token])


def test_greedy_takes_the_most_likely_token_and_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0]])
    tokens, logprobs, _ = choose(logits, torch.tensor([0.0], dtype=torch.float64), SamplingParams(1, temperature=0))
    assert tokens.item() == 1
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1])


def test_non_finite_logits_are_told_apart() -> None:
    bad = [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, 0.0], [-math.inf, 0.0]]
    finite = choose(torch.tensor(bad), torch.zeros(5, dtype=torch.float64), SamplingParams(1))[2]
    assert finite.tolist() == [False, False, False, True, True]
