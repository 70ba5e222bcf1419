"""How ranks that are separate processes agree on who says what went wrong."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from capo_megatron import launch


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The environment of a rank under a launcher, whose store this is."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.5)
    return store


def test_the_same_mistake_is_said_by_the_first_rank_that_finds_it(launcher: TCPStore) -> None:
    assert [launch.first_to_say("a.jsonl: empty."), launch.first_to_say("a.jsonl: empty.")] == [True, False]
    assert launch.first_to_say("another mistake")


def test_a_rank_that_lost_the_others_is_silent_if_one_of_them_said_why(launcher: TCPStore) -> None:
    assert not launch.explained_by_another_rank()
    launch.first_to_say("the disk is full")
    assert launch.explained_by_another_rank()


def test_what_an_earlier_attempt_of_the_launcher_said_does_not_count(
    launcher: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.first_to_say("the disk is full")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not launch.explained_by_another_rank()
    assert launch.first_to_say("the disk is full")


def test_without_a_store_a_mistake_is_said_and_nothing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launch.first_to_say("a.jsonl: empty.")
    assert not launch.explained_by_another_rank()
