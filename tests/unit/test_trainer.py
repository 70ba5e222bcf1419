"""The loop, with fakes of its seams: what it does, in which order, how often, and what survives its end."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capo_megatron.config import RunConfig
from capo_megatron.data import ShuffledSource
from capo_megatron.errors import CheckpointError, RolloutError, TrainingError
from capo_megatron.runlog import log as runlog
from capo_megatron.runlog import read_rows
from capo_megatron.seams import Algorithm, Signal
from capo_megatron.trainer import Parts, train
from capo_megatron.types import Reading, RolloutBatch, Segment, Signals
from tests.unit.seam_fakes import Events, Killed, Saved, fake_algorithm, fake_config, fake_parts


def rows(config: RunConfig) -> list[dict[str, Any]]:
    """What was logged, without times."""
    timed = ("time", "seconds/", "tokens_per_second/")
    found = read_rows(Path(config.output) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in found]


def rollout_ids(parts: Parts) -> list[list[str]]:
    return [ids for ids, _ in parts.engine.asked]


# --- a step -----------------------------------------------------------------------------------------------------------


def test_a_step_samples_scores_trains_refits_logs_and_saves_in_this_order(tmp_path: Path) -> None:
    config, note = fake_config(tmp_path, train={"steps": 2, "minibatches": 2}), Events()
    parts = fake_parts(config, note, algorithm=fake_algorithm(needs=frozenset({Signal.REF_LOGPROBS})))
    assert train(config, parts) == 2
    step = ["generate", "sleep", "score policy", "score reference", "train", "train", "wake", "refit"]
    assert note.names == [
        *("wake", "refit", *step, "log 1", "logged 1"),
        *(*step, "log 2", "logged 2", "save 2", "saved 2"),
    ]
    assert parts.engine.version == parts.policy.version == 4


def test_mini_batches_hold_whole_groups_with_their_own_weights_in_every_epoch(tmp_path: Path) -> None:
    config = fake_config(tmp_path, rollout={"prompts": 6}, train={"steps": 1, "minibatches": 3, "epochs": 2})
    parts = fake_parts(config, Events())
    train(config, parts)
    groups = [sorted(set(part.rollouts.group.tolist())) for part in parts.policy.trained]
    assert groups == [[0, 1], [2, 3], [4, 5]] * 2
    for part in parts.policy.trained:
        batch = part.rollouts
        assert torch.bincount(batch.group).tolist()[-2:] == [4, 4]
        assert float(part.weights.sum()) == pytest.approx(1.0)
        torch.testing.assert_close(part.signals.old_logprobs, -1.0 * batch.response_mask)  # scored before any update
        torch.testing.assert_close(part.advantages, batch.rewards["reward"].unsqueeze(1) * batch.response_mask)


def test_every_step_takes_the_next_problems_and_another_seed(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    parts = fake_parts(config, Events())
    train(config, parts)
    assert rollout_ids(parts) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6", "p7"]]
    assert len({params.seed for _, params in parts.engine.asked}) == 4


def test_a_problem_whose_responses_are_all_lost_is_replaced_and_the_loss_is_logged(tmp_path: Path) -> None:
    config = fake_config(tmp_path, rollout={"max_dropped": 0.5}, train={"steps": 2})
    parts = fake_parts(config, Events())
    generate = parts.engine.generate

    def failing(problems: Any, samples: int, params: Any) -> Any:
        groups = generate(problems, samples, params)
        lost = {"p1": 4, "p3": 1}
        return [group[lost.get(problem.id, 0) :] for problem, group in zip(problems, groups, strict=True)]

    parts.engine.generate = failing  # type: ignore[method-assign]
    train(config, parts)
    assert rollout_ids(parts) == [["p0", "p1"], ["p2"], ["p3", "p4"]]
    assert [torch.bincount(part.rollouts.group).tolist() for part in parts.policy.trained] == [[4, 4], [3, 4]]
    assert [row["rollout/dropped"] for row in rows(config)] == [4, 1]


# --- the algorithm's say ----------------------------------------------------------------------------------------------


def mixed(batch: RolloutBatch) -> bool:
    return 0.0 < float(batch.correct.float().mean()) < 1.0


def test_groups_that_the_algorithm_rejects_are_replaced(tmp_path: Path) -> None:
    config = fake_config(tmp_path, rollout={"prompts": 4, "samples": 8}, train={"steps": 1})
    parts = fake_parts(config, Events(), algorithm=fake_algorithm(keep_group=mixed), easy=[0, 2, 3, 5])
    train(config, parts)
    assert rollout_ids(parts) == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p6"], ["p7"]]
    assert len({params.seed for _, params in parts.engine.asked}) == 3
    (batch,) = (part.rollouts for part in parts.policy.trained)
    assert [problem.id for problem in batch.problems] == ["p1", "p4", "p6", "p7"]
    assert torch.bincount(batch.group).tolist() == [8, 8, 8, 8]


def test_replacing_ends_with_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    algorithm = fake_algorithm(keep_group=mixed, max_refills=3)
    parts = fake_parts(config, Events(), algorithm=algorithm, easy=range(12))
    with pytest.raises(RolloutError, match=r"0 of 2 groups after 3 rounds .* algorithm\.max_refills\.$"):
        train(config, parts)
    assert len(parts.engine.asked) == 4 and not parts.policy.trained


def test_groups_that_the_algorithm_selects_come_first_in_the_next_step(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    chosen = iter([[1, 1], None, [0], []])
    parts = fake_parts(config, Events(), algorithm=fake_algorithm(reselect=lambda *_: next(chosen)))
    train(config, parts)
    assert rollout_ids(parts) == [["p0", "p1"], ["p1", "p1#1"], ["p2", "p3"], ["p2", "p4"]]


def test_an_algorithm_hears_how_far_the_run_is_and_its_readings_reach_the_batch(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    reader = lambda ids, text, decode: Reading({"ends": float(text == decode(ids))}, {0: Segment.CONFIDENCE})  # noqa: E731
    parts = fake_parts(config, Events(), algorithm=fake_algorithm(read=reader))
    train(config, parts)
    batches = [part.rollouts for part in parts.policy.trained]
    assert [batch.progress for batch in batches] == [0.0, 0.25, 0.5, 0.75]
    assert [batch.policy_version for batch in batches] == [0, 1, 2, 3]
    for batch in batches:
        assert batch.rewards["ends"].tolist() == [0.0] * 8
        assert set(batch.segment[batch.response_mask].tolist()) == {Segment.CONFIDENCE}


def test_perturbed_prompts_and_the_reference_are_not_scored_while_idle(tmp_path: Path) -> None:
    config, note = fake_config(tmp_path, train={"steps": 2}), Events()
    seen = []

    def estimate(batch: RolloutBatch, signals: Signals) -> torch.Tensor:
        seen.append((signals.ref_logprobs is not None, signals.perturbed_logprobs is not None))
        return torch.zeros(batch.response_mask.shape)

    needs = frozenset({Signal.REF_LOGPROBS, Signal.PERTURBED})
    algorithm = fake_algorithm(needs=needs, idle=lambda batch: needs if batch.policy_version else frozenset())
    parts = fake_parts(config, note, algorithm=replace(algorithm, estimator=estimate))
    perturbed = [replace(problem, perturbed=((1, 2, 3),)) for problem in parts.prompts.take(12)]
    train(config, replace(parts, prompts=ShuffledSource(perturbed, 0, shuffle=False)))
    assert seen == [(True, True), (False, False)]
    assert [name for name in note.names if name.startswith("score")] == [
        *("score policy", "score reference", "score policy"),
        "score policy",
    ]


def test_a_reference_that_follows_moves_once_a_step_after_its_updates(tmp_path: Path) -> None:
    config, note = fake_config(tmp_path, train={"steps": 2, "minibatches": 2}), Events()
    train(config, fake_parts(config, note, algorithm=fake_algorithm(reference_decay=0.9)))
    moves = [name for name in note.names if name in ("train", "update reference 0.9", "save 2")]
    assert moves == ["train", "train", "update reference 0.9"] * 2 + ["save 2"]


# --- steps that are not taken -----------------------------------------------------------------------------------------


def test_skipped_steps_are_counted_and_told(tmp_path: Path) -> None:
    config = fake_config(tmp_path, train={"steps": 6, "max_skipped": 2})
    bad = "non-finite loss: problem p1"
    parts = fake_parts(config, Events(), skips=[bad, None, bad, bad, None])
    train(config, parts)
    assert [row["train/skipped"] for row in rows(config)] == [1, 0, 1, 1, 0, 0]
    assert ["train/loss" in row for row in rows(config)] == [False, True, False, False, True, True]
    assert parts.log.warnings == [f"optimizer step skipped: {bad}"] * 3
    assert parts.policy.version == parts.engine.version == 3


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    config, saved = fake_config(tmp_path, train={"steps": 9, "minibatches": 2, "max_skipped": 3}), Saved()
    bad = "non-finite gradient: decoder.final_layernorm.weight"
    parts = fake_parts(config, Events(), saved, skips=[None] * 5 + [bad] * 9)
    with pytest.raises(TrainingError, match=r"4 optimizer steps in a row .*final_layernorm\.weight") as caught:
        train(config, parts)
    assert "\n" not in str(caught.value)
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4] and sorted(saved) == [2, 4]


# --- validation and checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 2}, [0, 2, 4, 5]),
        ({"every": 2, "at_start": False}, [2, 4, 5]),
        ({"every": 5}, [0, 5]),
        ({"every": 9}, [0, 5]),
        ({"every": 0}, []),
    ],
)
def test_validation_comes_at_the_start_every_so_many_steps_and_at_the_end(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    config = fake_config(tmp_path, train={"steps": 5}, eval=options | {"samples": 3, "temperature": 0.5})
    parts = fake_parts(config, Events())
    train(config, parts)
    assert [row["step"] for row in rows(config) if "validation/accuracy" in row] == expected
    asked = [params for ids, params in parts.engine.asked if ids == ["v0", "v1", "v2"]]
    assert len(asked) == len(expected)
    assert len({params.seed for params in asked}) <= 1, "steps are compared on the same random numbers"
    assert {params.temperature for params in asked} <= {0.5}


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 5]), (5, [5]), (0, [5])])
def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path, every: int, expected: list[int]) -> None:
    config, saved = fake_config(tmp_path, train={"steps": 5}, checkpoint={"every": every}), Saved()
    assert train(config, fake_parts(config, Events(), saved)) == 5
    assert sorted(saved) == expected


# --- ends and new starts ----------------------------------------------------------------------------------------------


def restless(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """A run in which all has a state: refills, problems to repeat, an algorithm's memory; validation and a probe."""
    config = fake_config(
        folder, eval={"every": 2, "samples": 2}, rollout={"prompts": 2, "probe_rows": 2}, train={"steps": 3}
    )
    algorithm = fake_algorithm(keep_group=mixed, reselect=lambda batch, _: [1] if bool(batch.correct[0]) else [0, 1])
    return config, {"algorithm": algorithm, "easy": [1, 6]}


