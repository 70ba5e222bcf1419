"""Layouts and model shapes: what fits, where a rank stands, and what is said when it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capo_megatron.config import ParallelConfig, ShapeConfig
from capo_megatron.errors import CheckpointError, ConfigError
from capo_megatron.mcore import cpu, runtime, versions
from capo_megatron.mcore.model import check_layout, transformer_config
from capo_megatron.mcore.runtime import Layout
from capo_megatron.seams import Team
from capo_megatron.weights.shape import ModelShape, hf_config, read_shape

QWEN_MATH_1B = ModelShape(151936, 1536, 28, 12, 2, 8960, name="qwen2.5-math-1.5b", tie_word_embeddings=True)


def test_ranks_count_tensor_first_then_data_then_pipeline() -> None:
    places = [Layout.of(ParallelConfig(tensor=2, pipeline=3), 12, rank) for rank in range(12)]
    assert [(place.tp_rank, place.dp_rank, place.pp_rank) for place in places[:5]] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
    ]
    for place in places:
        assert place.rank_at(place.tp_rank, place.dp_rank, place.pp_rank) == place.rank
        assert place.world == 12 and place.data == 2
        assert place.is_first_stage == (place.rank < 4) and place.is_last_stage == (place.rank >= 8)


@pytest.mark.parametrize("virtual", [1, 2])
def test_pipelines_over_gloo_never_free_what_is_being_sent_and_interleaved_ones_have_one_shape(virtual: int) -> None:
    """Either would give wrong gradients, but only now and then, on a busy machine."""
    cpu.install()
    layout = Layout.of(ParallelConfig(pipeline=2, virtual=virtual), 2)
    config = transformer_config(ModelShape(19, 32, 4, 4, 2, 48), layout, torch.float32, "none")
    assert not config.deallocate_pipeline_outputs
    assert config.variable_seq_lengths == (virtual == 1)


def test_virtual_stages_interleave_the_layers() -> None:
    layout = Layout.of(ParallelConfig(pipeline=2, virtual=2), 2)
    assert [list(layout.layers(chunk, 8, pp_rank)) for pp_rank in (0, 1) for chunk in (0, 1)] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (
            ParallelConfig(tensor=2, pipeline=2),
            6,
            r"tensor=2 x parallel.pipeline=2 = 4 ranks do not divide the 6 ranks",
        ),
        (ParallelConfig(tensor=0), 1, r"parallel.tensor=0: must be at least 1"),
        (ParallelConfig(virtual=2), 1, r"parallel.virtual=2: virtual stages need parallel.pipeline > 1, got 1"),
        (ParallelConfig(sequence=True), 2, r"parallel.sequence=true: .* needs parallel.tensor > 1, got 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(parallel: ParallelConfig, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.of(parallel, world)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(tensor=4),
            r"tensor=4 does not divide the 2 key-value heads of qwen2.5-math-1.5b. Use 1 or 2\.",
        ),
        (ParallelConfig(pipeline=8), r"pipeline=8 does not divide the 28 layers .* Use 1, 2, 4, 7, 14 or 28\."),
        (ParallelConfig(pipeline=4, virtual=2), r"pipeline=4 x parallel.virtual=2 = 8 does not divide the 28 layers"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(QWEN_MATH_1B, parallel)


def test_a_model_that_can_be_cut_is_accepted() -> None:
    check_layout(QWEN_MATH_1B, ParallelConfig(tensor=2, pipeline=7, virtual=4))


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "padded"),
    [(151936, 1, 151936), (151936, 2, 152064), (151936, 8, 152576), (152064, 8, 152576), (73, 1, 73), (73, 2, 74)],
)
def test_vocabularies_are_padded_as_megatron_does_and_toys_hardly(vocabulary: int, tensor: int, padded: int) -> None:
    assert ModelShape(vocabulary, 64, 2, 4, 2, 128).padded_vocab(tensor) == padded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive integer"),
        ({"hidden_size": 12}, "hidden_size / num_attention_heads = 3 must be even"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict[str, int], message: str) -> None:
    sizes = {"vocab_size": 17, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128}
    with pytest.raises(ConfigError, match=f"model.shape: {message}"):
        ModelShape.of(ShapeConfig(**sizes | changes))


def written(folder: Path, **changes: Any) -> Path:
    config = hf_config(QWEN_MATH_1B, "bfloat16") | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("old", [True, False])
def test_the_rotary_base_is_read_from_old_and_new_configs(tmp_path: Path, old: bool) -> None:
    if old:
        folder = written(tmp_path, rope_theta=40_000.0, rope_parameters=..., rope_scaling=None)
    else:
        folder = written(tmp_path, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 40_000.0})
    assert read_shape(folder).rope_theta == 40_000.0


def test_a_model_directory_of_transformers_is_read(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2Config(**sizes, vocab_size=73, intermediate_size=128, rope_theta=5e5).save_pretrained(tmp_path)
    found = read_shape(tmp_path)
    assert found == ModelShape(**sizes, vocab_size=73, intermediate_size=128, rope_theta=5e5, name=tmp_path.name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type='gemma' is not supported. Use a 'qwen2', 'qwen3' or 'llama' model"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=true is not supported for a llama model"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling with low_freq_factor=None is not supported"),
        ({"model_type": ...}, "model_type=None is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters of type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"head_dim": 64}, "head_dim=64 differs from hidden_size / num_attention_heads"),
        ({"hidden_size": ...}, "a size is missing .*hidden_size"),
        ({"num_attention_heads": 7}, "num_attention_heads=7 does not divide hidden_size=1536"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        read_shape(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{", "cannot be read as JSON"), ("[]", "a list")]
)
def test_a_missing_or_damaged_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        read_shape(tmp_path)


def test_an_unknown_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SUPPORTED", {"0.1": "Python 2"})
    with pytest.raises(ConfigError, match=r"megatron-core: version \S+ is not supported. Install 0.1 \(Python 2\)"):
        versions.check()


def test_a_process_alone_is_a_team_of_one_and_can_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        started = runtime.start(ParallelConfig(), seed=1, device="cpu")
        assert isinstance(started, Team) and (started.rank, started.size) == (0, 1)
        assert started.gather("a") == ["a"] and started.any(True) and not started.any(False)
        started.barrier()
        started.stop()
        started.stop()
        assert not torch.distributed.is_initialized()


def test_ranks_that_cannot_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: MASTER_ADDR and MASTER_PORT are not set"):
        runtime.start(ParallelConfig(), seed=0, device="cpu")


def test_the_seed_decides_every_generator() -> None:
    drawn = []
    for seed in (1, 1, 2):
        runtime.start(ParallelConfig(), seed, device="cpu").stop()
        drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks that CUDA is refused outside of Megatron")
def test_only_megatron_sees_the_cpu_as_cuda() -> None:
    cpu.install()
    cpu.install()
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
    assert schedules.torch.ones(2, device=schedules.torch.cuda.current_device()).device.type == "cpu"
    assert schedules.torch.nn is torch.nn and schedules.torch.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    tensor = torch.zeros(2)
    assert tensor.cuda() is tensor
    assert tensor.type() in ["torch.FloatTensor"] and tensor.type() in ["torch.cuda.FloatTensor"]
    assert tensor.type() != "torch.cuda.HalfTensor" and {tensor.type(): 1}["torch.FloatTensor"] == 1
    assert tensor.type(torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("rank", "billions"), [(0, 1.253), (8, 1.097), (63, 1.253)])
def test_one_rank_of_a_72b_model_on_64_ranks_can_be_laid_out_without_the_others(rank: int, billions: float) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from capo_megatron.mcore.model import build_model

    shape = ModelShape(152064, 8192, 80, 64, 8, 29568, name="qwen2.5-72b")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    try:
        started = runtime.start(ParallelConfig(tensor=8, pipeline=8), seed=0, device="cpu")
        with torch.device("meta"):
            [chunk] = build_model(shape, started.layout, torch.bfloat16)
        started.stop()
        assert torch.distributed.is_initialized(), "a process group that somebody else made was ended"
    finally:
        torch.distributed.destroy_process_group()
    parameters = list(chunk.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert round(sum(parameter.numel() for parameter in parameters) / 1e9, 3) == billions
