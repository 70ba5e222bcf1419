"""How often the answer that is selected among N samples is right, for every N: `selection` for many questions at once.

Answers of a question are equal if their texts are, and all that were graded right are equal. One that is wrong may
thus stand in several spellings, which costs it votes. What is tied for the first place counts with its share of right
answers. Numbers at N below the samples there are come from random draws without replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capo_megatron.evaluation.selection import FEWEST_TO_PRUNE, TIE, keep_matrix
from capo_megatron.evaluation.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

METHODS = ("sc", "ppl", "pc", "rpc")
RPC_QUESTIONS = 2000  # at most so many are fitted, drawn at random: with more, a standard error is below 0.01 anyway
_ANSWERS = 20_000  # questions x draws that are enough to average over
_MOST_DRAWS = 10
_CELLS = 2_000_000  # of the largest array at a time
_RIGHT = np.uint64(2)  # stands for every right answer; hashes are odd, and 0 is none


@dataclass(frozen=True)
class Votes:
    """Of Q questions with k samples each."""

    right: dict[str, Floats]  # method -> [Q, k] expected accuracy among N = 1..k samples; NaN: not fitted (rpc)
    share: dict[str, Floats]  # "sc", "pc" -> [Q] share of the winner at N = k, a confidence; NaN: nobody answered


def vote(table: Table, mean_logprob: Floats, k: int, seed: int = 0) -> Votes:
    """Every method at every N up to k, which no question may have fewer samples than.

    `mean_logprob` [rows of the table], NaN where there is none: such responses have a vote, and no mass.
    """
    starts = table.starts
    questions, draw = len(starts), np.random.default_rng(seed)
    answer = np.where(table.correct, _RIGHT, table.answer)
    prob = np.nan_to_num(np.exp(np.minimum(mean_logprob, 0.0)), nan=0.0)
    fitted = np.zeros(questions, dtype=bool)
    fitted[draw.permutation(questions)[:RPC_QUESTIONS]] = True
    draws = 1 if k == 1 else min(_MOST_DRAWS, max(1, _ANSWERS // max(questions, 1)))
    right = {method: np.zeros((questions, k)) for method in METHODS}
    share = {method: np.zeros(questions) for method in ("sc", "pc")}
    for _ in range(draws):
        rows = _drawn(table, starts, k, draw)
        for block in _blocks(questions, k):
            here = rows[block]
            found = _Block(answer[here], prob[here], table.completion[here], fitted[block])
            for method in METHODS:
                right[method][block] += found.right[method] / draws
            for method in share:
                share[method][block] += found.share[method] / draws
    right["rpc"][~fitted] = np.nan
    return Votes(right, share)


def _drawn(table: Table, starts: Ints, k: int, draw: np.random.Generator) -> Ints:
    """[Q, k] rows of k random samples of each question, in random order."""
    order = np.lexsort([draw.random(len(table)), table.unit])
    return order[starts[:, None] + np.arange(k)]


def _blocks(questions: int, k: int) -> Iterator[slice]:
    size = max(1, _CELLS // (k * (k + 1)))
    return (slice(start, start + size) for start in range(0, questions, size))


class _Block:
    """Some questions: `right` method -> [B, k], `share` method -> [B], see `Votes`."""

    def __init__(self, answer: Hashes, prob: Floats, completion: Hashes, fitted: Bools) -> None:
        samples = np.arange(answer.shape[1])
        self._known = answer != 0
        equal = answer[:, :, None] == answer[:, None, :]
        # Number of an answer: 0 for the right one, else 1 + where it stands first.
        self._answer = np.where(answer == _RIGHT, 0, 1 + equal.argmax(axis=2))
        repeated = equal & (completion[:, :, None] == completion[:, None, :])
        first = repeated.argmax(axis=2) == samples
        weights = {
            "sc": self._known.astype(float),
            "ppl": np.where(self._known, prob, 0.0),
            "pc": np.where(self._known & first, prob, 0.0),
        }
        self.right: dict[str, Floats] = {}
        self.share: dict[str, Floats] = {}
        for method, weight in weights.items():
            self.right[method], mass = self._grow(weight, np.maximum if method == "ppl" else np.add)
            total = len(samples) if method == "sc" else mass.sum(axis=1)
            with np.errstate(invalid="ignore"):
                self.share[method] = np.where(self._known.any(axis=1), mass.max(axis=1) / total, np.nan)
        self.right["rpc"] = self.right["pc"].copy()
        for count in range(FEWEST_TO_PRUNE, len(samples) + 1):
            keep = keep_matrix(prob[fitted, :count])
            self.right["rpc"][fitted, count - 1] = self._once(weights["pc"][fitted, :count] * keep, fitted)

    def _grow(self, weight: Floats, combine: np.ufunc) -> tuple[Floats, Floats]:
        """([B, k] expected accuracy as samples come in, [B, k + 1] mass of each answer in the end)."""
        rows, samples = weight.shape
        every = np.arange(rows)
        mass, given = np.zeros((rows, samples + 1)), np.zeros((rows, samples + 1), dtype=bool)
        right = np.empty((rows, samples))
        for sample in range(samples):
            at = (every, self._answer[:, sample])
            mass[at] = combine(mass[at], weight[:, sample])
            given[at] |= self._known[:, sample]
            right[:, sample] = _won(mass, given)
        return right, mass

    def _once(self, weight: Floats, rows: Bools) -> Floats:
        """[rows] expected accuracy given the weights [rows, N] of the first N samples."""
        answer, known = self._answer[rows, : weight.shape[1]], self._known[rows, : weight.shape[1]]
        shape = (len(weight), self._answer.shape[1] + 1)
        cell = (np.arange(len(weight))[:, None] * shape[1] + answer)[known]
        count = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
        mass = np.zeros(shape[0] * shape[1])
        np.add.at(mass, cell, weight[known])
        return _won(mass.reshape(shape), count > 0)


def _won(mass: Floats, given: Bools) -> Floats:
    """[B] share of right answers among those with the largest mass; 0 where none was given."""
    top = np.where(given, mass, -1.0).max(axis=1, keepdims=True)
    winners = given & (mass >= top * (1 - TIE))
    return winners[:, 0] / np.maximum(winners.sum(axis=1), 1)