def test_a_run_that_ends_at_any_moment_continues_as_if_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "provenance", dict)  # which asks git, at each of the hundred starts below
    (tmp_path / "whole").mkdir()
    config, options = restless(tmp_path / "whole")
    note = Events()
    train(config, fake_parts(config, note, **options))
    want = rows(config)
    assert [row["step"] for row in want] == [0, 1, 2, 3]
    for moment in range(len(note.names)):
        (folder := tmp_path / str(moment)).mkdir()
        config, options = restless(folder)
        dying, saved = Events(), Saved()
        dying.watch = lambda _, dying=dying, moment=moment: die(dying, moment)
        parts = fake_parts(config, dying, saved, **options)
        with pytest.raises(Killed):
            train(config, parts)
        parts.log.close()  # as the end of a process would
        _, options = restless(folder)
        train(config, fake_parts(config, Events(), saved, **options))
        assert rows(config) == want, f"ended at {note.names[moment]}, the event number {moment}"


def die(events: Events, moment: int) -> None:
    if len(events.names) > moment:
        raise Killed


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    config, saved = fake_config(tmp_path), Saved()
    first = fake_parts(config, Events(), saved)
    train(config, first)
    first.log.close()
    before, again = rows(config), Events()
    assert train(config, fake_parts(config, again, saved)) == 4
    assert again.names == ["wake", "refit"] and rows(config) == before


