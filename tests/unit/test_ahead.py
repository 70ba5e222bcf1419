"""One rollout ahead: whose weights sample, what may happen meanwhile, what a checkpoint keeps, and how failures end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from capo_megatron.config import RunConfig
from capo_megatron.data import ShuffledSource
from capo_megatron.errors import CheckpointError, DataError, RolloutError, TrainingError
from capo_megatron.rollout.ahead import Ahead, packed, restored
from capo_megatron.rollout.collect import Collected, collect
from capo_megatron.runlog import log as runlog
from capo_megatron.runlog import read_rows
from capo_megatron.seams import SamplingParams, Solo
from capo_megatron.trainer import Parts, train
from capo_megatron.types import Grade, Problem, Reading, Verdict
from tests.unit.seam_fakes import (
    Events,
    FakeEngine,
    FakeReward,
    Killed,
    Saved,
    fake_algorithm,
    fake_config,
    fake_parts,
    logprob,
)
from tests.unit.test_trainer import die, mixed, rows
from tests.unit.tiny_qwen2 import engine_of, mixed_problems, tiny_model

SECONDS = 10.0  # in which what is not going to hang has long ended


def ahead_config(folder: Path, **sections: Any) -> RunConfig:
    return fake_config(folder, **sections | {"rollout": {"async_steps": 1} | sections.get("rollout", {})})


def sampling() -> list[threading.Thread]:
    """Threads that sample; one that has just said its last word has a moment to end."""
    threads = [thread for thread in threading.enumerate() if thread.name == "rollout ahead"]
    for thread in threads:
        thread.join(0.1)
    return [thread for thread in threads if thread.is_alive()]


# --- whose weights, and when ------------------------------------------------------------------------------------------


def test_a_step_is_sampled_by_the_weights_before_the_step_that_trains_meanwhile(tmp_path: Path) -> None:
    config, note = ahead_config(tmp_path, train={"steps": 5, "minibatches": 2}), Events()
    parts = fake_parts(config, note)
    weights = {}  # of each version
    note.watch = lambda _: weights.setdefault(parts.policy.version, parts.policy.weight)
    train(config, parts)
    first_parts = parts.policy.trained[::2]  # of the steps
    assert [part.rollouts.policy_version for part in first_parts] == [0, 0, 2, 4, 6]
    assert [row["rollout/lag"] for row in rows(config)] == [0, 2, 2, 2, 2]
    assert [part.rollouts.progress for part in first_parts] == [0, 0.2, 0.4, 0.6, 0.8]
    for step, part in enumerate(first_parts):
        batch, mask = part.rollouts, part.rollouts.response_mask
        torch.testing.assert_close(batch.sampler_logprobs, mask * logprob(weights[batch.policy_version]))
        torch.testing.assert_close(part.signals.old_logprobs, mask * logprob(weights[2 * step]))
    assert [ids for ids, _ in parts.engine.asked] == [[f"p{2 * step}", f"p{2 * step + 1}"] for step in range(5)]
    assert "sleep" not in note.names


def test_sampling_goes_on_while_a_step_trains_and_never_while_the_engine_gets_weights(tmp_path: Path) -> None:
    config, note = ahead_config(tmp_path, train={"steps": 3}, eval={"every": 1, "samples": 1}), Events()
    parts, trained, busy = fake_parts(config, note), threading.Event(), threading.Event()

    def watch(event: str) -> None:
        if event == "train":
            assert parts.policy.version == 2 or busy.wait(SECONDS), "nothing is sampled meanwhile"
            trained.set()
        if event != "generate" or threading.current_thread() is threading.main_thread():
            assert event in ("score policy", "train") or not busy.is_set(), f"{event} while sampling"
            return
        busy.set()
        assert trained.wait(SECONDS), "training waits for sampling"
        time.sleep(0.05)
        trained.clear()
        busy.clear()

    note.watch = watch
    train(config, parts)
    logged = read_rows(Path(config.output) / "metrics.jsonl")[1:]
    assert ["seconds/ahead" in row for row in logged] == [True, True, False], "nothing follows the last step"
    for row in logged[:2]:
        assert row["seconds/ahead"] >= 0.05
        assert 0 <= row["seconds/overlapped"] <= row["seconds/ahead"]


def test_without_async_steps_nothing_is_sampled_ahead(tmp_path: Path) -> None:
    config, saved = fake_config(tmp_path), Saved()
    train(config, fake_parts(config, Events(), saved))
    for row in rows(config):
        assert "rollout/lag" not in row
    assert not any("ahead" in json.loads(state) or load(tensors) for _, _, state, tensors in saved.values())


def test_a_thread_that_samples_leaves_pytorchs_state_alone() -> None:
    model = tiny_model()
    engine = engine_of(model)
    problems, params = mixed_problems(6), SamplingParams(max_tokens=8, seed=3)
    want = collect(engine, FakeReward(), problems, 2, params, Solo(), 0)
    seen: dict[str, Any] = {}

    def sample() -> Collected:
        seen["state"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads())
        return collect(engine, FakeReward(), problems, 2, params, Solo(), 0)

    random = torch.get_rng_state()
    ahead, weight = Ahead(), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        ahead.start(1, sample)
    while sampling():
        (weight * weight).sum().backward()
    ahead.finish()
    assert seen["state"] == (True, False, torch.get_num_threads())
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled()
    got = ahead.take(1)
    assert got is not None and got.texts == want.texts
    assert torch.equal(got.batch.sampler_logprobs, want.batch.sampler_logprobs)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def sampled(version: int = 3) -> tuple[Collected, ShuffledSource]:
    engine = FakeEngine(Events())
    engine.version = version
    problems = [Problem(f"p{index}", "", (1, 2), "", extra={"kept": index}) for index in range(3)]
    reader = lambda ids, text, decode: Reading({"tenth": 0.1})  # noqa: E731
    found = collect(engine, FakeReward(), problems, 4, SamplingParams(8), Solo(), 0, read=reader, progress=1 / 3)
    grades = [Grade(Verdict.TIMEOUT, 0.1, "\ud800 ä", {"score": 1 / 3}), *found.grades[1:]]
    return replace(found.select([2, 0]), grades=grades[:8]), ShuffledSource(problems, 0)


def test_a_rollout_goes_through_a_checkpoint_bit_by_bit() -> None:
    rollout, prompts = sampled()
    values, tensors = packed(rollout)
    got = restored(json.loads(json.dumps(values)), load(save(tensors)), prompts)
    for part in fields(Collected):
        if part.name != "batch":
            assert getattr(got, part.name) == getattr(rollout, part.name), part.name
    for part in fields(rollout.batch):
        ours, theirs = getattr(got.batch, part.name), getattr(rollout.batch, part.name)
        if part.name == "rewards":
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        else:
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, part.name
    assert [problem.extra["kept"] for problem in got.batch.problems] == [2, 0]


def test_a_rollout_that_is_not_whole_or_of_other_problems_is_refused() -> None:
    rollout, prompts = sampled()
    values, tensors = packed(rollout)
    with pytest.raises(CheckpointError, match="lacks its tokens: the checkpoint is damaged"):
        restored(values, {name: value for name, value in tensors.items() if name != "tokens"}, prompts)
    with pytest.raises(DataError, match="problem 'x' is not one of the training problems"):
        restored(values | {"problems": ["p0", "x"]}, tensors, prompts)


def restless(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Refills, an algorithm's memory, problems to repeat, validation, a probe, and a save at every step."""
    sections: dict[str, Any] = {"eval": {"every": 2, "samples": 2}, "checkpoint": {"every": 1}}
    sections |= {"rollout": {"prompts": 2, "probe_rows": 2}, "train": {"steps": 3}}
    algorithm = fake_algorithm(keep_group=mixed, reselect=lambda batch, _: [1] if bool(batch.correct[0]) else None)
    return ahead_config(folder, **sections), {"algorithm": algorithm, "easy": [1, 6]}


