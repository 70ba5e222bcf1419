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
RPC_FITS = 1000  # questions x draws, at random, on which rpc is fitted: its standard error is then below 0.016
_RPC_ALL = 32  # samples up to which rpc is fitted at every N; above, at powers of two and the last
_ANSWERS = 20_000  # questions x draws that are enough to average the others over
_MOST_DRAWS = 10
_CELLS = 2_000_000  # of the largest array at a time
_RIGHT = np.uint64(2)  # stands for every right answer; hashes are odd, and 0 is none


@dataclass(frozen=True)
class Votes:
    """Of Q questions with k samples each."""

    right: dict[str, Floats]  # method -> [Q, k] expected accuracy among N = 1..k samples; NaN: not fitted (rpc)
    share: dict[str, Floats]  # "sc", "pc" -> [Q] share of the winner at N = k, a confidence; NaN: nobody answered


def vote(table: Table, mean_logprob: Floats, k: int, seed: int = 0, curve: bool = True) -> Votes:
    """Every method at every N up to k, which no question may have fewer samples than. Without `curve` rpc at k alone.

    `mean_logprob` [rows of the table], NaN where there is none: such responses have a vote, and no mass.
    """
    starts, draw = table.starts, np.random.default_rng(seed)
    questions = len(starts)
    single = len(table) == k * questions and (k == 1 or not curve)  # every draw would be the same
    answer = np.where(table.correct, _RIGHT, table.answer)
    prob = np.nan_to_num(np.exp(np.minimum(mean_logprob, 0.0)), nan=0.0)

    def block_of(rows: Ints) -> _Block:
        return _Block(answer[rows], prob[rows], table.completion[rows])

    draws = 1 if single else _draws(_ANSWERS, questions)
    right = {method: np.zeros((questions, k)) for method in ("sc", "ppl", "pc")}
    share = {method: np.zeros(questions) for method in ("sc", "pc")}
    for _ in range(draws):
        rows = _drawn(table, starts, k, draw)
        for block in _blocks(questions, k):
            found = block_of(rows[block])
            for method, accuracy in right.items():
                accuracy[block] += found.right[method]
            for method, of_winner in share.items():
                of_winner[block] += found.share[method]
    right = {method: accuracy / draws for method, accuracy in right.items()}
    right["rpc"] = np.full((questions, k), np.nan)
    fitted = np.sort(draw.permutation(questions)[:RPC_FITS])
    times = 1 if single else _draws(RPC_FITS, questions)
    of_unit = np.isin(table.unit, table.unit[starts[fitted]]) if len(fitted) < questions else slice(None)
    part, place = table.take(of_unit), np.arange(len(table))[of_unit]
    rows = np.concatenate([place[_drawn(part, part.starts, k, draw)] for _ in range(times)])
    by_rpc = np.concatenate([block_of(rows[block]).rpc(curve) for block in _blocks(len(rows), k)])
    right["rpc"][fitted] = by_rpc.reshape(times, len(fitted), k).mean(axis=0)
    few = min(FEWEST_TO_PRUNE - 1, k)  # samples that are never pruned: the average over more draws is there already
    right["rpc"][fitted, :few] = right["pc"][fitted, :few]
    return Votes(right, {method: of_winner / draws for method, of_winner in share.items()})


def _draws(enough: int, questions: int) -> int:
    return min(_MOST_DRAWS, max(1, enough // max(questions, 1)))


def _drawn(table: Table, starts: Ints, k: int, draw: np.random.Generator) -> Ints:
    """[Q, k] rows of k random samples of each question, in random order."""
    order = np.argsort(table.unit + draw.random(len(table)))
    return order[starts[:, None] + np.arange(k)]


def _blocks(questions: int, k: int) -> Iterator[slice]:
    size = max(1, _CELLS // (k * (k + 1)))
    return (slice(start, start + size) for start in range(0, questions, size))


class _Block:
    """Some questions: `right` method -> [B, k], `share` method -> [B], see `Votes`."""

    def __init__(self, answer: Hashes, prob: Floats, completion: Hashes) -> None:
        samples = np.arange(answer.shape[1])
        self._prob, self._known = prob, answer != 0
        equal = answer[:, :, None] == answer[:, None, :]
        # Number of an answer: 0 for the right one, else 1 + where it stands first.
        self._answer = np.where(answer == _RIGHT, 0, 1 + equal.argmax(axis=2))
        repeated = equal & (completion[:, :, None] == completion[:, None, :])
        first = repeated.argmax(axis=2) == samples
        self._mass = np.where(self._known & first, prob, 0.0)
        weights = {"sc": self._known.astype(float), "ppl": np.where(self._known, prob, 0.0), "pc": self._mass}
        self.right: dict[str, Floats] = {}
        self.share: dict[str, Floats] = {}
        for method, weight in weights.items():
            self.right[method], mass = self._grow(weight, np.maximum if method == "ppl" else np.add)
            total = len(samples) if method == "sc" else mass.sum(axis=1)
            with np.errstate(invalid="ignore"):
                self.share[method] = np.where(self._known.any(axis=1), mass.max(axis=1) / total, np.nan)

    def rpc(self, curve: bool) -> Floats:
        """[B, k] expected accuracy at each N from five samples on; NaN where it is not fitted."""
        rows, k = self._prob.shape
        right = np.full((rows, k), np.nan)
        counts = [n for n in range(FEWEST_TO_PRUNE, k + 1) if n == k or (curve and (k <= _RPC_ALL or n & (n - 1) == 0))]
        at_once = max(1, _CELLS // (rows * k))
        for start in range(0, len(counts), at_once):
            part = counts[start : start + at_once]
            given = np.repeat(np.arange(k) < np.array(part)[:, None], rows, axis=0)  # [counts * B, k]
            keep = keep_matrix(np.tile(self._prob, (len(part), 1)), given).reshape(len(part), rows, k)
            for n, kept in zip(part, keep, strict=True):
                right[:, n - 1] = self._once(self._mass[:, :n] * kept[:, :n])
        return right

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

    def _once(self, weight: Floats) -> Floats:
        """[B] expected accuracy given the weights [B, N] of the first N samples."""
        rows, width = len(weight), self._answer.shape[1] + 1
        answer, known = self._answer[:, : weight.shape[1]], self._known[:, : weight.shape[1]]
        cell = (np.arange(rows)[:, None] * width + answer)[known]
        mass, given = np.zeros(rows * width), np.zeros(rows * width, dtype=bool)
        np.add.at(mass, cell, weight[known])
        given[cell] = True
        return _won(mass.reshape(rows, width), given.reshape(rows, width))


def _won(mass: Floats, given: Bools) -> Floats:
    """[B] share of right answers among those with the largest mass; 0 where none was given."""
    top = np.where(given, mass, -1.0).max(axis=1, keepdims=True)
    winners = given & (mass >= top * (1 - TIE))
    return winners[:, 0] / np.maximum(winners.sum(axis=1), 1)
