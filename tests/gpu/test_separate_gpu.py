"""A vLLM server on a GPU, which takes weights from another process: over NCCL between two GPUs, over gloo on one.

python -m pytest -m gpu tests/gpu/test_separate_gpu.py
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from capo_megatron.cli import main
from capo_megatron.config import SeparateConfig, load
from capo_megatron.errors import RolloutError
from capo_megatron.model import Model
from capo_megatron.rollout.channel import SECRET
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.remote import RemoteEngine
from capo_megatron.rollout.sketch import differing, sketches
from capo_megatron.runlog import read_rows
from capo_megatron.seams import SamplingParams, Solo
from tests.e2e.commands import TREE, write_config
from tests.e2e.serving import TOKEN, engine_server, free_address, kill, separate
from tests.unit.tiny_qwen2 import ModelPolicy, NumberTokenizer, Prompts, weights_of
from tests.vllm_engine.engines import UNTIED_SHAPE, long_problems, wide_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
        "gloo",
    ],
)


def config(folder: Path, address: str, backend: str) -> Path:
    sampled = {"engine": "vllm", "vllm": {"memory_fraction": 0.1, "batch_size": 64}, "probe_tolerance": 1e-2}
    return write_config(
        folder,
        output=str(folder / "run"),
        model={"dtype": "float32", "shape": UNTIED_SHAPE | {"initializer_range": 0.1}},
        rollout=TREE["rollout"] | sampled | separate(address, backend=backend, wait_s=300.0),
        train=TREE["train"] | {"steps": 4},
        algorithm={"kind": "capo", "importance_cap": 2.0},
    )


def device_of(backend: str) -> dict[str, str]:
    """The GPU of the server: NCCL wants one of its own."""
    return {"CUDA_VISIBLE_DEVICES": "1" if backend == "nccl" else "0"}


@BACKENDS
def test_every_refit_is_proven_and_a_dead_server_is_noticed(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv(SECRET, TOKEN)
    address = free_address()
    path = config(tmp_path, address, backend)
    identity = Model.accept(load(path)).engine_identity()
    options = SeparateConfig(servers=(address,), backend=backend, wait_s=300.0)  # type: ignore[arg-type]
    probe, params = Probe(4, 1e-2, 1e-4), SamplingParams(12, temperature=0.7)
    with engine_server(path, address, **device_of(backend)) as process:
        ours = RemoteEngine(options, identity, NumberTokenizer(), Solo(), 2**16, torch.device("cuda", 0))
        for version in range(3):
            model = wide_model(version, tied=False)
            ours.load_weights([(name, weight.cuda()) for name, weight in weights_of(model)], version)
            policy = ModelPolicy(model, version, params.temperature)
            metrics = probe.prove(ours, policy, Prompts(long_problems(20)), params, Solo(), 0)
            assert metrics["refit/gap_median"] < 1 + 1e-3
            assert not differing(sketches(weights_of(model)), ours.sketches(), 1e-4)
        kill(process)
        began = time.monotonic()
        with pytest.raises(RolloutError, match="engine server"):
            ours.load_weights([(name, weight.cuda()) for name, weight in weights_of(wide_model(3, tied=False))], 3)
        assert time.monotonic() - began < 60


@BACKENDS
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_trains_with_a_server(backend: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv(SECRET, TOKEN)
    address = free_address()
    path = config(tmp_path, address, backend)
    with engine_server(path, address, **device_of(backend)):
        assert main(["train", str(path), f"rollout.async_steps={ahead}"]) == 0
    found = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(row["refit/gap_median"] < 1 + 1e-2 and math.isfinite(row["train/loss"]) for row in found)
