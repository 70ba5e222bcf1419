"""The invariants of micro-batches, in the order of the module's list, for any lengths, budget and number of ranks."""

from __future__ import annotations

from itertools import chain

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


@given(lengths, st.integers(1, 30_000), ranks, multiples)
@example([400] + [1] * 59, 30_000, 2, 1)
def test_ranks_wait_for_each_other_one_row_and_one_cut_at_most(
    of: Lengths, budget: int, ranks: int, multiple: int
) -> None:
    for together in zip(*plan(of, budget, ranks, multiple), strict=True):
        counts, sizes = [len(rows) for rows in together], [padded(rows, of) for rows in together]
        assert max(counts) - min(counts) <= 1
        assert max(sizes) - min(sizes) <= CUT_TOKENS + max((of[row] for rows in together for row in rows), default=0)


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 30_000), ranks, multiples)
@example([400] + [1] * 59, 30_000, 1, 1)
def test_no_cut_would_save_more_padding_than_it_costs(of: Lengths, budget: int, ranks: int, multiple: int) -> None:
    for rows in chain.from_iterable(plan(of, budget, ranks, multiple)):
        for place in range(1, len(rows)):
            saved = padded(rows, of) - padded(rows[:place], of) - padded(rows[place:], of)
            assert saved <= CUT_TOKENS + (0 if ranks == 1 else of[rows[0]])  # one rank's rows decide for all


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 3000), ranks)
def test_equal_rows_make_as_few_micro_batches_as_fit(rows: int, length: int, budget: int, ranks: int) -> None:
    of_each = -(-rows // ranks)
    assert len(plan([length] * rows, budget, ranks)[0]) == -(-of_each // max(1, budget // length))
