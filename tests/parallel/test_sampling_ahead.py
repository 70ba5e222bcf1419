"""Rollouts one step ahead on several ranks: resumed runs equal uninterrupted ones, and failures end all ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from capo_megatron.errors import CapoError
from capo_megatron.types import Grade, Problem, Verdict
from tests.e2e.commands import TREE, write_config
from tests.parallel.launch import RankFailed, run_ranks
from tests.parallel.test_family import rows

pytestmark = pytest.mark.parallel

STEPS, SAVED = 4, 2  # a save every other step
LAYOUTS = {"one rank": (1, ()), "TP2": (2, ("parallel.tensor=2",)), "DP2": (2, ())}
ENDS_S = 30.0  # in which what is not going to hang has ended, on cores that are shared
TOLERANCE = 1e-5  # float32 on two layouts: sums in another order


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml: DAPO's replaced groups, both corrections, validation, saves."""
    folder = tmp_path_factory.mktemp("ahead")
    algorithm = {"kind": "dapo", "importance_cap": 1.05, "importance_level": "sequence", "importance_bound": 1.5}
    sections = {
        "rollout": TREE["rollout"] | {"prompts": 8, "samples": 6, "async_steps": 1},
        "data": TREE["data"] | {"task_size": 60},
        "algorithm": algorithm,
        "train": TREE["train"] | {"steps": STEPS},
    }
    write_config(folder, **sections, checkpoint={"every": SAVED, "keep": 9}, log={"console": "off", "samples": 0})
    return folder


class Even:
    """Right are responses whose digits add up to an even number: about half of what a random model says."""

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        digits = [[int(mark) for mark in text if mark.isdigit()] for text in responses]
        right = [bool(found) and sum(found) % 2 == 0 for found in digits]
        return [Grade(Verdict.CORRECT if value else Verdict.WRONG, float(value)) for value in right]

    def close(self) -> None:
        return None


