"""A run whose engine is a server trains as one whose engine is its own, and ends in time when the server dies."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capo_megatron.cli import main
from capo_megatron.rollout.channel import SECRET
from capo_megatron.runlog import read_rows
from tests.e2e.commands import TREE, write_config
from tests.e2e.serving import TOKEN, engine_server, free_address, kill, separate
from tests.e2e.test_kill import REWARD
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

END_S = 60.0
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("separate")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    address = free_address()
    (place / "reward.py").write_text(REWARD)
    config = write_config(
        place,
        rollout=TREE["rollout"] | separate(address),
        reward={"kind": f"{place / 'reward.py'}:even", "workers": 1},
        train=TREE["train"] | {"steps": STEPS},
    )
    with engine_server(config, address) as process:
        yield str(config), process


def rows(folder: Path) -> list[dict[str, Any]]:
    """All that is no time, nor rounding between engine and policy."""
    left_out = ("time", "seconds/", "tokens_per_second/", "refit/", "engine/")
    found = [
        {name: value for name, value in row.items() if value is not None and not name.startswith(left_out)}
        for row in read_rows(folder / "metrics.jsonl")
    ]
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    return found


def train_with_the_secret(arguments: list[str]) -> int:
    """In a rank, whose environment is that of the server it is forked from."""
    os.environ[SECRET] = TOKEN
    return main(arguments)


def test_a_run_with_a_server_is_the_run_without(place: Path, server: tuple[str, subprocess.Popen[str]]) -> None:
    colocated = ["rollout.placement=colocated", "rollout.separate.servers=[]"]
    assert main(["train", server[0], f"output={place / 'together'}", *colocated]) == 0
    apart = ["train", server[0], f"output={place / 'apart'}", "parallel.tensor=2"]
    assert run_ranks(train_with_the_secret, 2, apart) == [0, 0]
    found, wanted = rows(place / "apart"), rows(place / "together")
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert any(row["train/grad_norm"] > 0 for row in found), "nothing was trained"


def test_a_server_that_is_killed_while_it_samples_ends_the_run_in_time(
    place: Path,
    server: tuple[str, subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SECRET, TOKEN)
    sampling = ["rollout.prompts=64", "rollout.samples=32", "train.steps=1000", "eval.every=0", "checkpoint.every=1"]
    ended: list[float] = []

    def end() -> None:
        metrics = place / "killed" / "metrics.jsonl"
        while not metrics.is_file() or not read_rows(metrics):
            time.sleep(0.02)
        kill(server[1])
        ended.append(time.monotonic())

    threading.Thread(target=end, daemon=True).start()
    assert main(["train", server[0], f"output={place / 'killed'}", *sampling]) == 2
    assert time.monotonic() - ended[0] < END_S
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "engine server 127.0.0.1:" in said[0]
    assert "the same train command" in said[0] and "newest checkpoint" in said[0]
