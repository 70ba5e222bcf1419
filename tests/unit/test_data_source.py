import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capo_megatron.data import ShuffledSource
from capo_megatron.errors import DataError
from capo_megatron.types import Problem


def problems(count: int, prefix: str = "p") -> list[Problem]:
    return [Problem(f"{prefix}{n}", "", (), "") for n in range(count)]


def ids(taken: list[Problem]) -> list[str]:
    return [problem.id for problem in taken]


# What a run does with its source: take some, or ask for some of those taken last to be repeated.
ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "repeat"]), st.integers(0, 17)), max_size=12)


def play(source: ShuffledSource, actions: list[tuple[str, int]], resume_at: int | None = None) -> list[str]:
    """Ids in the order taken; with `resume_at`, through a fresh source restored from JSON before that action."""
    taken: list[Problem] = []
    for number, (action, count) in enumerate(actions):
        if number == resume_at:
            state = json.loads(json.dumps(source.state_dict()))
            source = ShuffledSource(problems(len(source)), seed=5)
            source.load_state_dict(state)
        if action == "take":
            taken += source.take(count)
        else:
            source.repeat(taken[-count:])
    return ids(taken)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), ACTIONS, st.integers(0, 11))
def test_resuming_anywhere_equals_not_stopping(size: int, actions: list[tuple[str, int]], resume_at: int) -> None:
    whole = play(ShuffledSource(problems(size), seed=5), actions)
    assert play(ShuffledSource(problems(size), seed=5), actions, resume_at) == whole


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 20), max_size=8), st.booleans())
def test_every_pass_gives_every_problem_once_however_it_is_taken(size: int, counts: list[int], shuffle: bool) -> None:
    source = ShuffledSource(problems(size), seed=1, shuffle=shuffle)
    taken = [name for count in counts for name in ids(source.take(count))]
    assert len(taken) == sum(counts)
    for start in range(0, len(taken) - size + 1, size):
        assert Counter(taken[start : start + size]) == Counter(ids(problems(size)))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    source = ShuffledSource(problems(50), seed=0)
    orders = [ids(source.take(50)), ids(source.take(50)), ids(ShuffledSource(problems(50), seed=1).take(50))]
    assert len({tuple(order) for order in orders}) == 3
    assert all(order != ids(problems(50)) for order in orders)


def test_without_shuffling_the_order_of_the_file_stays() -> None:
    source = ShuffledSource(problems(3), seed=0, shuffle=False)
    assert ids(source.take(7)) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


def test_the_order_is_the_same_in_every_process() -> None:
    source = ShuffledSource(problems(8), seed=3)
    assert " ".join(ids(source.take(8))) == "p4 p5 p7 p3 p6 p1 p2 p0"
    assert " ".join(ids(source.take(8))) == "p2 p0 p5 p4 p3 p6 p1 p7"


def test_repeats_come_first_in_the_order_asked_for() -> None:
    source = ShuffledSource(problems(5), seed=0)
    new = ids(ShuffledSource(problems(5), seed=0).take(5))
    first = source.take(2)
    source.repeat([first[1], first[0], first[1]])
    assert ids(source.take(2)) == [new[1], new[0]]
    assert ids(source.take(3)) == [new[1], new[2], new[3]]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (ShuffledSource(problems(4), seed=0), "number"),
        (ShuffledSource(problems(5, "q"), seed=0), "fingerprint"),
        (ShuffledSource(problems(5)[::-1], seed=0), "fingerprint"),
        (ShuffledSource(problems(5), seed=1), "seed"),
        (ShuffledSource(problems(5), seed=0, shuffle=False), "shuffle"),
    ],
)
def test_a_state_of_other_data_is_refused(other: ShuffledSource, name: str) -> None:
    before = other.state_dict()
    with pytest.raises(DataError, match=f"cannot resume, the {name} of the training problems was"):
        other.load_state_dict(ShuffledSource(problems(5), seed=0).state_dict())
    assert other.state_dict() == before


def test_problems_that_cannot_be_ordered_are_refused() -> None:
    with pytest.raises(DataError, match="no problems"):
        ShuffledSource([], seed=0)
    with pytest.raises(DataError, match="2 problems have only 1 ids"):
        ShuffledSource([*problems(1), *problems(1)], seed=0)
    with pytest.raises(DataError, match="cannot repeat problem 'q0'"):
        ShuffledSource(problems(1), seed=0).repeat(problems(1, "q"))
