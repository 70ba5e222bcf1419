"""The commands, on a run small enough for a test: what they print, write, and leave alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capo_megatron.cli import main
from capo_megatron.evaluation.records import read_records
from capo_megatron.runlog import read_rows
from tests.e2e.commands import WARMUP, run, snapshot, write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml, and with run/ and base/ as two steps of training left them."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", str(write_config(folder, warmup=WARMUP))]) == 0
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as working folder."""
    folder = tmp_path / "work"
    shutil.copytree(trained, folder)
    monkeypatch.chdir(folder)
    return folder


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints, which succeeds and has no complaint."""
    capfd.readouterr()
    code = main(arguments)
    found = capfd.readouterr()
    assert (code, found.err) == (0, "")
    return found.out


# --- train ------------------------------------------------------------------------------------------------------------


def test_training_leaves_metrics_samples_config_versions_and_checkpoints(place: Path) -> None:
    assert [row["step"] for row in read_rows(place / "run" / "metrics.jsonl")] == [1, 2]
    last = read_rows(place / "run" / "metrics.jsonl")[-1]
    for name in ("reward/mean", "train/loss", "train/grad_norm", "validation/accuracy", "seconds/rollout"):
        assert isinstance(last[name], float), name
    assert [path.name for path in sorted((place / "run" / "samples").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert len(read_rows(place / "run" / "samples" / "step_000002.jsonl")) == 16
    versions = json.loads((place / "run" / "versions.json").read_text())
    assert {"torch", "megatron-core", "transformers"} <= versions["packages"].keys()
    assert (place / "run" / "checkpoints" / "latest").read_text() == "step_000002"
    assert sorted(path.name for path in (place / "base").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "warmup.json",
    ]


def test_a_finished_run_says_so_and_does_nothing(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place)
    assert shown(capfd, "train", "run.yaml") == "run: step 2 of 2 is saved; no steps are left\n"
    assert snapshot(place) == before


def test_more_steps_continue_a_run_from_its_folder_alone(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "run.yaml").unlink()
    shutil.move(place / "run", place / "moved")
    text = shown(capfd, "train", "moved", "train.steps=3")
    assert "moved: step 2 of 3 is saved; 1 step is left" in text and "step 3/3" in text and "step 2/3" not in text
    assert [row["step"] for row in read_rows(place / "moved" / "metrics.jsonl")] == [1, 2, 3]
    assert not (place / "run").exists()


# --- eval and sample --------------------------------------------------------------------------------------------------


def test_eval_writes_records_of_the_trained_model_and_of_the_base(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(place / "run")
    text = shown(capfd, "eval", "run", "--problems", "6", "--n", "3")
    assert re.search(r"accuracy \S+ .* questions 6  samples 3\nrecords: run/eval/step_000002\.jsonl\n$", text), text
    text = shown(capfd, "eval", "run", "--problems", "6", "--n", "3", "--base", "--output", "there/base.jsonl")
    assert text.endswith("records: there/base.jsonl\n")
    trained = read_records(place / "run" / "eval" / "step_000002.jsonl")
    base = read_records(place / "there" / "base.jsonl")
    assert {(record.model, record.step) for record in trained} == {("capo", 2)}
    assert {(record.model, record.step) for record in base} == {("base", 0)}
    assert [record.question for record in trained] == [record.question for record in base], "the same questions"
    assert [record.logprob_sum for record in trained] != [record.logprob_sum for record in base], "other weights"
    assert {key: value for key, value in snapshot(place / "run").items() if not key.startswith("eval")} == before


def test_eval_of_a_trained_model_needs_no_base(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(place / "base")
    assert "warm-up" not in shown(capfd, "eval", "run", "--problems", "2", "--step", "1")
    assert {record.step for record in read_records(place / "run" / "eval" / "step_000001.jsonl")} == {1}
    assert not (place / "base").exists()


def test_sample_answers_prompts_or_held_out_problems(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place)
    asked = shown(capfd, "sample", "run", "--prompt", "3+4=", "--prompt", "1*1-2=", "--n", "2")
    assert re.fullmatch(r"(3\+4=\n-> .*\n\n){2}(1\*1-2=\n-> .*\n\n){2}", asked), asked
    assert len(re.findall(r"^\S+=\n-> ", shown(capfd, "sample", "run", "--problems", "3"), re.MULTILINE)) == 3
    assert "-> " in shown(capfd, "sample", "run.yaml", "--base", "--prompt", "3+4=")
    assert snapshot(place) == before


def test_a_bare_model_directory_can_be_sampled_and_evaluated(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place)
    assert "3+4=\n-> " in shown(capfd, "sample", "base", "--prompt", "3+4=")
    assert snapshot(place) == before
    text = shown(capfd, "eval", "base", "data.task=chain", "--problems", "6", "--n", "2")
    assert text.endswith("records: runs/base/eval/base.jsonl\n")
    assert "unparseable 0  timeout 0  questions 6  samples 2" in text
    (place / "problems.jsonl").write_text('{"problem": "3+4=", "answer": "7"}\n{"problem": "3*4=", "answer": "2"}\n')
    benchmark = ("--benchmark", "problems.jsonl", "--output", "records.jsonl")
    text = shown(capfd, "eval", "base", "reward.kind=exact", *benchmark)
    assert "questions 2  samples 16" in text
    records = read_records(place / "records.jsonl")
    assert {(record.model, record.benchmark) for record in records} == {("base", "problems")}
    assert sorted(snapshot(place).keys() - before.keys()) == [
        "problems.jsonl",
        "records.jsonl",
        "runs",
        "runs/base",
        "runs/base/eval",
        "runs/base/eval/base.jsonl",
    ]


# --- check, doctor, help ----------------------------------------------------------------------------------------------


def test_check_shows_layout_batch_and_memory_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, warmup=WARMUP)
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    text = shown(capfd, "check", "run.yaml", "--ranks", "4", "parallel.tensor=2")
    for line in (
        "layout        4 ranks = tensor 2 x pipeline 1 x data 2",
        "rollout       4 prompts x 4 samples = 16 responses a step, at most 8 tokens each",
        "mini-batch    8 sequences, at most 192 tokens",
        "problems      16 for training, 2 for validation",
    ):
        assert line in text.splitlines()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("sizes", "layout", "parameters", "weights"),
    [
        ((1536, 28, 12, 2, 8960, 151_936, True), (2, 1), "1,543.7 M in all, 772.0 M", "1.44 GiB"),
        ((3584, 28, 28, 4, 18_944, 152_064, False), (4, 1), "7,615.6 M in all, 1,904.1 M", "3.55 GiB"),
        ((8192, 80, 64, 8, 29_568, 152_064, False), (8, 4), "72,706.2 M in all, ", "4.38 GiB"),
    ],
    ids=["Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen2.5-Math-72B"],
)
def test_check_knows_what_large_models_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sizes: tuple[int, ...],
    layout: tuple[int, int],
    parameters: str,
    weights: str,
) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = dict(zip((*names, "vocab_size", "tie_word_embeddings"), sizes, strict=True))
    config = write_config(
        tmp_path,
        model={"shape": shape},
        parallel={"tensor": layout[0], "pipeline": layout[1]},
        rollout={"prompts": 128, "samples": 8},
        data={"task": "chain", "validation_size": 2, "template": "plain"},
        train={},
    )
    monkeypatch.chdir(tmp_path)
    text = shown(capfd, "check", str(config), "--ranks", "64")
    assert f"parameters    {parameters}" in text, text
    assert re.search(rf"memory +{re.escape(weights)}  weights\n", text), text
    assert re.search(r"memory +\S+ GiB  engine: its own whole copy of the weights\n", text)


def test_doctor_ends_with_its_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capfd.readouterr().out
    assert "megatron-core" in text
    assert code == (0 if "no known-bad combination" in text else 2)


def test_help_answers_without_importing_torch() -> None:
    script = "import sys, capo_megatron.cli as cli\ntry: cli.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True)
    assert "train" in done.stdout and done.stdout.endswith("False\n")


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parallel
def test_two_ranks_train_and_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, warmup=WARMUP | {"steps": 4}, parallel={"tensor": 2})
    done = run(tmp_path, "capo_megatron", "train", "run.yaml", "--nproc", "2", "train.steps=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("step 1/1") == 1 and done.stdout.count("warm-up 4/4") == 1
    monkeypatch.chdir(tmp_path)
    text = shown(capfd, "train", "run", "parallel.tensor=1", "train.steps=2")
    assert "run: step 1 of 2 is saved; 1 step is left" in text
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert "-> " in shown(capfd, "sample", "run", "--prompt", "3+4=")
