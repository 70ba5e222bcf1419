"""Whole runs on the vLLM engine: every layout trains the same, and as the transformers engine does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.commands import TREE, write_config

STEPS = 10
SHAPE = {
    "vocab_size": 17,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
WARMUP = {"steps": 60, "batch": 32, "lr_warmup_steps": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-runs")


def config(folder: Path, name: str, engine: str = "vllm", tied: bool = True, **rollout: Any) -> Path:
    """The run `name`; all runs share their base model."""
    place = folder / name
    place.mkdir()
    model = {"dtype": "float32", "shape": SHAPE | {"tie_word_embeddings": tied}}
    return write_config(
        place,
        TREE
        | {
            "output": str(place / "run"),
            "model": model,
            "warmup": WARMUP | {"path": str(folder / f"base-{tied}")},
            "data": TREE["data"] | {"task_size": 64, "task_options": {"max_ops": 2}},
            "rollout": {"engine": engine, "prompts": 6, "samples": 4, "max_tokens": 12, "probe_rows": 2, **rollout},
            "train": {"steps": STEPS, "minibatches": 2, "lr": 1e-3, "micro_batch_tokens": 512},
            "checkpoint": {"every": 0},
            "eval": {"every": 5, "samples": 2, "at_start": False},
        },
    )


def run(*words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(path: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (path.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    return found


@cache
def one_rank(folder: Path, tied: bool) -> list[dict[str, float]]:
    path = config(folder, f"one-{tied}", tied=tied)
    run("tests.vllm_engine.replay", "record", str(folder / f"record-{tied}.json"), str(path))
    return rows(path)


def check_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for row, other in zip(found, wanted, strict=True):
        for name in ("reward/mean", "response/length"):
            assert row[name] == other[name], (row["step"], name)
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert math.isclose(row[name], other[name], rel_tol=1e-3, abs_tol=1e-5), (row["step"], name)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_sync_of_a_run_is_proven(folder: Path, tied: bool) -> None:
    found = one_rank(folder, tied)
    assert all(row["refit/gap_max"] < 1 + 1e-4 for row in found)
    assert all(row["engine/gap_max"] < 1 + 1e-4 for row in found)
    assert any(row["train/grad_norm"] > 0 for row in found), "nothing was trained"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_transformers_engine_trains_the_same_on_the_same_tokens(folder: Path, tied: bool) -> None:
    wanted = one_rank(folder, tied)
    path = config(folder, f"replayed-{tied}", engine="transformers", tied=tied)
    run("tests.vllm_engine.replay", "replay", str(folder / f"record-{tied}.json"), str(path))
    check_same(rows(path), wanted)


@pytest.mark.parametrize(
    ("ranks", "layout", "tensor"),
    [
        (2, "parallel.tensor=2", 1),
        (2, "parallel.pipeline=2", 2),
        (4, "parallel.tensor=2 parallel.pipeline=2", 2),
    ],
    ids=["TP2", "PP2, engine on two ranks", "TP2xPP2, two engines of two ranks"],
)
def test_every_layout_samples_and_trains_the_same(folder: Path, ranks: int, layout: str, tensor: int) -> None:
    wanted = one_rank(folder, True)
    path = config(folder, layout.replace(" ", "-"), vllm={"tensor": tensor})
    run("capo_megatron", "train", str(path), *layout.split(), "--nproc", str(ranks))
    found = rows(path)
    assert all(row["refit/gap_max"] < 1 + 1e-4 for row in found)
    check_same(found, wanted)
