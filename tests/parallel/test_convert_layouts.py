"""Converted checkpoints in Megatron's own hands, and Megatron's checkpoints of every layout in the converter's."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from capo_megatron.config import ParallelConfig
from capo_megatron.errors import CheckpointError
from capo_megatron.weights.checkpoint import open_checkpoint
from capo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from capo_megatron.weights.huggingface import DirectorySource, save_hf
from capo_megatron.weights.inspect import inspect
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes
from tests.parallel.launch import run_ranks
from tests.parallel.test_checkpoint import make_policy, steps
from tests.parallel.test_model_parity import LOGITS, Case, run_schedule

pytestmark = pytest.mark.parallel

SIZES: dict[str, Any] = {
    "vocab_size": 1030,  # Megatron pads it to 1152, 1280 or 1536 rows, by the ranks
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}
SHAPES = {
    "tied": ModelShape(**SIZES, tie_word_embeddings=True),
    "untied": ModelShape(**SIZES),
    "qwen3": ModelShape(**SIZES, model_type="qwen3", head_dim=16),
}
LAYOUTS = {
    "1": (1, ParallelConfig()),
    "TP2": (2, ParallelConfig(tensor=2)),
    "TP4": (4, ParallelConfig(tensor=4)),
    "PP2": (2, ParallelConfig(pipeline=2)),
    "PP2 with 2 virtual stages": (2, ParallelConfig(pipeline=2, virtual=2)),
    "TP2 x PP2": (4, ParallelConfig(tensor=2, pipeline=2)),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<name>/ in Hugging Face's format and <name>-megatron/, of every shape."""
    folder = tmp_path_factory.mktemp("converted")
    for name, shape in SHAPES.items():
        generator = torch.Generator().manual_seed(1)
        weights = {}
        for tensor, size in hf_shapes(shape).items():
            centre, spread = (1.0, 0.3) if "norm" in tensor else (0.0, 0.1)
            weights[tensor] = torch.randn(size, generator=generator) * spread + centre
        save_hf(folder / name, shape, weights.items())
        hf_to_megatron(folder / name, folder / f"{name}-megatron")
    return folder


def load_run_and_save(parallel: ParallelConfig, folder: Path, save_to: Path) -> dict[str, Tensor | None]:
    """The logits of every converted model loaded by megatron-core; each is saved as Megatron-LM used to, too."""
    from megatron.core import dist_checkpointing

    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.model import build_model
    from capo_megatron.mcore.optimizer import CHECKPOINT_METADATA

    ranks = runtime.start(parallel, seed=0)
    found = {}
    for name, shape in SHAPES.items():
        chunks = build_model(shape, ranks.layout, torch.float32)
        wanted = {
            f"model{i}": chunk.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA)) for i, chunk in enumerate(chunks)
        }
        loaded = dist_checkpointing.load(wanted, str(folder / f"{name}-megatron"))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{i}"])
        seen: list[Tensor] = []
        with torch.no_grad():
            run_schedule(chunks, ranks.layout, Case(shape, {}, tokens(), torch.empty(0), {}), seen, train=False)
        found[name] = torch.cat(seen) if seen else None
        save_as_megatron_lm(chunks, ranks.layout, save_to / name)
    ranks.barrier()
    ranks.stop()
    return found


def tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (4, 12), generator=torch.Generator().manual_seed(2))


