"""`capo-megatron convert` as a user types it, and models that go from a directory into training and out again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from capo_megatron.cli import main
from capo_megatron.data.chain import chain_tokenizer
from capo_megatron.weights.huggingface import SINGLE, DirectorySource, save_hf
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes
from tests.e2e.commands import TREE, own_file_system, refused, run, snapshot, write_config

SHAPE = {**TREE["model"]["shape"], "tie_word_embeddings": True}


def make(folder: Path, **changes: object) -> Path:
    """A small random model with the chain task's tokenizer."""
    shape = ModelShape(**SHAPE | changes)
    generator = torch.Generator().manual_seed(4)
    weights = {}
    for name, size in hf_shapes(shape).items():
        centre = 1.0 if "norm" in name else 0.0
        weights[name] = torch.randn(size, generator=generator) * 0.3 + centre
    save_hf(folder, shape, weights.items())
    chain_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model in `hf`."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "hf")
    return tmp_path


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    capfd.readouterr()
    assert main(arguments) == 0
    return capfd.readouterr().out


def test_there_and_back_with_a_summary_each_and_a_comparison(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = r"%s: 38 tensors, 0\.\d\d GB in \d+\.\d s \(0\.\d\d GB/s\), peak memory \d\.\d\d GB\n"
    assert re.fullmatch(summary % "there", said(capfd, "convert", "hf-to-megatron", "hf", "there"))
    assert re.fullmatch(
        summary % "back", said(capfd, "convert", "megatron-to-hf", "there", "back", "--max-shard-size", "5kB")
    )
    assert len(list(Path("back").glob("*.safetensors"))) > 2
    for pair in (("hf", "there"), ("there", "back"), ("back", "hf")):
        shown = said(capfd, "convert", "verify", *pair, "--logits")
        found = re.fullmatch(
            r"equal bit for bit: 38 tensors, .*\nlogits on random tokens: they differ by (\S+) at most; the .*\n",
            shown,
        )
        assert found and float(found[1]) < 1e-4, shown
    assert "decoder.layers.mlp.linear_fc1.weight" in said(capfd, "convert", "inspect", "there")


def test_comparing_models_that_differ_ends_with_2_and_names_the_tensors(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(place / "other", tie_word_embeddings=False)
    assert "tie_word_embeddings is False, in hf it is True" in refused(capfd, "convert", "verify", "hf", "other")
    said(capfd, "convert", "hf-to-megatron", "hf", "rounded", "--dtype", "bfloat16")
    capfd.readouterr()
    assert main(["convert", "verify", "hf", "rounded"]) == 2
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "model.embed_tokens.weight: F32 and BF16, equal when rounded"
    assert shown[-2] == "... and 28 more" and shown[-1].startswith("38 of 38 tensors differ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "none", "out"], r"none: no such folder"),
        (["hf-to-megatron", "hf", "hf"], r"hf: exists\. Nothing was changed"),
        (["hf-to-megatron", "hf", "out", "--dtype", "int4"], r"dtype 'int4': not supported"),
        (["hf-to-megatron", "hf", "out", "--nproc", "0"], r"--nproc 0: at least one rank"),
        (["megatron-to-hf", "hf", "out"], r"hf: a Hugging Face directory already"),
        (["verify", "hf", "none"], r"none: no such folder"),
        (["inspect", "."], r"\.: no checkpoint in it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_2(
    place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert re.search(message, line := refused(capfd, "convert", *arguments)), line


def test_a_conversion_killed_in_the_middle_leaves_nothing_and_the_next_one_says_what_it_does(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(place / "hf")
    script = (
        "import os, signal\nfrom capo_megatron import cli\nfrom capo_megatron.weights import distributed_files\n"
        "fill = distributed_files.Hole.fill\nleft = iter(range(9))\n"
        "def fail(self, values):\n"
        "    fill(self, values)\n"
        "    if next(left, None) is None: os.kill(os.getpid(), signal.SIGKILL)\n"
        "distributed_files.Hole.fill = fail\n"
        "cli.main(['convert', 'hf-to-megatron', 'hf', 'there'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    assert not Path("there").exists() and Path(".there.partial").is_dir()
    assert snapshot(place / "hf") == before
    shown = said(capfd, "convert", "hf-to-megatron", "hf", "there").splitlines()
    assert shown[0].startswith(f"{place}/.there.partial: removed, it was left by a conversion that was interrupted")
    assert said(capfd, "convert", "verify", "hf", "there").startswith("equal bit for bit")
    assert not Path(".there.partial").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_conversion_that_is_stopped_removes_what_it_has_written(place: Path, number: signal.Signals) -> None:
    script = (
        "import os, sys, time\nfrom capo_megatron import cli\nfrom capo_megatron.weights import distributed_files\n"
        "fill = distributed_files.Hole.fill\nleft = iter(range(9))\n"
        "def stop(self, values):\n"
        "    fill(self, values)\n"
        f"    if next(left, None) is None: os.kill(os.getpid(), {number.value}); time.sleep(0.2)\n"
        "distributed_files.Hole.fill = stop\n"
        "sys.exit(cli.main(['convert', 'hf-to-megatron', 'hf', 'there']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 128 + number
    assert sorted(path.name for path in place.iterdir()) == ["hf"]


def test_a_disk_that_fills_up_at_any_moment_is_said_and_nothing_is_left(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which the disk is full in a value, in what torch.save writes around it, and in the tables."""
    disk = place / "disk"
    disk.mkdir()
    usage = shutil.disk_usage(place)._replace(free=10**9)  # as if somebody else took the space while we write
    said(capfd, "convert", "hf-to-megatron", "hf", "whole")
    needed = sum(path.stat().st_blocks for path in Path("whole").iterdir()) // 2
    for kib in (4, 28, 40, 60, 88, 100, needed - 8):
        with own_file_system(disk, f"{kib}k"):
            if not disk.is_mount():
                pytest.skip("a small file system cannot be mounted here")
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "disk_usage", lambda _: usage)
                line = refused(capfd, "convert", "hf-to-megatron", "hf", "disk/there")
            assert re.search(r"disk/there: not written: No space left .*Free disk space", line), (kib, line)
            assert list(disk.iterdir()) == [], kib
            assert re.search(r"GB free, .* are needed", refused(capfd, "convert", "hf-to-megatron", "hf", "disk/there"))


def test_ranks_share_a_conversion_and_its_mistakes(place: Path) -> None:
    done = run(place, "capo_megatron", "convert", "hf-to-megatron", "hf", "there", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in Path("there").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("megatron-to-hf", "there", "back", "--max-shard-size", "5kB")
    done = run(place, *launcher, "-m", "capo_megatron", "convert", *command)
    assert done.returncode == 0, done.stderr
    one, other = DirectorySource(place / "hf"), DirectorySource(place / "back")
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names())
    done = run(place, "capo_megatron", "convert", "megatron-to-hf", "there", "back", "--nproc", "2")
    assert done.returncode == 2
    assert re.fullmatch(r"capo-megatron: CheckpointError: \S+/back: exists\. .*\n", done.stderr), done.stderr


# --- training ---------------------------------------------------------------------------------------------------------


def losses(output: str) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows]


def test_training_starts_alike_from_a_directory_and_from_a_converted_one_and_comes_out_again(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said(capfd, "convert", "hf-to-megatron", "hf", "there")
    (place / "odd.py").write_text("def grade(problem, response):\n    return float(len(response) % 2)\n")
    for start in ("hf", "there"):  # a reward that varies, for a model that knows nothing
        write_config(place, model={"path": start, "dtype": "float32"}, reward={"kind": f"{place}/odd.py:grade"})
        assert main(["train", "run.yaml", f"output=from-{start}"]) == 0
    assert losses("from-hf") == losses("from-there") and losses("from-hf")[0][1] > 0

    said(capfd, "convert", "megatron-to-hf", "from-there", "trained")
    shown = said(capfd, "convert", "verify", "from-there", "trained", "--logits")
    assert float(shown.split("differ by ")[1].split()[0]) < 1e-4
    assert main(["convert", "verify", "hf", "trained"]) == 2, "training changed nothing"

    tokenizer = AutoTokenizer.from_pretrained("trained")
    model = AutoModelForCausalLM.from_pretrained("trained")
    asked = tokenizer("1+2=", return_tensors="pt").input_ids
    answer = model.generate(asked, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape == (1, asked.shape[1] + 4)
    assert main(["eval", "trained", "data.task=chain", "model.dtype=float32", "--problems", "2", "--n", "1"]) == 0


def test_a_bit_that_flips_in_a_converted_model_stops_training(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said(capfd, "convert", "hf-to-megatron", "hf", "there")
    write_config(place, model={"path": "there", "dtype": "float32"})
    file = place / "there" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    values = DirectorySource(place / "hf").read("model.layers.2.mlp.up_proj.weight").numpy().tobytes()
    data[data.index(values[128:192]) + 9] ^= 1
    file.write_bytes(bytes(data))
    capfd.readouterr()
    assert main(["train", "run.yaml"]) == 2
    line = capfd.readouterr().err
    wanted = r"there/__0_0\.distcp: tensor model\.layers\.2\.mlp\.up_proj\.weight is not what was written"
    assert re.search(wanted, line), line
    assert not (place / "run" / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_other_families_train_and_their_engine_agrees_with_the_policy(
    place: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    scaling = {"rope_scaling_factor": 8.0} if kind == "llama" else {"head_dim": 8}
    make(place / kind, model_type=kind, **scaling)
    write_config(place, model={"path": kind, "dtype": "float32"}, output=f"run-{kind}")
    assert main(["train", "run.yaml"]) == 0  # after every refit the engine proves its log-probs to be the policy's
    said(capfd, "convert", "megatron-to-hf", f"run-{kind}", "trained")
    assert json.loads(Path("trained", "config.json").read_text())["model_type"] == kind
    assert (place / "trained" / SINGLE).exists()
