"""Runs that are asked to stop, or whose launcher is gone, finish their step, save it and leave nothing behind."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import psutil
import pytest

from capo_megatron.runlog import read_rows
from tests.e2e import test_kill as kills
from tests.e2e.test_kill import (
    END_S,
    STEPS,
    assert_continues,
    assert_ends,
    family,
    saved_step,
    started,
    train_in_ranks,
    uninterrupted,
    wait_for_a_moment,
)

pytestmark = kills.pytestmark
place, chance = kills.place, kills.chance


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is needed")
def test_ranks_whose_launcher_is_killed_save_their_step_and_end(place: Path, chance: random.Random) -> None:
    folder = place / "orphans"
    with started(place, "orphans", "TP2") as process:
        wait_for_a_moment(process, folder / "metrics.jsonl", chance)
        members = family(process)
        process.kill()
        _, left = psutil.wait_procs([member for member in members if member.pid != process.pid], timeout=END_S)
    assert not left, left
    at, before = saved_step(folder), read_rows(folder / "metrics.jsonl")
    assert at < STEPS and before[-1]["step"] == at, "what was made is saved"


def test_a_run_that_is_asked_to_stop_saves_its_step_and_continues(place: Path, chance: random.Random) -> None:
    folder = place / "stopped"
    with started(place, "stopped", "TP2") as process:
        wait_for_a_moment(process, folder / "metrics.jsonl", chance)
        members = family(process)
        process.send_signal(signal.SIGTERM)
        assert_ends(process, members, 128 + signal.SIGTERM)
    at, before = saved_step(folder), read_rows(folder / "metrics.jsonl")
    assert before[-1]["step"] == at, "what was made is saved"
    assert (place / "stopped.err").read_text() == ""
    assert f"stopped at step {at}/{STEPS}" in (place / "stopped.out").read_text()
    train_in_ranks(place, "stopped", "TP2")
    assert_continues(folder, before, uninterrupted(place, "TP2"), at)
