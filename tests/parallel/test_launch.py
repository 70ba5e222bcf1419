"""The launcher of test ranks: results in order, the first traceback, and an end to ranks that hang."""

from __future__ import annotations

import os
import time

import pytest

from tests.parallel.launch import RankFailed, run_ranks

pytestmark = pytest.mark.parallel


def place(word: str) -> tuple[str, str, str]:
    return word, os.environ["RANK"], os.environ["WORLD_SIZE"]


def fail_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one gives up")
    time.sleep(60)  # as a rank waits in a collective for the one that is gone


def hang() -> None:
    time.sleep(60)


def die() -> None:
    os._exit(3)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(place, 3, "a") == [("a", "0", "3"), ("a", "1", "3"), ("a", "2", "3")]


def test_the_first_failure_ends_all_ranks_and_shows_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1:.*in fail_on_rank_one.*ValueError: rank one gives up"):
        run_ranks(fail_on_rank_one, 2)
    assert time.monotonic() - started < 30


def test_ranks_that_hang_are_ended_and_ranks_that_die_are_named() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not finish in time"):
        run_ranks(hang, 2, timeout_s=2.0)
    with pytest.raises(RankFailed, match="rank 0 died without a traceback"):
        run_ranks(die, 1)
