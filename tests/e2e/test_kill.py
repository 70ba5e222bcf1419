"""A run that is killed, or asked to stop, goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from capo_megatron.cli import main
from capo_megatron.runlog import read_rows
from tests.e2e.commands import TREE, write_config
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

LAYOUTS = {"one rank": (1, ()), "TP2": (2, ("parallel.tensor=2",)), "PP2 x DP2": (4, ("parallel.pipeline=2",))}
STEPS, EVERY, FOLLOWING = 12, 2, 5
# A resumed run repeats the very operations on the same layout; the margin is for libraries that choose among kernels.
TOLERANCE = 1e-5
# A survivor that did not notice a dead peer by itself would be killed by torch's launcher after 30 s.
END_S = 25.0
START_S = 240.0  # until the first steps are made, on cores that are shared

# Graded in processes of their own, which must not be left behind; about half of what a random model says is correct.
REWARD = """
def even(problem, response):
    digits = [int(character) for character in response if character.isdigit()]
    return bool(digits) and sum(digits) % 2 == 0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "reward.py").write_text(REWARD)
    write_config(
        folder,
        model=TREE["model"] | {"shape": TREE["model"]["shape"] | {"num_hidden_layers": 2}},
        data=TREE["data"] | {"task_size": 40, "validation_size": 4},
        reward={"kind": f"{folder / 'reward.py'}:even", "workers": 1},
        train=TREE["train"] | {"steps": STEPS, "lr_schedule": "cosine", "lr_warmup_steps": 2},
        checkpoint={"every": EVERY},
        eval={"every": 4, "samples": 4},
        algorithm={"kind": "capo", "ref_high": "quartile", "ref_low": "quartile"},
    )
    return folder


@pytest.fixture(scope="module")
def chance() -> random.Random:
    """Another moment every time; the seed is shown when a test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def arguments(place: Path, output: str, layout: str) -> list[str]:
    return ["train", str(place / "run.yaml"), f"output={place / output}", *LAYOUTS[layout][1]]


def train_in_ranks(place: Path, output: str, layout: str) -> None:
    """The command, by ranks of a warm server: what `--nproc` starts, without the seconds of its imports."""
    assert set(run_ranks(main, LAYOUTS[layout][0], arguments(place, output, layout), timeout_s=START_S)) == {0}


@cache
def uninterrupted(place: Path, layout: str) -> list[dict[str, Any]]:
    output = f"{layout} uninterrupted"
    train_in_ranks(place, output, layout)
    return read_rows(place / output / "metrics.jsonl")


@contextlib.contextmanager
def started(place: Path, output: str, layout: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a user types it, with `--nproc`; its output goes to files beside the run's folder."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    command = [sys.executable, "-m", "capo_megatron", *arguments(place, output, layout)]
    command += ["--nproc", str(LAYOUTS[layout][0])]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (place / f"{output}.out").open("w") as out, (place / f"{output}.err").open("w") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, text=True)
        try:
            yield process
        finally:
            for left in family(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            process.wait()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher, its ranks and their grading processes."""
    try:
        launcher = psutil.Process(process.pid)
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for_a_moment(process: subprocess.Popen[str], metrics: Path, chance: random.Random) -> None:
    """Return at some moment of one of the first steps, the third at the earliest."""
    step, deadline = chance.randint(3, 5), time.monotonic() + START_S
    while not metrics.is_file() or (rows := read_rows(metrics))[-1:] == [] or rows[-1]["step"] < step:
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, rows[-1]["seconds/step"]))


def assert_ends(process: subprocess.Popen[str], members: list[psutil.Process], code: int) -> None:
    """The launcher returns `code` within seconds, and nothing that it started is left."""
    try:
        assert process.wait(timeout=END_S) == code
    except subprocess.TimeoutExpired:
        pytest.fail(f"the launcher is still there after {END_S} s")
    _, left = psutil.wait_procs(members[1:], timeout=10.0)
    assert left == []


def saved_step(folder: Path) -> int:
    return int((folder / "checkpoints" / "latest").read_text().removeprefix("step_"))


def assert_continues(folder: Path, before: list[dict[str, Any]], want: list[dict[str, Any]], at: int) -> None:
    """Each step is there once, in order; those up to `at` were not made again; all are those of `want`."""
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[: at + 1] == before[: at + 1]
    assert at <= STEPS - FOLLOWING, "killed too late to say anything"
    for got, expected in zip(rows, want, strict=True):
        for name, value in comparable(expected).items():
            assert got[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-7), f"step {got['step']}, {name}"
    assert {"train/loss", "train/grad_norm", "reward/mean", "validation/accuracy"} <= comparable(want[-1]).keys()


def comparable(row: dict[str, Any]) -> dict[str, float]:
    """All that is no time, nor rounding between the engine and the policy on responses that each start draws anew."""
    return {
        name: value
        for name, value in row.items()
        if name != "time" and not name.startswith(("seconds/", "tokens_per_second/", "refit/", "engine/"))
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_whose_rank_is_killed_continues_as_if_uninterrupted(
    layout: str, place: Path, chance: random.Random
) -> None:
    folder = place / layout
    with started(place, layout, layout) as process:
        wait_for_a_moment(process, folder / "metrics.jsonl", chance)
        members = family(process)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == LAYOUTS[layout][0] and len(members) > 2 * len(ranks), "ranks and grading processes"
        os.kill(chance.choice(ranks).pid, signal.SIGKILL)
        assert_ends(process, members, 128 + signal.SIGKILL)
    assert "was killed by SIGKILL" in (place / f"{layout}.err").read_text()
    at, before = saved_step(folder), read_rows(folder / "metrics.jsonl")
    train_in_ranks(place, layout, layout)
    assert_continues(folder, before, uninterrupted(place, layout), at)