def test_a_run_that_ends_at_any_moment_continues_as_if_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "provenance", dict)
    (tmp_path / "whole").mkdir()
    config, options = restless(tmp_path / "whole")
    note = Events()
    train(config, fake_parts(config, note, **options))
    want = rows(config)
    assert [row["step"] for row in want] == [0, 1, 2, 3] and max(row.get("rollout/lag", 0) for row in want) == 1
    for moment in range(len(note.names)):
        (folder := tmp_path / str(moment)).mkdir()
        config, options = restless(folder)
        dying, saved = Events(), Saved()
        dying.watch = lambda _, dying=dying, moment=moment: die(dying, moment)
        parts = fake_parts(config, dying, saved, **options)
        with pytest.raises(Killed):
            train(config, parts)
        assert not sampling()
        parts.log.close()
        _, options = restless(folder)
        train(config, fake_parts(config, Events(), saved, **options))
        assert rows(config) == want, f"ended at {dying.names[moment]}, the event number {moment}"


def test_a_signal_finishes_the_step_and_keeps_what_was_sampled_ahead(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = ahead_config(tmp_path / "whole", checkpoint={"every": 0})
    train(whole, fake_parts(whole, Events()))
    config, saved, note = ahead_config(tmp_path, checkpoint={"every": 0}), Saved(), Events()
    note.watch = lambda event: os.kill(os.getpid(), signal.SIGTERM) if event == "log 2" else None
    assert train(config, fake_parts(config, note, saved)) == 2
    assert json.loads(saved[2][2])["ahead"]["policy_version"] == 1
    assert train(config, fake_parts(config, Events(), saved)) == 4
    assert rows(config) == rows(whole)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_a_run_may_change_its_mind_between_two_starts(
    before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, saved, note = fake_config(tmp_path, rollout={"async_steps": before}), Saved(), Events()
    note.watch = lambda event: os.kill(os.getpid(), signal.SIGTERM) if event == "log 2" else None
    train(config, fake_parts(config, note, saved))
    parts = fake_parts(config := fake_config(tmp_path, rollout={"async_steps": after}), Events(), saved)
    assert train(config, parts) == 4
    versions = [part.rollouts.policy_version for part in parts.policy.trained]
    assert versions == ([2, 2] if after else [2, 3])
    left_out = [text for text in caplog.messages if text.startswith("rollout.async_steps=0: the checkpoint of step 2")]
    assert len(left_out) == before


# --- checks -----------------------------------------------------------------------------------------------------------


def test_the_queue_holds_one_rollout_of_the_right_step() -> None:
    ahead, (rollout, _) = Ahead(), sampled()
    ahead.start(1, lambda: rollout)
    with pytest.raises(RolloutError, match="the rollout of step 1 is not trained on yet"):
        ahead.start(2, lambda: rollout)
    ahead.finish()
    with pytest.raises(RolloutError, match="the rollout of step 1 is not trained on yet"):
        ahead.start(2, lambda: rollout)
    assert ahead.take(1) is rollout and ahead.take(2) is None
    ahead.start(2, lambda: rollout)
    with pytest.raises(RolloutError, match="of step 2 was kept for step 3"):
        ahead.take(3)


@pytest.mark.parametrize("version", [0, 3])
def test_a_rollout_of_other_weights_than_those_of_one_step_ago_ends_the_run(version: int, tmp_path: Path) -> None:
    config, saved, note = ahead_config(tmp_path), Saved(), Events()
    note.watch = lambda event: os.kill(os.getpid(), signal.SIGTERM) if event == "log 2" else None
    train(config, fake_parts(config, note, saved))
    at, weight, state, tensors = saved[2]
    changed = json.loads(state)
    changed["ahead"]["policy_version"] = version
    saved[2] = (at, weight, json.dumps(changed), tensors)
    with pytest.raises(RolloutError, match=rf"is of policy version {version}, the policy is at 2; at most 1 optimizer"):
        train(config, fake_parts(config, Events(), saved))


def test_an_uncorrected_lag_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for corrects in (True, False):
        (folder := tmp_path / str(corrects)).mkdir()
        config = ahead_config(folder, train={"steps": 1})
        train(config, fake_parts(config, Events(), algorithm=fake_algorithm(corrects_sampler=corrects)))
        assert any("Set algorithm.importance_cap" in text for text in caplog.messages) != corrects


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(config: RunConfig, generate: Callable[[], None], note: Events | None = None, **options: Any) -> Parts:
    """Parts whose engine does `generate` instead of answering the second time, which is beside the first training."""
    parts = fake_parts(config, note or Events(), **options)
    answer = parts.engine.generate

    def second(*arguments: Any) -> Any:
        if parts.engine.asked:
            generate()
        return answer(*arguments)

    parts.engine.generate = second
    return parts


@pytest.mark.parametrize("kind", [RolloutError, ZeroDivisionError, KeyboardInterrupt])
def test_what_the_thread_raises_ends_the_loop_after_the_update_it_ran_beside(
    kind: type[BaseException], tmp_path: Path
) -> None:
    def generate() -> None:
        raise kind("from the thread")

    config, saved = ahead_config(tmp_path), Saved()
    parts = failing(config, generate, saved=saved)
    with pytest.raises(kind, match="from the thread"):
        train(config, parts)
    assert len(parts.policy.trained) == 1 and not saved and not sampling()


def test_an_error_beside_endless_sampling_ends_both(tmp_path: Path) -> None:
    def generate() -> None:
        while True:
            time.sleep(0.001)

    config = ahead_config(tmp_path, train={"max_skipped": 1, "minibatches": 2})
    parts, began = failing(config, generate, skips=["non-finite loss: p0"] * 2), time.monotonic()
    with pytest.raises(TrainingError, match="2 optimizer steps in a row"):
        train(config, parts)
    assert not sampling() and time.monotonic() - began < SECONDS


def test_a_second_interrupt_while_waiting_for_endless_sampling_ends_both(tmp_path: Path) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")

    def generate() -> None:
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.001)

    config, began = ahead_config(tmp_path), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(config, failing(config, generate))
    assert not sampling() and time.monotonic() - began < SECONDS