@pytest.mark.parametrize(("before", "after"), [(None, 0.9), (0.9, None)])
def test_a_run_is_not_resumed_with_another_kind_of_reference(
    before: float | None, after: float | None, tmp_path: Path
) -> None:
    config, saved = fake_config(tmp_path), Saved()
    train(config, fake_parts(config, Events(), saved, fake_algorithm(reference_decay=before)))
    train(config, fake_parts(config, Events(), saved, fake_algorithm(reference_decay=before and 0.5)))
    was = "an averaged" if before else "a fixed"
    now = f"algorithm.reference_decay={after or 'null'}"
    words = rf"^{now}: the checkpoint of step 4 .* has {was} reference: other options of fake trained it\. Choose"
    with pytest.raises(CheckpointError, match=words):
        train(config, fake_parts(config, Events(), saved, fake_algorithm(reference_decay=after)))


def test_a_run_is_not_resumed_against_other_reference_weights(tmp_path: Path) -> None:
    config, saved = fake_config(tmp_path), Saved()
    compares = fake_algorithm(needs=frozenset({Signal.REF_LOGPROBS}))

    def resume(reference: str, algorithm: Algorithm) -> None:
        train(config, replace(fake_parts(config, Events(), saved, algorithm), reference=reference))

    resume("one", compares)
    resume("one", compares)
    resume("", compares)  # not known
    resume("other", fake_algorithm())  # not read
    with pytest.raises(CheckpointError, match=r"model\.reference: the checkpoint of step 4 .* against other weights"):
        resume("other", compares)


