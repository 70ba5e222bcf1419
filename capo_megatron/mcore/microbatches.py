"""Which rows of a mini-batch go through the model together, and on which data-parallel rank.

The plan is made from row lengths alone, identically on every rank. It changes speed and memory, never results: the loss
is a weighted sum over rows (`TrainBatch.weights`), whoever computes which row.

Invariants, each tested:
1. every row is in exactly one micro-batch;
2. every rank has the same number of micro-batches, a multiple of `multiple` (pipelines hang or refuse otherwise);
3. no micro-batch has more than `budget` padded tokens, unless a single row alone is longer;
4. the j-th micro-batches of all ranks have similar sizes, so that no rank waits for another;
5. rows of much different lengths are kept apart: no cut of a micro-batch in two would save more padding than
   `CUT_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Sequence

Rows = tuple[int, ...]

CUT_TOKENS = 512  # what one more micro-batch costs (launches, smaller products), in padded tokens computed for nothing


def plan(lengths: Sequence[int], budget: int, ranks: int = 1, multiple: int = 1) -> list[list[Rows]]:
    """Micro-batches of row indices per data-parallel rank, longest rows first.

    A micro-batch may be empty where there are fewer rows than micro-batches are needed: the caller then runs a row of
    weight zero, because every rank has to take part in every pipeline step.

    Args:
        lengths: tokens of each row, prompt and response.
        budget: padded tokens of a micro-batch, at most.
        ranks: data-parallel ranks.
        multiple: the number of micro-batches of a rank must be a multiple of this (interleaved pipelines need it).
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups = [part for rows in _pack(longest_first, lengths, budget) for part in _cut(rows, lengths)]
    per_rank = -(-max(len(groups), 1) // ranks)
    wanted = -(-per_rank // multiple) * multiple * ranks
    while len(groups) < wanted and (widest := _widest(groups, lengths)) is not None:
        rows = groups[widest]
        groups[widest : widest + 1] = [rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]]
    groups += [()] * (wanted - len(groups))
    groups.sort(key=lambda rows: -_padded(rows, lengths))
    return [groups[rank::ranks] for rank in range(ranks)]


def _pack(rows: list[int], lengths: Sequence[int], budget: int) -> list[Rows]:
    """Consecutive runs of rows that fit the budget; rows come longest first, so the first of a run sets its width."""
    groups: list[Rows] = []
    current: list[int] = []
    for row in rows:
        if current and lengths[current[0]] * (len(current) + 1) > budget:
            groups.append(tuple(current))
            current = []
        current.append(row)
    return [*groups, tuple(current)] if current else groups


def _cut(rows: Rows, lengths: Sequence[int]) -> list[Rows]:
    """`rows`, longest first, in as many pieces as it pays to have: what is behind a cut is padded to fewer tokens."""
    longest, count = lengths[rows[0]], len(rows)
    saved, place = max(((longest - lengths[row]) * (count - place), place) for place, row in enumerate(rows))
    return [rows] if saved <= CUT_TOKENS else [*_cut(rows[:place], lengths), *_cut(rows[place:], lengths)]


def _padded(rows: Rows, lengths: Sequence[int]) -> int:
    return len(rows) * max((lengths[row] for row in rows), default=0)


def _widest(groups: list[Rows], lengths: Sequence[int]) -> int | None:
    """Index of the micro-batch with the most padded tokens among those that can be split."""
    splittable = [index for index, rows in enumerate(groups) if len(rows) > 1]
    return max(splittable, key=lambda index: _padded(groups[index], lengths), default=None)
