"""The table between Hugging Face and Megatron-core weights, and the files on the way in and out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.mcore.hf_weights import _read, load_hf, slots
from capo_megatron.mcore.runtime import Layout
from capo_megatron.weights import huggingface
from capo_megatron.weights.huggingface import DirectorySource, save_hf
from capo_megatron.weights.shape import ModelShape, hf_config, read_shape
from capo_megatron.weights.sources import DictSource, RandomSource, identity
from capo_megatron.weights.table import QWEN2, Packing, hf_shapes

SHAPE = ModelShape(
    vocab_size=73,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=40,
    tie_word_embeddings=False,
    rope_theta=20_000.0,
    max_position_embeddings=128,
)
ALONE = Layout(tensor=1, pipeline=1, virtual=1, sequence=False, data=1, rank=0)


def weights(shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    return {name: torch.randn(size) for name, size in hf_shapes(shape).items()}


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("rule", QWEN2, ids=lambda rule: rule.names[0])
def test_joining_the_ranks_parameters_gives_the_parts_back(rule, tensor: int) -> None:
    parts = [torch.randn(part.shape(SHAPE)) for part in rule.parts]
    rows = SHAPE.padded_vocab(tensor) if rule.vocabulary else 0
    whole = [torch.cat([part, part.new_zeros(max(0, rows - len(part)), *part.shape[1:])]) for part in parts]
    shards = []
    for rank in range(tensor):
        pieces = whole if rule.cut is None else [part.chunk(tensor, dim=rule.cut)[rank] for part in whole]
        shards.append(rule.pack(pieces, SHAPE))
        assert shards[-1].shape == rule.local_shape(SHAPE, tensor)
    for found, part in zip(rule.join(shards, SHAPE), parts, strict=True):
        assert torch.equal(found, part)


def test_query_key_and_value_are_interleaved_by_key_value_group() -> None:
    [rule] = [rule for rule in QWEN2 if rule.names == ("self_attention.linear_qkv.bias",)]
    heads, groups, dim = SHAPE.num_attention_heads, SHAPE.num_key_value_heads, SHAPE.head_dim
    query = torch.arange(heads).repeat_interleave(dim)
    key = 100 + torch.arange(groups).repeat_interleave(dim)
    value = 200 + torch.arange(groups).repeat_interleave(dim)
    packed = rule.pack([query, key, value], SHAPE)
    assert packed[::dim].tolist() == [0, 1, 100, 200, 2, 3, 101, 201, 4, 5, 102, 202, 6, 7, 103, 203]


def test_every_hugging_face_tensor_of_qwen2_is_in_the_table() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for tied in (True, False):
        shape = replace(SHAPE, tie_word_embeddings=tied)
        model = Qwen2ForCausalLM(Qwen2Config(**hf_config(shape, "float32")))
        assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == hf_shapes(shape)


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_every_layer_has_one_place_and_the_order_is_that_of_computation(pipeline: int, virtual: int) -> None:
    found = slots(SHAPE, Layout(1, pipeline, virtual, False, 1, 0))
    layers = [slot.place.layer for slot in found if slot.rule.packing is Packing.STACKED]
    assert layers == list(range(SHAPE.num_hidden_layers))
    stages = [slot.chunk * pipeline + slot.pp_rank for slot in found]
    assert stages == sorted(stages)


def test_seeded_tensors_depend_on_seed_and_name_only_and_are_cut_lazily() -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = RandomSource(SHAPE, 5).read(name)
    assert torch.equal(RandomSource(SHAPE, 5).read(name, 0, 6, 18), whole[6:18])
    assert not torch.equal(RandomSource(SHAPE, 6).read(name), whole)
    assert not torch.equal(RandomSource(SHAPE, 5).read(name.replace("k_proj", "v_proj")), whole)
    # 1152 normal values: their standard deviation is within 10 % (4.8 of its own standard errors) of the asked one.
    assert abs(whole.std().item() / SHAPE.initializer_range - 1) < 0.1
    assert RandomSource(SHAPE, 5).read("model.norm.weight").eq(1).all()
    assert RandomSource(SHAPE, 5).read("model.layers.0.self_attn.q_proj.bias").eq(0).all()


def test_loading_names_a_missing_tensor() -> None:
    broken = weights()
    del broken["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load_hf([], SHAPE, ALONE, DictSource(broken))


def test_loading_names_a_tensor_of_another_shape() -> None:
    broken = weights() | {"model.norm.weight": torch.ones(47)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(47,\), but the model needs \(48,\)"):
        load_hf([], SHAPE, ALONE, DictSource(broken))


@pytest.mark.parametrize(("dtype", "says"), [(torch.int32, "I32"), (torch.bool, "BOOL"), (torch.uint8, "U8")])
def test_loading_refuses_a_tensor_of_another_kind_of_number(tmp_path: Path, dtype: torch.dtype, says: str) -> None:
    broken = weights() | {"model.norm.weight": torch.ones(48, dtype=dtype)}
    save_file(broken, tmp_path / "model.safetensors")
    words = rf"model\.safetensors: tensor model\.norm\.weight has dtype {says}, expected F64 or F32 or F16 or BF16\."
    with pytest.raises(CheckpointError, match=words):
        load_hf([], SHAPE, ALONE, DirectorySource(tmp_path))
    with pytest.raises(CheckpointError, match=r"weights in memory: tensor model\.norm\.weight has dtype torch\."):
        load_hf([], SHAPE, ALONE, DictSource(broken))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_tensor_that_is_not_finite_is_named_with_its_file_where_it_is_read(
    tmp_path: Path, name: str, bad: float
) -> None:
    tensors = weights()
    tensors[name].view(-1)[3] = bad
    source = DirectorySource(sharded(tmp_path, tensors))
    [slot] = [slot for slot in slots(SHAPE, ALONE) if name in slot.parts]
    with pytest.raises(
        CheckpointError, match=rf"[ab]\.safetensors: tensor {name}: 1 of the \d+ values read are NaN or inf"
    ):
        _read(slot, SHAPE, ALONE, source)


def test_loading_refuses_weights_of_a_deeper_model() -> None:
    deeper = weights(replace(SHAPE, num_hidden_layers=5))
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.\S+ \(12 such\) has no place .* with 4 layers"):
        load_hf([], SHAPE, ALONE, DictSource(deeper))


def test_a_directory_of_one_file_gives_slices(tmp_path: Path) -> None:
    tensors = weights()
    save_file(tensors, tmp_path / "model.safetensors")
    source = DirectorySource(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    assert source.names() == set(tensors)
    assert source.shape(name) == (48, 40)
    assert torch.equal(source.read(name), tensors[name])
    assert torch.equal(source.read(name, 0, 3, 9), tensors[name][3:9])
    assert torch.equal(source.read(name, 1, 10, 20), tensors[name][:, 10:20])
    assert source.read(name, 0, 48, 48).shape == (0, 40)  # a rank that holds nothing but vocabulary padding


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        DirectorySource(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent: no such folder\. Point to"):
        DirectorySource(tmp_path / "absent")


@pytest.mark.parametrize("keep", [0.9, 0.01, 0.0])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        DirectorySource(tmp_path)


def sharded(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes `tensors` as two files and an index."""
    names = list(tensors)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_several_files_with_an_index_are_read(tmp_path: Path) -> None:
    tensors = weights()
    source = DirectorySource(sharded(tmp_path, tensors))
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    (sharded(tmp_path, weights()) / "b.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"b\.safetensors: no such file, but model\.safetensors\.index\.json names"
    ):
        DirectorySource(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, weights())
    held = load_file(tmp_path / "b.safetensors")
    held.pop("lm_head.weight")
    save_file(held, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor lm_head\.weight is missing"):
        DirectorySource(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', pytest.param("[" * 100_000, id="deep"), pytest.param("9" * 6000, id="9")],
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        DirectorySource(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_directory_loads_in_transformers_and_here(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    from transformers import Qwen2ForCausalLM

    shape = replace(SHAPE, tie_word_embeddings=tied)
    tensors = {name: tensor.to(dtype) for name, tensor in weights(shape).items()}
    folder = save_hf(tmp_path / "model", shape, tensors.items())
    assert read_shape(folder) == replace(shape, name="model")
    model, info = Qwen2ForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == dtype
    assert model.config.rope_parameters["rope_theta"] == shape.rope_theta
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    source = DirectorySource(folder)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(huggingface, "SHARD_BYTES", 40_000)
    tensors = weights()
    folder = save_hf(tmp_path / "model", SHAPE, tensors.items())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 50_000 for path in folder.glob("*.safetensors"))
    source = DirectorySource(folder)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())
    model = Qwen2ForCausalLM.from_pretrained(folder)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_tokenizer_files_and_special_ids_travel_with_the_model(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text('{"eos_token_id": 7, "hidden_size": 9}')
    (tokenizer / "model.safetensors").write_text("must not be copied")
    folder = save_hf(tmp_path / "model", SHAPE, weights().items(), tokenizer)
    assert (folder / "tokenizer.json").read_text() == "{}"
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == 7 and config["hidden_size"] == SHAPE.hidden_size
    assert DirectorySource(folder).names() == set(hf_shapes(SHAPE))


def test_who_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "model", SHAPE, weights().items())
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_a_failed_write_keeps_the_old_model_and_takes_the_whole_stream(tmp_path: Path) -> None:
    old = weights()
    folder = save_hf(tmp_path / "model", SHAPE, old.items())
    taken = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights().items():
            taken.append(name)
            yield name, tensor

    # A tokenizer whose config.json is a folder: reading it fails in the middle of the export.
    (tmp_path / "tokenizer" / "config.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"tokenizer/config\.json: cannot be read .*Is a directory"):
        save_hf(folder, SHAPE, stream(), tmp_path / "tokenizer")
    assert taken == list(hf_shapes(SHAPE))
    assert torch.equal(DirectorySource(folder).read("lm_head.weight"), old["lm_head.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_beside_the_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: (cannot be read as JSON|holds a list)"):
        save_hf(tmp_path / "model", SHAPE, weights().items(), tmp_path)


def test_a_target_that_cannot_be_created_is_named_and_the_stream_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = iter(weights().items())
    with pytest.raises(CheckpointError, match=r"file/model: cannot write the model"):
        save_hf(tmp_path / "file" / "model", SHAPE, stream)
    assert list(stream) == []


def test_writing_again_replaces_the_directory(tmp_path: Path) -> None:
    save_hf(tmp_path / "model", SHAPE, weights().items())
    newer = weights()
    save_hf(tmp_path / "model", SHAPE, newer.items())
    source = DirectorySource(tmp_path / "model")
    assert all(torch.equal(source.read(name), tensor) for name, tensor in newer.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_identity_tells_models_apart_and_knows_one_again_in_another_format(tmp_path: Path) -> None:
    source = RandomSource(SHAPE, 0)
    save_hf(tmp_path, SHAPE, ((name, source.read(name)) for name in hf_shapes(SHAPE)))
    assert (
        identity(SHAPE, source) == identity(SHAPE, DirectorySource(tmp_path)) != identity(SHAPE, RandomSource(SHAPE, 1))
    )
    tensors = {name: source.read(name) for name in hf_shapes(SHAPE)}
    tensors["model.layers.3.self_attn.v_proj.weight"][5, 7] += 1e-4
    assert identity(SHAPE, DictSource(tensors)) != identity(SHAPE, source)
