"""The run log: what it writes, what survives a crash or a full disk, and what a person sees."""

import io
import json
import math
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from capo_megatron.config import LogConfig
from capo_megatron.errors import CapoError, ConfigError, DataError
from capo_megatron.runlog import check_writable, provenance, read_rows, to_json, write_text
from capo_megatron.runlog import console as display
from capo_megatron.runlog.log import RunLog
from capo_megatron.runlog.provenance import revision
from capo_megatron.seams import Solo
from capo_megatron.types import Grade, Problem, RolloutBatch, Signals, Verdict


def open_log(output, rank=0, total=10, resolved="output: x\n", **options) -> RunLog:
    return RunLog(output, LogConfig(**({"console": "off"} | options)), resolved, Solo(rank), total)


@dataclass
class Graded:
    """Two problems with two responses each, and one response without tokens."""

    batch: RolloutBatch
    texts: list[str]
    grades: list[Grade]


@pytest.fixture
def graded():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    problems = tuple(Problem(name, f"What is {name}?\n", (1, 2), "4") for name in ("p0", "p1"))
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    batch = RolloutBatch(
        problems=problems,
        tokens=torch.zeros(4, 5, dtype=torch.int64),
        response_mask=mask,
        segment=mask.to(torch.uint8),
        group=torch.tensor([0, 0, 1, 1]),
        rewards={"reward": rewards, "correct": rewards},
        gradable=torch.tensor([True, True, False, True]),
        truncated=torch.tensor([False, True, False, False]),
        sampler_logprobs=torch.zeros(4, 4),
        policy_version=0,
    )
    verdicts = (Verdict.CORRECT, Verdict.WRONG, Verdict.TIMEOUT, Verdict.WRONG)
    grades = [Grade(verdict, float(reward), "4") for verdict, reward in zip(verdicts, rewards, strict=True)]
    signals = Signals(old_logprobs=torch.where(mask, -0.5, 0.0))
    advantages = torch.where(mask, 0.25, 0.0)
    return Graded(batch, ["vier ✓\nline two", "5", "6", ""], grades), signals, advantages


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_config_versions_and_one_line_a_step(tmp_path):
    with open_log(tmp_path / "deep" / "run", resolved="output: ä\n") as log:
        log.step(1, {"reward/mean": 0.5, "train/loss": math.nan, "train/grad_norm": math.inf})
        log.step(2, {"reward/mean": torch.tensor(0.75)})
    folder = tmp_path / "deep" / "run"
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["reward/mean"] for row in rows] == [0.5, 0.75]
    assert rows[0]["train/loss"] is None and rows[0]["train/grad_norm"] is None
    assert abs(rows[1]["time"] - rows[0]["time"]) < 60
    assert (folder / "resolved.yaml").read_text(encoding="utf-8") == "output: ä\n"
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["packages"]["torch"].startswith("2.")
    assert versions["command"] == sys.argv
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".lock", "metrics.jsonl", "resolved.yaml", "versions.json"]


def test_a_folder_that_another_run_writes_to_is_refused_until_that_run_ends(tmp_path):
    with open_log(tmp_path, resolved="seed: 1\n") as first:
        first.step(1, {"value": 1})
        with open_log(tmp_path, resolved="seed: 2\n") as second, pytest.raises(CapoError) as caught:
            second.resume_from(0)
        assert str(caught.value).startswith(f"{tmp_path}: process {os.getpid()} on ")
        first.step(2, {"value": 2})
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2 and not list(tmp_path.glob("resolved.*.yaml"))
    with open_log(tmp_path) as third:
        third.resume_from(2)