def test_a_checkpoint_that_does_not_say_what_its_reference_is_has_a_fixed_one(tmp_path: Path) -> None:
    config, saved = fake_config(tmp_path), Saved()
    train(config, fake_parts(config, Events(), saved))
    for step, (version, weight, state, tensors) in saved.items():
        saved[step] = (version, weight, state.replace('"averaged_reference": false, ', ""), tensors)
    assert "averaged_reference" not in str(saved)
    train(config, fake_parts(config, Events(), saved))
    with pytest.raises(CheckpointError, match="has a fixed reference"):
        train(config, fake_parts(config, Events(), saved, fake_algorithm(reference_decay=0.9)))


def test_a_run_that_is_made_longer_says_that_its_schedules_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, saved = fake_config(tmp_path), Saved()
    train(config, fake_parts(config, Events(), saved, fake_algorithm(scheduled=True)))
    train(config, fake_parts(config, Events(), saved, fake_algorithm(scheduled=True)))
    longer = fake_config(tmp_path, train={"steps": 8})
    train(longer, fake_parts(longer, Events(), dict(saved), fake_algorithm()))
    assert not caplog.messages
    train(longer, fake_parts(longer, Events(), saved, fake_algorithm(scheduled=True)))
    (warning,) = caplog.messages
    assert warning.startswith(
        "train.steps=8: the checkpoint of step 4 is of a run of 4 steps, over which a schedule of"
    )
    assert warning.endswith("It goes on at 50% of the run instead of 100%.")
    train(longer, fake_parts(longer, Events(), saved, fake_algorithm(scheduled=True)))
    assert len(caplog.messages) == 1, "the run of 8 steps has saved since"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_it_and_stops(number: signal.Signals, tmp_path: Path) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    config, saved, note = fake_config(tmp_path, checkpoint={"every": 0}), Saved(), Events()
    before = signal.getsignal(number)

    def terminate(event: str) -> None:  # while sampling the second step; and again while saving, as schedulers do
        repeated = event == "save 2" and number != signal.SIGINT
        if (event == "generate" and note.names.count("generate") == 2) or repeated:
            os.kill(os.getpid(), number)

    note.watch = terminate
    parts = fake_parts(config, note, saved)
    assert train(config, parts) == 2
    parts.log.close()
    assert [row["step"] for row in rows(config)] == [1, 2] and sorted(saved) == [2]
    assert note.names[-2:] == ["save 2", "saved 2"]
    assert signal.getsignal(number) is before
    assert train(config, fake_parts(config, Events(), saved)) == 4
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]


def test_a_second_interrupt_ends_at_once_and_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    config, note = fake_config(tmp_path), Events()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def interrupt(event: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # under nohup
        if event == "train":
            os.kill(os.getpid(), signal.SIGINT)

    note.watch = interrupt
    parts = fake_parts(config, note)
    try:
        assert train(config, parts) == 1
        parts.log.close()
        note.watch = lambda event: [interrupt(event), interrupt(event)][0]
        parts = fake_parts(config, note)
        with pytest.raises(KeyboardInterrupt):
            train(config, parts)
    finally:
        parts.log.close()
        signal.signal(signal.SIGHUP, before)
