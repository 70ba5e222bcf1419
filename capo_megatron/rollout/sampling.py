"""Which token is sampled, as a pure function of logits and one uniform number.

The uniform number of a token is a hash of (seed, problem id, sample index, position). Nothing is drawn from a shared
stream, so a response does not change with the batch it is decoded in, the rank that decodes it, or how many ranks there
are. What remains is rounding: logits of one row differ in their last bits between batch shapes, and where the uniform
number falls that close to a boundary between two tokens (about once in a million tokens in float32, far more often in
bfloat16) the two shapes part ways.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from capo_megatron.seams import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def row_seed(seed: int, problem: str, sample: int) -> int:
    """The 64-bit seed of one response: a hash of the run's seed, the problem's id and the index in its group."""
    digest = hashlib.blake2b(f"{seed}\0{sample}\0{problem}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniforms(seeds: Sequence[int], positions: int) -> np.ndarray:
    """[rows, positions] float64 in [0, 1): element (r, t) is the t-th output of SplitMix64 started at `seeds[r]`.

    Counter-based (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): any element can be
    computed without the ones before it.
    """
    steps = np.arange(1, positions + 1, dtype=np.uint64) * _GAMMA
    word = np.asarray(seeds, dtype=np.uint64)[:, None] + steps
    word = (word ^ (word >> np.uint64(30))) * _MIX[0]
    word = (word ^ (word >> np.uint64(27))) * _MIX[1]
    word ^= word >> np.uint64(31)
    return (word >> np.uint64(11)) * 2.0**-53


def choose(logits: Tensor, draws: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [n] int64, log-probs [n] float32 in nats, finite [n] bool) for logits [n, V] and draws [n] in [0, 1).

    The log-prob is that of the whole distribution at `params.temperature`, before top-k and top-p cut it: it is the one
    that a trainer can recompute. Greedy decoding (temperature 0) reports the log-prob at temperature 1. `finite` is
    False where the logits hold NaN or +inf, or no finite value at all; token and log-prob mean nothing there.
    """
    scaled = logits.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    total = scaled.logsumexp(dim=-1)
    if params.temperature == 0:
        tokens = scaled.argmax(dim=-1, keepdim=True)
    else:
        tokens = _inverse_cdf(_truncated(scaled, params), total, draws)
    logprobs = scaled.gather(-1, tokens).squeeze(-1) - total
    return tokens.squeeze(-1), logprobs, total.isfinite()


def _truncated(scaled: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList()
    if 0 < params.top_k < scaled.shape[-1]:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(None, scaled)  # type: ignore[arg-type]  # neither looks at the ids


def _inverse_cdf(scaled: Tensor, total: Tensor, draws: Tensor) -> Tensor:
    """[n, 1]: the first token whose cumulative probability exceeds the draw. Never one of probability 0."""
    # float64: summed over 150,000 tokens, float32 would misplace the tail by more than a rare token's probability.
    cumulative = (scaled - total.unsqueeze(-1)).exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = draws.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp_max(scaled.shape[-1] - 1)