def test_another_rank_writes_and_prints_nothing(tmp_path, capsys, graded):
    with open_log(tmp_path / "run", rank=1, console="plain", tensorboard=True) as log:
        log.resume_from(3)
        with log.phase("rollout"):
            log.warn("nobody hears this")
        log.samples(4, *graded)
        log.step(4, {"reward/mean": 0.5})
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_resuming_drops_the_steps_that_no_checkpoint_holds(tmp_path):
    with open_log(tmp_path) as log:
        for step in range(6):
            log.step(step, {"value": step})
    with open_log(tmp_path) as log:
        log.resume_from(3)
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
        log.step(4, {"value": 40})
    assert [row["value"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 40]


def test_a_restart_without_a_checkpoint_starts_the_file_anew(tmp_path):
    for value in (1, 2):
        with open_log(tmp_path) as log:
            log.step(0, {"value": value})
            log.step(1, {"value": value})
    assert [(row["step"], row["value"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "val', b'{"step": 3, "value": "\xc3', b'{"step": 2}', b"nul\n", b"[1]\n"]
)
def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "value": 1}\n' + tail)
    with open_log(tmp_path) as log:
        log.resume_from(2)
        log.step(3, {"value": 3})
    assert [row["step"] for row in read_rows(path) if row["step"] != 2] == [1, 3]


def test_reading_forgives_a_torn_end_but_no_other_broken_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a"')
    assert read_rows(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(DataError, match=re.escape(f"{path}:2: not a JSON object")):
        read_rows(path)
    with pytest.raises(DataError, match="No such file"):
        read_rows(tmp_path / "absent.jsonl")


def test_a_changed_config_keeps_the_earlier_one(tmp_path):
    for resolved in ("seed: 1\n", "seed: 1\n", "seed: 2\n", "seed: 3\n"):
        open_log(tmp_path, resolved=resolved).resume_from(-1)
    kept = {path.name: path.read_text() for path in tmp_path.glob("resolved*.yaml")}
    assert kept == {"resolved.yaml": "seed: 3\n", "resolved.1.yaml": "seed: 1\n", "resolved.2.yaml": "seed: 2\n"}


def test_a_full_disk_is_one_line_that_says_so(tmp_path):
    log = open_log(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(CapoError, match=r"metrics\.jsonl: cannot be written: the disk is full") as caught:
        log.step(1, {"value": 1})
    assert "\n" not in str(caught.value)


def test_an_output_that_cannot_be_a_folder_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        for attempt in (check_writable, lambda path: open_log(path).resume_from(-1)):
            with pytest.raises(CapoError, match="cannot be written: a file is in the way"):
                attempt(output)
    with pytest.raises(CapoError, match=r"^/proc/run: cannot be written: .*Choose another output"):
        check_writable(Path("/proc/run"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_check_of_an_output_leaves_nothing_and_so_does_opening_the_log(tmp_path):
    check_writable(tmp_path / "deep" / "run")
    open_log(tmp_path / "deep" / "run").close()
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(CapoError, match="a folder is in the way"):
        write_text(path, "text")
    assert [item.name for item in tmp_path.iterdir()] == ["folder"], "nothing is left aside"


def test_json_has_no_nan_and_keeps_text_readable():
    assert to_json({"a": math.nan, "b": -math.inf, "c": 1.5, "d": "ä", "e": None}) == (
        '{"a": null, "b": null, "c": 1.5, "d": "ä", "e": null}'
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_say_what_each_response_earned(tmp_path, graded):
    with open_log(tmp_path, samples=16) as log:
        log.samples(10, *graded)
    path = tmp_path / "samples" / "step_000010.jsonl"
    rows = read_rows(path)
    assert [(row["problem"], row["sample"], row["verdict"]) for row in rows] == [
        ("p0", 0, "correct"),
        ("p0", 1, "wrong"),
        ("p1", 0, "timeout"),
        ("p1", 1, "wrong"),
    ]
    assert [row["tokens"] for row in rows] == [3, 1, 2, 0]
    assert [row["mean_logprob"] for row in rows] == [-0.5, -0.5, -0.5, 0.0]
    assert [row["advantage"] for row in rows] == [0.25, 0.25, 0.25, 0.0]
    assert [row["truncated"] for row in rows] == [False, True, False, False]
    assert rows[0]["response"] == "vier ✓\nline two"
    assert rows[0]["prompt"] == "What is p0?\n"
    assert "vier ✓" in path.read_text(encoding="utf-8"), "a person can read it"


def test_the_number_of_samples_is_limited_and_zero_turns_them_off(tmp_path, graded):
    open_log(tmp_path, samples=3).samples(1, *graded)
    assert len(read_rows(tmp_path / "samples" / "step_000001.jsonl")) == 3
    open_log(tmp_path, samples=0).samples(2, *graded)
    assert not (tmp_path / "samples" / "step_000002.jsonl").exists()


def test_the_response_on_which_engine_and_policy_agree_least_is_always_shown(tmp_path, graded):
    rollout, signals, advantages = graded
    rollout.batch.sampler_logprobs.copy_(signals.old_logprobs)
    row = 2
    first = int(rollout.batch.response_mask[row].int().argmax())
    rollout.batch.sampler_logprobs[row, first] += 2.0
    open_log(tmp_path, samples=1).samples(1, rollout, signals, advantages)
    shown = read_rows(tmp_path / "samples" / "step_000001.jsonl")
    assert [(row["problem"], row["sample"]) for row in shown] == [("p0", 0), ("p1", 0)]
    assert [row["engine_gap"] for row in shown] == pytest.approx([1.0, math.exp(2.0)], rel=1e-5)


def test_half_characters_of_a_model_do_not_stop_the_run(tmp_path, graded):
    rollout, signals, advantages = graded
    rollout.texts[0] = "broken \ud83d"
    open_log(tmp_path).samples(1, rollout, signals, advantages)
    assert read_rows(tmp_path / "samples" / "step_000001.jsonl")[0]["response"] == "broken \ud83d"


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now = {"time": 100.0}
    monkeypatch.setattr("capo_megatron.runlog.log.time.perf_counter", lambda: now["time"])

    def advance(seconds):
        now["time"] += seconds

    return advance


def test_phases_are_timed_and_their_throughput_logged(tmp_path, clock):
    with open_log(tmp_path) as log:
        clock(50)  # building the model is nobody's step
        with log.phase("rollout") as phase:
            clock(2)
            phase.tokens = 300
        with log.phase("train", tokens=100):
            clock(1)
        with log.phase("train", tokens=50):
            clock(1)
        clock(1)
        log.step(1, {})
        with log.phase("refit"):
            clock(4)
        log.step(2, {})
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert {name: value for name, value in first.items() if "seconds/" in name} == {
        "seconds/rollout": 2, "seconds/train": 2, "seconds/step": 5
    }  # fmt: skip
    assert {name: value for name, value in first.items() if "tokens" in name} == {
        "tokens_per_second/rollout": 150, "tokens_per_second/train": 75, "tokens_per_second/step": 60
    }  # fmt: skip
    assert {name: value for name, value in second.items() if "/" in name} == {"seconds/refit": 4, "seconds/step": 4}


def test_a_phase_that_fails_is_still_timed(tmp_path, clock):
    with open_log(tmp_path) as log:
        with pytest.raises(ZeroDivisionError), log.phase("rollout"):
            clock(3)
            raise ZeroDivisionError
        log.step(1, {})
    assert read_rows(tmp_path / "metrics.jsonl")[0]["seconds/rollout"] == 3


# --- console ----------------------------------------------------------------------------------------------------------


def test_plain_lines_show_the_key_numbers_and_the_time_left(tmp_path, clock, capsys):
    with open_log(tmp_path, console="auto", total=100) as log:
        log.step(0, {"validation/accuracy": 0.25, "validation/auc_mean": 0.75})
        for step in (1, 2):
            with log.phase("rollout", tokens=50_000):
                clock(10)
            log.step(step, {"reward/mean": 0.5, "reward/accuracy": 0.5, "train/lr": 1e-6, "other": 1})
        log.warn("optimizer step skipped: [non-finite loss]")
    assert capsys.readouterr().out.splitlines() == [
        "step   0/100  val acc 0.250  val auc 0.750  0.0s",
        "step   1/100  reward 0.500  acc 0.500  lr 1e-06  tok/s 5,000  10.0s  eta 16m30s",
        "step   2/100  reward 0.500  acc 0.500  lr 1e-06  tok/s 5,000  10.0s  eta 16m20s",
        "warning: optimizer step skipped: [non-finite loss]",
    ]


def test_the_live_display_shows_phase_progress_and_the_same_lines():
    screen = io.StringIO()
    live = display.make_display("auto", 3, Console(file=screen, force_terminal=True, width=100))
    assert isinstance(live, display.LiveDisplay)
    live.phase("rollout")
    live.step(1, {"reward/mean": 0.5}, 2.0, 4.0)
    live.warn("look [here]")
    live.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "step 1/3  reward 0.500  2.0s  eta 4.0s" in shown
    assert "warning: look [here]" in shown
    assert re.search(r"rollout.*1/3 eta 4.0s", shown)


def test_the_display_is_chosen_by_terminal_and_option():
    terminal = Console(file=io.StringIO(), force_terminal=True)
    chosen = {mode: display.make_display(mode, 1, terminal) for mode in ("auto", "plain", "off")}
    chosen["auto"].close()
    assert {mode: type(found) for mode, found in chosen.items()} == {
        "auto": display.LiveDisplay, "plain": display.PlainDisplay, "off": display.NoDisplay
    }  # fmt: skip
    assert type(display.make_display("auto", 1, Console(file=io.StringIO()))) is display.PlainDisplay


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (59.9, "59.9s"),
        (60, "1m00s"),
        (340, "5m40s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
    ],
)
def test_durations_are_short(seconds, text):
    assert display.duration(seconds) == text


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_every_finite_metric(tmp_path):
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_log(tmp_path, tensorboard=True) as log:
        log.step(1, {"reward/mean": 0.5, "bad": math.nan})
        log.step(2, {"reward/mean": 0.75})
    with open_log(tmp_path, tensorboard=True) as log:
        log.resume_from(1)
        log.step(2, {"reward/mean": 0.25})
    found = event.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(item.step, item.value) for item in found.Scalars("reward/mean")] == [(1, 0.5), (2, 0.25)]
    assert "bad" not in found.Tags()["scalars"]


@pytest.mark.parametrize(("option", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "p"}, "wandb")])
def test_a_tracker_that_is_not_installed_is_a_config_error(tmp_path, monkeypatch, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=rf"^log\.{package}=.*needs the package {package}.*pip install {package}"):
        open_log(tmp_path, **option)


def test_wandb_is_told_project_name_config_and_metrics_and_a_restart_continues_the_run(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, *names, **options):
            calls.append(("define", names))

        def log(self, row):
            calls.append(("log", row))

        def finish(self):
            calls.append(("finish",))

    def init(**options):
        calls.append(("init", options))
        return Run()

    module = types.SimpleNamespace(init=init, errors=types.SimpleNamespace(Error=RuntimeError))
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        with open_log(tmp_path / "run7", wandb="calibration", resolved="seed: 3\n") as log:
            log.step(1, {"reward/mean": 0.5, "bad": math.inf})
    first, second = (options for name, *rest in calls if name == "init" for options in rest)
    assert (first["project"], first["name"], first["config"]) == ("calibration", "run7", {"seed": 3})
    assert first["id"] == second["id"] and first["resume"] == "allow"
    logged = [rest[0] for name, *rest in calls if name == "log"]
    assert (logged[0]["step"], logged[0]["reward/mean"], "bad" in logged[0]) == (1, 0.5, False)
    assert calls[-1] == ("finish",)


# --- provenance -------------------------------------------------------------------------------------------------------


def test_provenance_is_json_and_names_the_python(tmp_path):
    found = json.loads(json.dumps(provenance()))
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in found["packages"]


def test_a_folder_inside_another_checkout_is_not_taken_for_it(tmp_path):
    if revision(Path(__file__).resolve().parents[2]) is not None:
        assert revision(Path(__file__).resolve().parent) is None
    assert revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    found = revision(tmp_path)
    assert found is not None and re.fullmatch("[0-9a-f]{40}", found["revision"]) and found["changed"] is False
    (tmp_path / "file").write_text("2")
    assert revision(tmp_path) == {**found, "changed": True}
