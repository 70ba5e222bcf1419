"""Checkpoints resume on any layout as if nothing had happened, and are whole or absent."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from capo_megatron.config import ParallelConfig, TrainConfig
from capo_megatron.errors import CheckpointError
from tests.parallel.launch import run_ranks
from tests.parallel.test_policy_parity import TOLERANCE, random_weights, train_batch

pytestmark = pytest.mark.parallel

BEFORE, AFTER = 2, 3  # optimizer steps before saving, and after: an optimizer restored wrongly shows from the second on

SAVED = {
    "one rank": (1, ParallelConfig()),
    "TP2": (2, ParallelConfig(tensor=2)),
    "PP2 with 2 virtual stages": (2, ParallelConfig(pipeline=2, virtual=2)),
    "TP2 x PP2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "PP2 x DP2": (4, ParallelConfig(pipeline=2)),
}
RESUMED = {
    "one rank": (1, ParallelConfig()),
    "DP2": (2, ParallelConfig()),
    "DP2, plain optimizer": (2, ParallelConfig(distributed_optimizer=False)),
    "PP2 x DP2": (4, ParallelConfig(pipeline=2)),
    "TP2": (2, ParallelConfig(tensor=2)),
}
# Every saved and every resumed layout occurs, each with a different partner.
PAIRS = [
    ("one rank", "one rank"),
    ("one rank", "PP2 x DP2"),
    ("TP2", "DP2"),
    ("PP2 with 2 virtual stages", "TP2"),
    ("TP2 x PP2", "one rank"),
    ("TP2 x PP2", "PP2 x DP2"),
    ("PP2 x DP2", "PP2 x DP2"),
]


def make_policy(ranks: Any, parallel: ParallelConfig, dtype: torch.dtype = torch.float32, layers: int = 4) -> Any:
    from capo_megatron.mcore.policy import MegatronPolicy
    from capo_megatron.weights.shape import ModelShape
    from capo_megatron.weights.sources import DictSource

    # On the last pipeline stage the tied embedding has a bucket of its own in the distributed optimizer, which its
    # 21 x 32 weights do not fill: what follows must not shift.
    shape = ModelShape(21, 32, layers, 4, 2, 48, tie_word_embeddings=True, initializer_range=0.1)
    config = TrainConfig(
        lr=1e-3, lr_schedule="cosine", lr_warmup_steps=1, micro_batch_tokens=64, betas=(0.9, 0.95), eps=1e-6
    )
    policy = MegatronPolicy(
        shape, ranks, config, dtype=dtype, total_steps=9, distributed_optimizer=parallel.distributed_optimizer
    )
    policy.load(DictSource(random_weights(shape)))
    policy.freeze_reference()
    return policy


def steps(policy: Any, count: int) -> list[tuple[float, float]]:
    algorithm, batch = train_batch(policy)
    reports = [policy.train_step(batch, algorithm.loss) for _ in range(count)]
    return [(report.loss, report.grad_norm, report.lr) for report in reports]


def train_and_save(folder: str, parallel: ParallelConfig) -> None:
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(parallel, seed=1)
    policy = make_policy(ranks, parallel)
    steps(policy, BEFORE)
    DistCheckpointStore(Path(folder), ranks).save(BEFORE, policy, {"prompts": {"position": 7}})


def resume(folder: str, parallel: ParallelConfig) -> dict[str, Any]:
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(parallel, seed=2)
    policy = make_policy(ranks, parallel)
    step, state = DistCheckpointStore(Path(folder), ranks).load(policy)
    return {"step": step, "state": state, "version": policy.version, **finish(policy)}


def finish(policy: Any) -> dict[str, Any]:
    reports = steps(policy, AFTER)
    return {"reports": np.array(reports), "weights": {name: w.numpy().copy() for name, w in policy.hf_weights()}}


def uninterrupted() -> dict[str, Any]:
    from capo_megatron.mcore import runtime

    policy = make_policy(runtime.start(ParallelConfig(), seed=1), ParallelConfig())
    steps(policy, BEFORE)
    return finish(policy)


@cache
def yardstick() -> dict[str, Any]:
    return run_ranks(uninterrupted, 1)[0]


@cache
def saved(layout: str, root: Path) -> Path:
    folder = root / layout.replace(" ", "_")
    size, parallel = SAVED[layout]
    run_ranks(train_and_save, size, str(folder), parallel)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resuming_on_another_layout_changes_nothing(before: str, after: str, root: Path) -> None:
    size, parallel = RESUMED[after]
    want = yardstick()
    for got in run_ranks(resume, size, str(saved(before, root)), parallel):
        assert (got["step"], got["version"], got["state"]) == (BEFORE, BEFORE, {"prompts": {"position": 7}})
        np.testing.assert_allclose(got["reports"], want["reports"], rtol=TOLERANCE, atol=1e-7)
        for name, expected in want["weights"].items():
            error = np.linalg.norm(got["weights"][name] - expected) / np.linalg.norm(expected)
            assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


def save_then_die(folder: str) -> None:
    """Save one checkpoint, and die as if killed while writing the next one."""
    from capo_megatron.mcore import checkpoint, runtime

    ranks = runtime.start(ParallelConfig(), seed=1)
    policy = make_policy(ranks, ParallelConfig())
    store = checkpoint.DistCheckpointStore(Path(folder), ranks)
    steps(policy, 1)
    store.save(1, policy, {})
    checkpoint._flush_to_disk = lambda *_, **__: os._exit(9)  # the tensors of step 2 are written by now
    steps(policy, 1)
    store.save(2, policy, {})


def test_a_save_that_is_killed_half_way_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a traceback"):
        run_ranks(save_then_die, 1, str(tmp_path))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["latest", "step_000001", "step_000002.unfinished"]
    assert run_ranks(resume, 1, str(tmp_path), ParallelConfig())[0]["step"] == 1
    run_ranks(train_and_save, 1, str(tmp_path), ParallelConfig())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step_000001",
        "step_000002",
    ]


def refusals(folder: str, other: str) -> dict[str, str]:
    """What the store says of checkpoints that it must not load or cannot write."""
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(ParallelConfig(), seed=1)
    said = {}

    def attempt(name: str, action: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            action()
        said[name] = str(caught.value)

    store = DistCheckpointStore(Path(folder), ranks)
    deeper = make_policy(ranks, ParallelConfig(), layers=2)
    attempt("another model", lambda: store.load(deeper))
    policy = make_policy(ranks, ParallelConfig())
    attempt("no such step", lambda: store.load(policy, 99))
    damaged = DistCheckpointStore(Path(other), ranks)
    attempt("damaged", lambda: damaged.load(policy))
    said["no tensors"] = str(damaged.tensors(BEFORE))
    (Path(other) / "checkpoints" / f"step_{BEFORE:06d}" / "tensors.safetensors").write_bytes(b"torn")
    attempt("damaged tensors", lambda: damaged.tensors(BEFORE))
    policy.checkpoint_bytes = lambda: 2**60  # more than any disk
    attempt("full disk", lambda: store.save(5, policy, {}))
    said["steps"] = str(store.steps())
    return said


def test_unusable_checkpoints_are_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    folder, damaged = saved("one rank", root), tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    for file in (damaged / "checkpoints" / f"step_{BEFORE:06d}").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    said = run_ranks(refusals, 1, str(folder), str(damaged))[0]
    assert "num_hidden_layers 4, this one has 2" in said["another model"]
    assert "step_000099" in said["no such step"]
    assert "cannot be read" in said["damaged"]
    assert said["no tensors"] == "{}" and "tensors.safetensors: cannot be read" in said["damaged tensors"]
    assert "a checkpoint needs" in said["full disk"] and "Nothing was written" in said["full disk"]
    assert said["steps"] == f"[{BEFORE}]"
    assert all("\n" not in text for text in said.values())


def keep_some(folder: str) -> list[Any]:
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(ParallelConfig(), seed=1)
    policy = make_policy(ranks, ParallelConfig())
    store = DistCheckpointStore(Path(folder), ranks, keep=3)
    for step in (1, 4, 5, 6):
        store.save(step, policy, {})
    kept = [store.steps()]
    (Path(folder) / "checkpoints" / "latest").write_text("step_000004")  # taken back
    store = DistCheckpointStore(Path(folder), ranks, keep=1)
    store.save(2, policy, {})
    store.save(3, policy, {})
    kept += [store.steps(), [store.latest()], [len(psutil.Process().children())]]
    return kept


def test_the_last_checkpoints_are_kept_and_saving_leaves_no_process(tmp_path: Path) -> None:
    assert run_ranks(keep_some, 1, str(tmp_path)) == [[[4, 5, 6], [3, 4, 5, 6], [3], [0]]]


def bfloat16_round_trip(folder: str, parallel: ParallelConfig) -> list[Any]:
    """Losses after saving, and after loading into a fresh policy, with float32 main weights behind bfloat16."""
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(parallel, seed=1)
    policy = make_policy(ranks, parallel, torch.bfloat16)
    steps(policy, BEFORE)
    store = DistCheckpointStore(Path(folder), ranks)
    store.save(BEFORE, policy, {})
    want = steps(policy, AFTER)
    again = make_policy(ranks, parallel, torch.bfloat16)
    store.load(again)
    return [want, steps(again, AFTER)]


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_resumes_exactly(distributed: bool, tmp_path: Path) -> None:
    parallel = ParallelConfig(distributed_optimizer=distributed)
    for want, got in run_ranks(bfloat16_round_trip, 2, str(tmp_path), parallel):
        assert got == want