def save_as_megatron_lm(chunks: list[Any], layout: Any, folder: Path) -> None:
    stage = f"_{layout.pp_rank:03d}" if layout.pipeline > 1 else ""
    file = folder / "iter_0000007" / f"mp_rank_{layout.tp_rank:02d}{stage}" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    models = {f"model{i}" if len(chunks) > 1 else "model": chunk.state_dict() for i, chunk in enumerate(chunks)}
    arguments = argparse.Namespace(tensor_model_parallel_size=layout.tensor, params_dtype=torch.float32)
    torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 7, **models}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_a_converted_model_on_any_layout_and_what_it_saves_converts_back(
    converted: Path, tmp_path: Path, layout: str
) -> None:
    size, parallel = LAYOUTS[layout]
    per_rank = run_ranks(load_run_and_save, size, parallel, converted, tmp_path)
    for name in SHAPES:
        model = AutoModelForCausalLM.from_pretrained(converted / name)
        with torch.no_grad():
            wanted = model(tokens()).logits
        logits = [found[name] for found in per_rank if found[name] is not None]
        assert len(logits) == size // parallel.pipeline
        for one in logits:
            torch.testing.assert_close(one, wanted, atol=LOGITS, rtol=0)
        megatron_to_hf(tmp_path / name, tmp_path / f"{name}-back", config=converted / name)
        assert_same_tensors(converted / name, tmp_path / f"{name}-back")
        expected = f"layout     tensor {parallel.tensor}, pipeline {parallel.pipeline}, virtual {parallel.virtual}"
        assert expected in inspect(tmp_path / name)


def assert_same_tensors(a: Path, b: Path) -> None:
    one, other = DirectorySource(a), DirectorySource(b)
    assert one.names() == other.names()
    for name in one.names():
        assert torch.equal(one.read(name), other.read(name)), name


def train_and_save(parallel: ParallelConfig, output: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """A checkpoint of `train`'s kind, with its optimizer; the policy's weights at that moment."""
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore

    ranks = runtime.start(parallel, seed=1)
    policy = make_policy(ranks, parallel, dtype)
    store = DistCheckpointStore(output, ranks)
    store.save(0, policy, {})
    steps(policy, 2)
    store.save(2, policy, {})
    return dict(policy.hf_weights())


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("TP2 x PP2", torch.float32), ("PP2 with 2 virtual stages", torch.bfloat16), ("TP2", torch.bfloat16)],
)
def test_a_training_checkpoint_of_any_layout_is_exported_by_one_process(
    tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    size, parallel = LAYOUTS[layout]
    weights = run_ranks(train_and_save, size, parallel, tmp_path / "run", dtype)[0]
    megatron_to_hf(tmp_path / "run", tmp_path / "out")
    exported = DirectorySource(tmp_path / "out")
    assert exported.names() == weights.keys()
    for name, wanted in weights.items():
        assert torch.equal(exported.read(name), wanted), name
    megatron_to_hf(tmp_path / "run" / "checkpoints" / "step_000000", tmp_path / "start")
    begun = DirectorySource(tmp_path / "start")
    assert any(not torch.equal(begun.read(name), wanted) for name, wanted in weights.items()), "training moved nothing"
    shown = inspect(tmp_path / "run")
    assert "step       2" in shown
    assert any(line.startswith(f"layout     tensor {parallel.tensor}, pipeline {parallel.pipeline}") for line in shown)


def test_an_old_checkpoint_that_lacks_a_rank_or_holds_objects_is_refused(converted: Path, tmp_path: Path) -> None:
    run_ranks(load_run_and_save, 2, ParallelConfig(tensor=2), converted, tmp_path)
    folder, config = tmp_path / "untied" / "iter_0000007", converted / "untied"
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)

    torch.save(whole | {"args": Fraction(1, 2)}, path)  # stands for any object
    with pytest.raises(CheckpointError, match=r"mp_rank_00/\S+: holds fractions\.Fraction objects, .* --trust-pickle"):
        megatron_to_hf(folder, tmp_path / "out", config=config)
    megatron_to_hf(folder, tmp_path / "out", config=config, trust_pickle=True)
    assert_same_tensors(config, tmp_path / "out")

    del whole["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
    torch.save(whole, path)
    with pytest.raises(CheckpointError, match=r"tensor decoder\.layers\.1\.mlp\.linear_fc2\.weight is held by 1 of 2"):
        open_checkpoint(folder, config)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"mp_rank_00/model_optim_rng\.pt: damaged or truncated"):
        open_checkpoint(folder, config)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_00: missing: there are ranks up to tensor 1, pipeline 0"):
        open_checkpoint(folder, config)
