"""Which rows of a mini-batch go through the model together, and on which data-parallel rank.

The plan is made from row lengths alone, identically on every rank. It changes speed and memory, never results: the loss
is a weighted sum over rows (`TrainBatch.weights`), whoever computes which row.

Rows are dealt to the ranks in turns, longest first, so that all have the same work. Invariants, each tested:
1. every row is in exactly one micro-batch;
2. every rank has the same number of micro-batches, a multiple of `multiple` (pipelines hang or refuse otherwise);
3. no micro-batch has more than `budget` padded tokens, unless a single row alone is longer;
4. the j-th micro-batches of all ranks hold the same turns: no rank waits longer than a row and `CUT_TOKENS` take;
5. rows of much different lengths are kept apart: no cut of a micro-batch in two would save more padding than
   `CUT_TOKENS` (give or take a row where there are several ranks).
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
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    widths = [lengths[row] for row in rows[::ranks]]  # of each turn, in which every rank gets one row
    parts = [part for run in _pack(widths, budget) for part in _cut(run, widths)]
    while not parts or len(parts) % multiple:
        widest = max((part for part in parts if len(part) > 1), key=lambda part: _padded(part, widths), default=None)
        if widest is None:
            parts.append(range(0))
        else:
            middle, place = (widest.start + widest.stop + 1) // 2, parts.index(widest)
            parts[place : place + 1] = [range(widest.start, middle), range(middle, widest.stop)]
    return [
        [tuple(rows[part.start * ranks + rank : part.stop * ranks : ranks]) for part in parts] for rank in range(ranks)
    ]


def _pack(widths: Sequence[int], budget: int) -> list[range]:
    """Runs of turns that fit the budget; widths fall, so the first of a run is that of all of them."""
    runs, start = [], 0
    for turn in range(1, len(widths) + 1):
        if turn == len(widths) or widths[start] * (turn + 1 - start) > budget:
            runs.append(range(start, turn))
            start = turn
    return runs


def _cut(run: range, widths: Sequence[int]) -> list[range]:
    """`run` in as many pieces as it pays to have: what is behind a cut is padded to less."""
    saved, place = max(((widths[run.start] - widths[turn]) * (run.stop - turn), turn) for turn in run)
    if saved <= CUT_TOKENS:
        return [run]
    return [*_cut(range(run.start, place), widths), *_cut(range(place, run.stop), widths)]


def _padded(part: range, widths: Sequence[int]) -> int:
    return len(part) * widths[part.start]
