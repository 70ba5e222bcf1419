"""A failure of one rank reaches all of them, in its own words."""

from __future__ import annotations

import pytest

from capo_megatron.agreement import gather_or_raise, on_first_rank
from capo_megatron.errors import DataError, RewardError
from capo_megatron.seams import Solo
from tests.unit.tiny_qwen2 import ThreadTeam, on_ranks


def test_outcomes_come_in_rank_order() -> None:
    assert on_ranks(3, lambda team: gather_or_raise(team, lambda: team.rank * 10)) == [[0, 10, 20]] * 3
    assert gather_or_raise(Solo(), lambda: 7) == [7]


def test_a_mistake_that_every_rank_finds_is_told_as_each_found_it() -> None:
    def work(team: ThreadTeam) -> list[None]:
        return gather_or_raise(team, fail)

    def fail() -> None:
        raise DataError("a.jsonl: empty.")

    assert [(type(error), str(error)) for error in on_ranks(2, work)] == [(DataError, "a.jsonl: empty.")] * 2


def test_a_failure_of_a_team_of_one_keeps_its_kind() -> None:
    def fail() -> None:
        raise RewardError("no worker")

    for action in (gather_or_raise, on_first_rank):
        with pytest.raises(RewardError, match=r"^no worker$"):
            action(Solo(), fail)


def test_only_the_first_rank_acts_and_all_hear_of_its_failure() -> None:
    acted: list[int] = []

    def work(team: ThreadTeam, fails: bool) -> None:
        def act() -> None:
            acted.append(team.rank)
            if fails:
                raise RewardError("the disk is full")

        on_first_rank(team, act)

    assert on_ranks(3, lambda team: work(team, False)) == [None] * 3
    outcomes = on_ranks(3, lambda team: work(team, True))
    assert [(type(error), str(error)) for error in outcomes] == [(RewardError, "the disk is full")] * 3
    assert acted == [0, 0]
