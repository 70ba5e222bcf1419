"""The invariants of micro-batches, in the order of the module's list, for any lengths, budget and number of ranks."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from capo_megatron.mcore.microbatches import CUT_TOKENS, Rows, plan

Lengths = list[int]
lengths = st.lists(st.integers(1, 400), max_size=60)
budgets = st.integers(1, 3000)
ranks = st.integers(1, 9)
multiples = st.integers(1, 4)


def padded(rows: Rows, of: Lengths) -> int:
    return len(rows) * max((of[row] for row in rows), default=0)


@given(lengths, budgets, ranks, multiples)
def test_every_row_is_in_exactly_one_micro_batch(of: Lengths, budget: int, ranks: int, multiple: int) -> None:
    found = chain.from_iterable(chain.from_iterable(plan(of, budget, ranks, multiple)))
    assert sorted(found) == list(range(len(of)))


@given(lengths, budgets, ranks, multiples)
@example([], 1, 2, 2)
@example([5], 1, 3, 2)
def test_all_ranks_have_the_same_number_which_the_schedule_accepts(
    of: Lengths, budget: int, ranks: int, multiple: int
) -> None:
    counts = {len(of_one) for of_one in plan(of, budget, ranks, multiple)}
    assert len(counts) == 1
    assert (count := counts.pop()) >= 1 and count % multiple == 0


@given(lengths, budgets, ranks, multiples)
def test_only_a_row_alone_may_exceed_the_budget(of: Lengths, budget: int, ranks: int, multiple: int) -> None:
    for rows in chain.from_iterable(plan(of, budget, ranks, multiple)):
        assert len(rows) <= 1 or padded(rows, of) <= budget


@given(lengths, budgets, ranks, multiples)
def test_ranks_wait_for_each_other_at_most_one_micro_batch_in_all(
    of: Lengths, budget: int, ranks: int, multiple: int
) -> None:
    rounds = [
        [padded(rows, of) for rows in together] for together in zip(*plan(of, budget, ranks, multiple), strict=True)
    ]
    for before, after in pairwise(rounds):
        assert min(before) >= max(after)
    assert sum(max(sizes) - min(sizes) for sizes in rounds) <= max(rounds[0])


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 30_000), ranks, multiples)
@example([400] + [1] * 59, 30_000, 1, 1)
def test_no_cut_would_save_more_padding_than_it_costs(of: Lengths, budget: int, ranks: int, multiple: int) -> None:
    for rows in chain.from_iterable(plan(of, budget, ranks, multiple)):
        for place in range(1, len(rows)):
            saved = padded(rows, of) - padded(rows[:place], of) - padded(rows[place:], of)
            assert saved <= CUT_TOKENS


@given(lengths, budgets)
def test_there_are_no_more_micro_batches_than_asked_for(of: Lengths, budget: int) -> None:
    """More ranks split or add micro-batches up to the next whole number per rank, not beyond."""
    alone = len(plan(of, budget)[0])
    for ranks in (2, 3, 8):
        assert len(plan(of, budget, ranks)[0]) == -(-alone // ranks)
