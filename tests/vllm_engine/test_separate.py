"""vLLM behind a server, in a process of its own: every refit is proven, and what goes wrong on the way is found."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from capo_megatron.config import SeparateConfig, load
from capo_megatron.errors import RolloutError
from capo_megatron.model import Model
from capo_megatron.rollout import transfer
from capo_megatron.rollout.channel import SECRET
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.remote import RemoteEngine
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.seams import SamplingParams, Solo
from tests.e2e.commands import TREE, write_config
from tests.e2e.serving import TOKEN, engine_server, free_address, kill, separate
from tests.unit.tiny_qwen2 import ModelPolicy, NumberTokenizer, Prompts, engine_of, weights_of
from tests.vllm_engine.engines import UNTIED_SHAPE, long_problems, wide_model
from tests.vllm_engine.test_run import SHAPE

LIMIT_S = 60
PARAMS = SamplingParams(12, temperature=0.7, seed=3)
STEPS = 6


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, TOKEN)


# --- a policy here, the engine there ----------------------------------------------------------------------------------


class Server:
    """A vLLM server for the model of `wide_model`."""

    def __init__(self, folder: Path) -> None:
        self.address = free_address()
        self.config = write_config(
            folder,
            TREE,
            model={"dtype": "float32", "shape": UNTIED_SHAPE},
            rollout=TREE["rollout"] | {"engine": "vllm", "vllm": {"batch_size": 64}} | separate(self.address),
        )
        self.identity = Model.accept(load(self.config)).engine_identity()

    def engine(self) -> RemoteEngine:
        options = SeparateConfig(servers=(self.address,), wait_s=120.0)
        return RemoteEngine(options, self.identity, NumberTokenizer(), Solo(), 2**16, torch.device("cpu"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("wide"))
    with engine_server(found.config, found.address):
        yield found


def proven(engine: RemoteEngine, probe: Probe, version: int) -> dict[str, float]:
    policy = ModelPolicy(wide_model(version, tied=False), version, PARAMS.temperature)
    return probe.prove(engine, policy, Prompts(long_problems(20)), PARAMS, Solo(), 0)


def test_every_refit_is_proven_and_gives_the_greedy_tokens_of_the_policy(server: Server) -> None:
    ours, probe, greedy = server.engine(), Probe(4, 1e-3, 1e-5), SamplingParams(24, temperature=0.0, stop_ids=(3,))
    for version in range(3):
        model = wide_model(version, tied=False)
        ours.load_weights(weights_of(model), version)
        assert proven(ours, probe, version)["refit/gap_max"] < 1 + 1e-4
        assert not differing(sketches(weights_of(model)), ours.sketches(), 1e-5)
        found = ours.generate(long_problems(4), 2, greedy)
        wanted = engine_of(model, version=version).generate(long_problems(4), 2, greedy)
        assert [[sample.ids for sample in group] for group in found] == [[s.ids for s in group] for group in wanted]
        assert {sample.version for group in found for sample in group} == {version} == {ours.version}
    whole = ours.generate(long_problems(4), 3, PARAMS)
    assert ours.generate(long_problems(4)[2:], 3, PARAMS) == whole[2:], "seed, problem and index decide a response"


def test_a_bucket_that_is_lost_leaves_nothing_to_sample_from(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = server.engine(), transfer._send_bucket
    ours.load_weights(weights_of(wide_model(0, tied=False)), 0)

    def lossy(group: Any, number: int, *rest: Any) -> None:
        if number != 3:
            plain(group, number, *rest)

    monkeypatch.setattr(transfer, "_send_bucket", lossy)
    with pytest.raises(RolloutError, match=r"bucket 3 was lost; bucket 4 came in its place\. .* missing"):
        ours.load_weights(weights_of(wide_model(1, tied=False)), 1)
    assert ours.version == -1
    with pytest.raises(RolloutError, match="without weights"):
        ours.generate(long_problems(1), 1, PARAMS)
    monkeypatch.setattr(transfer, "_send_bucket", plain)
    again = server.engine()
    again.load_weights(weights_of(wide_model(1, tied=False)), 1)
    assert proven(again, Probe(4, 1e-3, 1e-5), 1)["refit/gap_max"] < 1 + 1e-4


@pytest.mark.parametrize(
    ("refit", "reason"),
    [
        (lambda _: None, "the engine holds policy version 1, the policy is at 2: the refit did not run"),
        (
            lambda engine: engine.load_weights(weights_of(wide_model(1, tied=False)), 2),
            "The engine still has the weights of version 1: the refit did not reach it",
        ),
    ],
    ids=["skipped", "renamed"],
)
def test_a_stale_version_is_found(server: Server, refit: Callable[[RemoteEngine], None], reason: str) -> None:
    ours, probe = server.engine(), Probe(4, 1e-3, 1e-5)
    for version in (0, 1):
        ours.load_weights(weights_of(wide_model(version, tied=False)), version)
        proven(ours, probe, version)
    refit(ours)
    with pytest.raises(RolloutError, match=reason):
        proven(ours, probe, 2)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("separate-runs")


def config(folder: Path, name: str, **rollout: Any) -> Path:
    """The run `name`; all runs share their base model."""
    place = folder / name
    place.mkdir()
    tree = TREE | {
        "output": str(place / "run"),
        "model": {"dtype": "float32", "shape": SHAPE},
        "warmup": {"steps": 60, "batch": 32, "lr_warmup_steps": 5, "path": str(folder / "base")},
        "data": TREE["data"] | {"task_size": 64, "task_options": {"max_ops": 2}},
        "rollout": {"engine": "vllm", "prompts": 6, "samples": 4, "max_tokens": 12, "probe_rows": 2, **rollout},
        "train": {"steps": STEPS, "minibatches": 2, "lr": 1e-3, "micro_batch_tokens": 512},
        "checkpoint": {"every": 2},
        "eval": {"every": 3, "samples": 2, "at_start": False},
        "algorithm": {"kind": "capo", "importance_cap": 2.0},
    }
    return write_config(place, tree)


def run(*words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "capo_megatron", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path.parent / "run" / "metrics.jsonl").read_text().splitlines()]


@cache
def colocated(folder: Path, ahead: int) -> list[dict[str, float]]:
    path = config(folder, f"colocated-{ahead}", async_steps=ahead)
    run("train", str(path))
    return rows(path)


@pytest.mark.parametrize(
    ("ahead", "engine_ranks", "tensor"),
    [(0, 2, 2), (1, 1, 1)],
    ids=["in step, engine over two ranks", "one step ahead"],
)
def test_a_run_with_a_server_is_the_run_without(folder: Path, ahead: int, engine_ranks: int, tensor: int) -> None:
    wanted, address = colocated(folder, ahead), free_address()
    path = config(folder, f"separate-{ahead}", async_steps=ahead, vllm={"tensor": tensor}, **separate(address))
    with engine_server(path, address, engine_ranks):
        run("train", str(path))
    found = rows(path)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, other in zip(found, wanted, strict=True):
        assert row["refit/gap_max"] < 1 + 1e-4
        for name in ("reward/mean", "response/length"):
            assert row[name] == other[name], (row["step"], name)
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert math.isclose(row[name], other[name], rel_tol=1e-3, abs_tol=1e-5), (row["step"], name)
    assert any(row["train/grad_norm"] > 0 for row in found), "nothing was trained"


def test_an_engine_that_is_killed_ends_the_run_in_time_and_both_continue(folder: Path) -> None:
    wanted, address = colocated(folder, 0), free_address()
    path = config(folder, "killed", **separate(address))
    with engine_server(path, address) as process:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "capo_megatron", "train", str(path)]
        trainer = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        metrics = path.parent / "run" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            assert trainer.poll() is None, trainer.stderr and trainer.stderr.read()
            time.sleep(0.02)
        kill(process)
        killed = time.monotonic()
        _, said = trainer.communicate(timeout=LIMIT_S)
        assert time.monotonic() - killed < LIMIT_S
    assert trainer.returncode == 2
    assert f"engine server {address}: " in said and "continues from the newest checkpoint" in said
    with engine_server(path, address):  # it takes the weights of the checkpoint
        run("train", str(path))
    for row, other in zip(rows(path), wanted, strict=True):
        assert row["reward/mean"] == other["reward/mean"]
        assert math.isclose(row["train/loss"], other["train/loss"], rel_tol=1e-3, abs_tol=1e-5)