def train(place: str, output: str, layout: tuple[str, ...], dies_at: int = 0) -> int:
    """Train; with `dies_at`, until a rank ends without a word while that step is trained and the next one sampled."""
    from capo_megatron import assemble
    from capo_megatron.config import load
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.policy import MegatronPolicy

    config = load(Path(place) / "run.yaml", [f"output={Path(place) / output}", *layout])
    update = MegatronPolicy.train_step

    def dying(policy: Any, *arguments: Any) -> Any:
        if policy.version == (dies_at - 1) * config.train.minibatches and os.environ["RANK"] == "0":
            os._exit(9)
        return update(policy, *arguments)

    MegatronPolicy.train_step = dying if dies_at else update
    ranks = runtime.start(config.parallel, config.seed)
    accepted = assemble.accept(config, ranks.size)
    return assemble.train_on(ranks, config, accepted, Even(), lambda _: None)


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Rows without times, nor the gap on responses that each start draws anew."""
    ignored = ("time", "seconds/", "tokens_per_second/", "refit/")
    return [{name: row[name] for name in row if not name.startswith(ignored)} for row in rows(folder)]


@cache
def uninterrupted(place: Path, layout: str) -> list[dict[str, Any]]:
    size, options = LAYOUTS[layout]
    assert run_ranks(train, size, str(place), f"{layout} whole", options) == [STEPS] * size
    return comparable(place / f"{layout} whole")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_digit_for_digit_with_what_was_sampled_before_it_ended(layout: str, place: Path) -> None:
    want, (size, options), folder = uninterrupted(place, layout), LAYOUTS[layout], place / layout
    whole = place / f"{layout} whole" / "checkpoints"
    if layout == "TP2":  # a rank dies while a step trains and the next one is sampled
        began = time.monotonic()
        with pytest.raises(RankFailed):
            run_ranks(train, size, str(place), layout, options, SAVED + 2)
        assert time.monotonic() - began < ENDS_S
        assert [row["step"] for row in rows(folder)] == list(range(1, SAVED + 2))
    else:
        shutil.copytree(whole / f"step_{SAVED:06d}", folder / "checkpoints" / f"step_{SAVED:06d}")
    run_ranks(train, size, str(place), layout, options)
    assert comparable(folder)[-(STEPS - SAVED) :] == want[SAVED:]
    held = load_file(whole / f"step_{SAVED:06d}" / "tensors.safetensors")
    assert held["response_mask"].shape[0] == 48
    assert not (whole / f"step_{STEPS:06d}" / "tensors.safetensors").exists(), "nothing follows the last step"


def test_the_runs_show_what_they_are_meant_to(place: Path) -> None:
    for layout in LAYOUTS:
        logged = uninterrupted(place, layout)
        assert [row["rollout/lag"] for row in logged] == [0, 2, 2, 2]
        assert max(row["rollout/rejected"] for row in logged) > 0, "groups are replaced"
        assert max(row["train/importance_clip_share"] for row in logged[1:]) > 0
        assert max(row["importance/rejected"] for row in logged[1:]) > 0
        assert logged[0]["train/importance_clip_share"] == logged[0]["importance/rejected"] == 0, "no lag, no gap"
        for row in rows(place / f"{layout} whole")[:-1]:
            assert 0 <= row["seconds/overlapped"] <= row["seconds/ahead"]


def test_a_rollout_that_was_sampled_ahead_is_trained_on_by_another_layout(place: Path) -> None:
    whole = place / "TP2 whole"
    want = uninterrupted(place, "TP2")
    (folder := place / "moved" / "checkpoints").mkdir(parents=True)
    (folder / f"step_{SAVED:06d}").symlink_to(whole / "checkpoints" / f"step_{SAVED:06d}")
    run_ranks(train, 1, str(place), "moved", ("train.steps=3",))
    (got,) = comparable(place / "moved")
    assert got["step"] == SAVED + 1
    for name in ("train/loss", "train/grad_norm", "reward/mean", "importance/rejected"):
        assert got[name] == pytest.approx(want[SAVED][name], rel=10 * TOLERANCE, abs=TOLERANCE), name


def failing(place: str, rank: int, beside: bool) -> tuple[str, float]:
    """The error of a run in which one rank cannot grade: its second rollout beside a training, or an update."""
    from capo_megatron import assemble
    from capo_megatron.config import load
    from capo_megatron.errors import RewardError, TrainingError
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.policy import MegatronPolicy

    config = load(
        Path(place) / "run.yaml", [f"output={Path(place) / f'failing {rank} {beside}'}", "algorithm.kind=grpo"]
    )
    ranks = runtime.start(config.parallel, config.seed)
    accepted = assemble.accept(config, ranks.size)
    reward = Even()
    grade, calls = reward.grade, []

    def refuse(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and beside and ranks.rank == rank:
            raise RewardError("no grades today")
        if len(calls) == 2 and not beside:
            while True:
                time.sleep(0.001)
        return grade(*arguments)

    def stop(*_: Any) -> Any:
        raise TrainingError("no updates today")

    reward.grade = refuse
    if not beside:
        MegatronPolicy.train_step = stop
    began = time.monotonic()
    try:
        assemble.train_on(ranks, config, accepted, reward, lambda _: None)
    except CapoError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "none", 0.0


def test_what_one_ranks_thread_raises_is_raised_on_all_ranks(place: Path) -> None:
    found = run_ranks(failing, 2, str(place), 1, True)
    assert [text for text, _ in found] == ["RewardError: rank 1: no grades today"] * 2
    assert max(seconds for _, seconds in found) < ENDS_S


def test_an_error_in_training_ends_the_sampling_of_all_ranks(place: Path) -> None:
    found = run_ranks(failing, 2, str(place), 1, False)
    assert [text for text, _ in found] == ["TrainingError: no updates today"] * 2
    assert max(seconds for _, seconds in found) < ENDS_S


def collectives(count: int) -> bool:
    """Two threads gather at the same time, each in its own team."""
    import threading

    from capo_megatron.config import ParallelConfig
    from capo_megatron.mcore import runtime

    ranks = runtime.start(ParallelConfig(), 0)
    beside = ranks.beside()
    wrong: list[Any] = []

    def work(team: Any, name: str) -> None:
        for number in range(count):
            if team.gather((name, number, team.rank)) != [(name, number, rank) for rank in range(team.size)]:
                wrong.append((name, number))

    thread = threading.Thread(target=work, args=(beside, "beside"))
    thread.start()
    work(ranks, "main")
    thread.join()
    assert beside.any(ranks.rank == 1) and not beside.any(False)
    beside.barrier()
    return not wrong


def test_two_threads_gather_at_once_without_meeting() -> None:
    assert run_ranks(collectives, 2, 200) == [True, True]
