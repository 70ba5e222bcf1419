"""Conversions between formats: nothing changes on the way, and what is wrong is found before anything is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.weights import convert, distributed, distributed_files, huggingface, reading
from capo_megatron.weights.checkpoint import open_checkpoint
from capo_megatron.weights.compare import compare
from capo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from capo_megatron.weights.huggingface import INDEX, SINGLE, DirectorySource, save_hf
from capo_megatron.weights.inspect import inspect
from capo_megatron.weights.manifest import MANIFEST
from capo_megatron.weights.shape import ModelShape, read_shape
from capo_megatron.weights.table import hf_shapes
from tests.unit.tiny_qwen2 import on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 73,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
}
SHAPES = {
    "qwen2": ModelShape(**SIZES),
    "qwen2, tied, 8 queries a group": ModelShape(**SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen2, as many keys as queries": ModelShape(**SIZES | {"num_key_value_heads": 8}),
    "1.5B's vocabulary": ModelShape(**SIZES | {"vocab_size": 151_936}, tie_word_embeddings=True),
    "7B's vocabulary": ModelShape(**SIZES | {"vocab_size": 152_064}),
    "qwen3": ModelShape(**SIZES, model_type="qwen3", head_dim=16, tie_word_embeddings=True),
    "llama": ModelShape(**SIZES, model_type="llama", rope_scaling_factor=8.0),
}  # fmt: skip
PLAIN = SHAPES["qwen2"]


def make(
    folder: Path, shape: ModelShape = PLAIN, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 10**9
) -> Path:
    """A Hugging Face directory of random weights, biases and norms too, with a tokenizer's files beside them."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=generator).to(dtype) for name, size in hf_shapes(shape).items()}
    companions = folder.with_name(folder.name + "-tokenizer")
    companions.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "generation_config.json"):
        (companions / name).write_text(json.dumps({"about": name}))
    before = huggingface.SHARD_BYTES
    huggingface.SHARD_BYTES = shard_bytes
    try:
        return save_hf(folder, shape, weights.items(), companions)
    finally:
        huggingface.SHARD_BYTES = before
        shutil.rmtree(companions)


def tensors(folder: Path) -> dict[str, Tensor]:
    source = DirectorySource(folder)
    return {name: source.read(name) for name in source.names()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000], ids=["one file", "several files"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_model_survives_the_way_there_and_back_bit_for_bit(
    tmp_path: Path, shape: ModelShape, dtype: torch.dtype, shard_bytes: int
) -> None:
    source = make(tmp_path / "hf", shape, dtype, shard_bytes)
    there = hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=shard_bytes)
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert sorted(path.name for path in source.iterdir()) == sorted(
        path.name for path in (tmp_path / "back").iterdir() if path.name != MANIFEST
    )
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((source / name).read_text()) == json.loads((tmp_path / "back" / name).read_text()), name
    assert read_shape(tmp_path / "megatron") == replace(shape, name="megatron")
    assert there.tensors == back.tensors == len(hf_shapes(shape))
    assert there.nbytes == back.nbytes == sum(tensor.nbytes for tensor in tensors(source).values())
    assert not compare(open_checkpoint(source), open_checkpoint(tmp_path / "megatron")).differences


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_survives_in_blocks_of_any_size(tmp_path: Path, data: st.DataObject) -> None:
    draw = data.draw
    groups, queries = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    head = draw(st.sampled_from([2, 4, 6]))
    kind = draw(st.sampled_from(["qwen2", "qwen3", "llama"]))
    heads = groups * queries
    shape = ModelShape(
        vocab_size=draw(st.integers(1, 50)),
        hidden_size=heads * head if kind == "qwen2" else draw(st.integers(1, 20)),
        num_hidden_layers=draw(st.integers(1, 4)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=draw(st.integers(1, 30)),
        tie_word_embeddings=draw(st.booleans()),
        model_type=kind,
        head_dim=head,
    )
    for left in tmp_path.iterdir():
        shutil.rmtree(left)
    source = make(tmp_path / "hf", shape, draw(st.sampled_from([torch.bfloat16, torch.float32])))
    before = reading.BLOCK_BYTES, convert.CHUNK_BYTES, distributed_files.FILE_BYTES
    reading.BLOCK_BYTES, convert.CHUNK_BYTES = draw(st.integers(1, 2000)), draw(st.integers(1, 2000))
    distributed_files.FILE_BYTES = draw(st.integers(1, 10**5))
    try:
        hf_to_megatron(source, tmp_path / "megatron")
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=draw(st.integers(1, 10**5)))
    finally:
        reading.BLOCK_BYTES, convert.CHUNK_BYTES, distributed_files.FILE_BYTES = before
    assert same(tensors(source), tensors(tmp_path / "back"))


def test_ranks_share_the_tensors_and_write_the_same_model(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", shard_bytes=10_000)
    for found in on_ranks(3, lambda team: hf_to_megatron(source, tmp_path / "megatron", team=team)):
        assert not isinstance(found, Exception), found
    assert len(list((tmp_path / "megatron").glob("__*.distcp"))) == 3
    found = on_ranks(
        3, lambda team: megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=10_000, team=team)
    )
    assert not any(isinstance(one, Exception) for one in found), found
    assert same(tensors(source), tensors(tmp_path / "back"))


def test_one_rank_that_fails_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(source / SINGLE, name)  # one rank reads it
    outcomes = on_ranks(3, lambda team: hf_to_megatron(source, tmp_path / "megatron", team=team, strict=True))
    assert all(isinstance(one, CheckpointError) and name in str(one) for one in outcomes), outcomes
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("there", "back"), [("float32", None), (None, "float16"), ("float32", "bfloat16")])
def test_a_dtype_is_chosen_on_either_way_and_written_into_the_config(
    tmp_path: Path, there: str | None, back: str | None
) -> None:
    source = make(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", dtype=there)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype=back)
    kind = back or there
    assert kind is not None
    wanted = {name: tensor.to(getattr(torch, kind)) for name, tensor in tensors(source).items()}
    assert same(wanted, tensors(tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["torch_dtype"], config["dtype"]) == (kind, kind)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again", dtype="bfloat16")
    assert same(tensors(source), tensors(tmp_path / "again"))


def test_settings_of_the_source_that_we_do_not_know_are_carried_along(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [5, 6], "somebody": "else"}
    (source / "config.json").write_text(json.dumps(config))
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_prefixed_and_separately_numbered_layers_are_read_as_nemo_writes_them(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron")
    path = tmp_path / "megatron" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    described, storage = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        described["module." + name] = entry
        described["optimizer.state.exp_avg.module." + name] = entry
    for index, info in metadata.storage_data.items():
        storage[replace(index, fqn="module." + index.fqn)] = info
        storage[replace(index, fqn="optimizer.state.exp_avg.module." + index.fqn)] = info
    path.write_bytes(pickle.dumps(replace(metadata, state_dict_metadata=described, storage_data=storage)))
    (tmp_path / "megatron" / MANIFEST).unlink()
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert any(line.startswith("prefix     module.") for line in inspect(tmp_path / "megatron"))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(path)
    change(found)
    save_file(found, path, metadata={"format": "pt"})


def spoil(path: Path, name: str, value: float = float("nan")) -> None:
    def change(found: dict[str, Tensor]) -> None:
        found[name].view(-1)[1] = value

    rewrite(path, change)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def name_absent(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))


UP = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (
        lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
        r"model-00002-of-00003\.safetensors: no such file, but model\.safetensors\.index\.json names it",
    ),
    "truncated shard": (
        lambda folder: os.truncate(folder / "model-00002-of-00003.safetensors", 9_000),
        r"model-00002-of-00003\.safetensors: damaged or truncated",
    ),
    "truncated header": (
        lambda folder: os.truncate(folder / "model-00001-of-00003.safetensors", 5),
        r"model-00001-of-00003\.safetensors: damaged or truncated",
    ),
    "absent tensor": (name_absent, r"tensor model\.layers\.9\.mlp\.up_proj\.weight is missing"),
    "bad index": (lambda folder: (folder / INDEX).write_text("{"), r"index\.json: not a safetensors index"),
    "wrong shape": (
        lambda folder: edit_json(folder / "config.json", intermediate_size=41),
        r"tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape \(40, 32\), but hf needs \(41, 32\)",
    ),
    "unknown architecture": (
        lambda folder: edit_json(folder / "config.json", model_type="gpt2"),
        r"config\.json: model_type='gpt2' is not supported",
    ),
    "unexpected tensor": (
        lambda folder: edit_json(folder / "config.json", num_hidden_layers=2),
        r"tensor model\.layers\.2\.\S+ \(12 such\) has no place in hf with 2 layers",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
}


@pytest.mark.parametrize(("spoiled", "message"), WRONG.values(), ids=list(WRONG))
def test_a_bad_source_is_named_and_nothing_is_written(
    tmp_path: Path, spoiled: Callable[[Path], Any], message: str
) -> None:
    source = make(tmp_path / "hf", shard_bytes=20_000)
    spoiled(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(CheckpointError, match=message):
        hf_to_megatron(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize(
    "changes",
    [
        *({"rms_norm_eps": value} for value in ("x", -1, 0, float("nan"), [], True)),
        *({"rope_theta": value} for value in ("x", -1, 0, [], float("nan"))),
        *({"tie_word_embeddings": value} for value in ("false", 0, [], {})),
        *({"num_hidden_layers": value} for value in (10**30, 0, True, "3", 2.5)),
        {"initializer_range": []},
        {"model_type": []},
        {"rope_scaling": "x"},
        {"rope_parameters": ["a"]},
        {"layer_types": 1},
        {"max_position_embeddings": True},
    ],
    ids=str,
)
def test_a_config_of_wrong_kinds_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = make(tmp_path / "hf")
    edit_json(source / "config.json", **changes)
    if "rope_theta" in changes:
        edit_json(source / "config.json", rope_parameters=None)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{next(iter(changes))}"):
        hf_to_megatron(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tied_model_with_another_head_than_its_embedding_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", SHAPES["qwen3"])

    def add_head(change: float) -> None:
        def change_file(found: dict[str, Tensor]) -> None:
            found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
            found["lm_head.weight"][-1, -1] += change

        rewrite(source / SINGLE, change_file)

    add_head(0.0)
    hf_to_megatron(source, tmp_path / "megatron")
    add_head(1.0)
    message = r"tensor lm_head\.weight differs from model\.embed_tokens\.weight, .*tie_word_embeddings=true"
    for read in (open_checkpoint, lambda folder: hf_to_megatron(folder, tmp_path / "other")):
        with pytest.raises(CheckpointError, match=message):
            read(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_companion_that_cannot_be_carried_along_is_found_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    source = make(tmp_path / "hf")
    (source / name).unlink()
    (source / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"hf/{name}: not a file"):
        hf_to_megatron(source, tmp_path / "megatron", progress=lambda *_: pytest.fail("something was read"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_said_and_copied_or_refused(tmp_path: Path, value: float) -> None:
    source = make(tmp_path / "hf")
    spoil(source / SINGLE, UP, value)
    said: list[str] = []
    hf_to_megatron(source, tmp_path / "megatron", say=said.append)
    assert said == [f"warning: {source / SINGLE}: tensor {UP}: 1 values are NaN or infinite"]
    assert not compare(open_checkpoint(source), open_checkpoint(tmp_path / "megatron")).differences
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {UP}: 1 values are NaN or infinite"):
        hf_to_megatron(source, tmp_path / "strict", strict=True)
    with pytest.raises(CheckpointError, match=rf"tensor {UP}: 1 values are NaN or infinite"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "strict", strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_values_that_a_narrower_dtype_cannot_hold_are_said(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    spoil(source / SINGLE, UP, 1e6)
    said: list[str] = []
    hf_to_megatron(source, tmp_path / "megatron", dtype="float16", say=said.append)
    assert len(said) == 1 and said[0].endswith("1 values are NaN or infinite as float16")


def test_large_numbers_whose_sum_overflows_are_not_taken_for_infinite(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", dtype=torch.float16)
    rewrite(source / SINGLE, lambda found: found[UP].fill_(60_000))
    said: list[str] = []
    hf_to_megatron(source, tmp_path / "megatron", strict=True, say=said.append)
    assert said == []


@pytest.mark.parametrize("exists", ["folder", "file", "dangling link"])
def test_a_destination_that_exists_is_left_alone(tmp_path: Path, exists: str) -> None:
    source = make(tmp_path / "hf")
    target = tmp_path / "megatron"
    if exists == "folder":
        target.mkdir()
    elif exists == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"megatron: exists\. Nothing was changed\. Remove it or choose another"):
        hf_to_megatron(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda here: hf_to_megatron(here / "none", here / "out"), "none: no such folder"),
        (lambda here: hf_to_megatron(here / "megatron", here / "out"), "a Megatron checkpoint already"),
        (lambda here: megatron_to_hf(here / "hf", here / "out"), "a Hugging Face directory already"),
        (lambda here: hf_to_megatron(here / "hf", here / "out", dtype="int8"), "dtype 'int8': not supported"),
        (lambda here: megatron_to_hf(here / "empty", here / "out"), "empty: no checkpoint in it"),
        (lambda here: megatron_to_hf(here / "bare", here / "out"), r"bare: it does not say what model .* --config DIR"),
        (lambda here: megatron_to_hf(here / "zarr", here / "out"), "the format 'zarr' is not supported"),
        (lambda here: megatron_to_hf(here / "megatron", here / "out", max_shard_bytes=0), "max_shard_bytes=0"),
    ],
    ids=["no source", "megatron twice", "hf twice", "dtype", "empty", "undescribed", "zarr", "shards"],
)
def test_a_request_that_cannot_be_met_is_refused(tmp_path: Path, ask: Callable[[Path], Any], message: str) -> None:
    hf_to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    (tmp_path / "empty").mkdir()
    for name in ("bare", "zarr"):
        shutil.copytree(tmp_path / "megatron", tmp_path / name)
    (tmp_path / "bare" / "config.json").unlink()
    edit_json(tmp_path / "zarr" / "metadata.json", sharded_backend="zarr")
    with pytest.raises(CheckpointError, match=message):
        ask(tmp_path)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_bare_checkpoint_is_converted_with_the_config_that_is_named(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", config=source)
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert (tmp_path / "back" / "tokenizer.json").exists()


# --- what breaks later ------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def test_any_bit_that_flips_in_a_megatron_checkpoint_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Over the whole of every file: in a value, a chunk's header, the tables. Some of zip's fields are harmless."""
    source = make(
        tmp_path / "hf", ModelShape(**SIZES | {"num_hidden_layers": 1, "vocab_size": 5, "intermediate_size": 2})
    )
    hf_to_megatron(source, tmp_path / "megatron")
    wanted = tensors(source)
    noticed = 0
    for file in ("__0_0.distcp", ".metadata", "metadata.json", "common.pt"):
        size = (tmp_path / "megatron" / file).stat().st_size
        for at in range(0, size, max(1, size // 40)):
            shutil.copytree(tmp_path / "megatron", tmp_path / "flipped")
            flip(tmp_path / "flipped" / file, at)
            try:
                megatron_to_hf(tmp_path / "flipped", tmp_path / "out")
            except CheckpointError as error:
                noticed += 1
                assert str(tmp_path / "flipped") in str(error), error
            else:
                assert same(wanted, tensors(tmp_path / "out")), (file, at)
                shutil.rmtree(tmp_path / "out")
            shutil.rmtree(tmp_path / "flipped")
            assert not (tmp_path / "out").exists()
    assert noticed > 100


def test_a_flipped_value_is_named_by_verify_export_and_training(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron")
    checkpoint = distributed.DistCheckpoint(tmp_path / "megatron")
    stored = checkpoint.tensors["decoder.layers.mlp.linear_fc1.weight"]
    [chunk] = [chunk for chunk in stored.chunks if chunk.offsets == (1, SIZES["intermediate_size"], 0)]
    flip(tmp_path / "megatron" / chunk.file, checkpoint._values_of("", stored, chunk) + 100)
    message = rf"__0_0\.distcp: tensor {UP} is not what was written: its hash is \w+, capo_manifest\.json says"
    damaged = open_checkpoint(tmp_path / "megatron")
    for read in (
        lambda: compare(open_checkpoint(source), damaged),
        lambda: megatron_to_hf(tmp_path / "megatron", tmp_path / "out"),
        lambda: damaged.checked().read(UP, 0, 2, 4),  # what a rank of `train` reads
    ):
        with pytest.raises(CheckpointError, match=message):
            read()


def test_a_flipped_bit_in_an_exported_directory_is_noticed_too(tmp_path: Path) -> None:
    hf_to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    flip(tmp_path / "back" / SINGLE, (tmp_path / "back" / SINGLE).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor lm_head\.weight is not what was written"):
        hf_to_megatron(tmp_path / "back", tmp_path / "again")


def test_layers_of_several_dtypes_need_one_to_be_chosen(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    rewrite(source / SINGLE, lambda found: found.update({UP: found[UP].float()}))
    with pytest.raises(CheckpointError, match=rf"tensor {UP} is F32, \S+ is BF16; .* Choose one: --dtype"):
        hf_to_megatron(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    hf_to_megatron(source, tmp_path / "megatron", dtype="bfloat16")


@pytest.mark.parametrize("target", [".", "/", "hf/.."])
def test_a_destination_without_a_name_of_its_own_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("hf"))
    with pytest.raises(CheckpointError, match="exists"):
        hf_to_megatron("hf", target)


def test_stopping_ends_a_conversion_at_the_next_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 100)
    source, heard = make(tmp_path / "hf"), []

    def interrupt(done: int, total: int) -> None:
        heard.append(done)
        if len(heard) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        hf_to_megatron(source, tmp_path / "megatron", progress=interrupt)
    assert heard[-1] < 0.1 * sum(tensor.nbytes for tensor in tensors(source).values())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_config_that_changed_after_a_conversion_is_noticed(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron")
    edit_json(tmp_path / "megatron" / "config.json", rope_theta=30_000.0)
    with pytest.raises(CheckpointError, match=r"config\.json: is not what was written"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", config=source)  # it is not asked


def test_a_manifest_of_other_tensors_is_refused(tmp_path: Path) -> None:
    hf_to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    path = tmp_path / "megatron" / MANIFEST
    whole = json.loads(path.read_text())
    entry = whole["tensors"][UP]
    for changed, message in (
        ({}, rf"it does not name tensor {UP}"),
        ({UP: entry, "more": entry}, "it names tensor more"),
        ({UP: entry | {"dtype": "F32"}}, rf"it says that {UP} is F32"),
    ):
        rest = {name: value for name, value in whole["tensors"].items() if name != UP}
        path.write_text(json.dumps(whole | {"tensors": rest | changed}))
        with pytest.raises(CheckpointError, match=message):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "back")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    hf_to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    for content in ("{", "[]", '{"format": 2, "hash": "xxh3_128"}'):
        (tmp_path / "megatron" / MANIFEST).write_text(content)
        with pytest.raises(CheckpointError, match=r"capo_manifest\.json: damaged"):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "back")


def test_a_pickle_that_would_run_something_is_not_run(tmp_path: Path) -> None:
    hf_to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")

    class Bad:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(Bad()))
    (tmp_path / "megatron" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata: damaged \(posix\.mkdir does not belong into it\)"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    hidden = b"\x80\x04\x8c\x2atorch.distributed.checkpoint.filesystem\x8c\x08os.mkdir\x93\x8c\x01x\x85R."
    (tmp_path / "megatron" / ".metadata").write_bytes(hidden.replace(b"\x2at", b"\x27t"))
    with pytest.raises(CheckpointError, match=r"\.metadata: damaged \(\S+\.os\.mkdir does not belong into it\)"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "was-run").exists()


def test_what_an_interrupted_conversion_left_is_removed_and_said(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    left = tmp_path / ".megatron.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    said: list[str] = []
    hf_to_megatron(source, tmp_path / "megatron", say=said.append)
    assert said == [f"{left}: removed, it was left by a conversion that was interrupted; starting from the beginning"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_two_conversions_to_one_place_do_not_disturb_each_other(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    began: list[str] = []

    def interfere(done: int, total: int) -> None:
        if not began:
            began.append("once")
            with pytest.raises(CheckpointError, match="another conversion is writing it"):
                hf_to_megatron(source, tmp_path / "megatron")

    hf_to_megatron(source, tmp_path / "megatron", progress=interfere)
    assert began and same(tensors(source), tensors_of_megatron(tmp_path / "megatron"))


def tensors_of_megatron(folder: Path) -> dict[str, Tensor]:
    source = open_checkpoint(folder).checked()
    return {name: source.read(name) for name in source.names()}


# --- comparing and looking --------------------------------------------------------------------------------------------


def test_comparing_counts_values_that_differ_and_tells_rounding_from_change(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    spoil(b / SINGLE, UP, 99.0)
    found = compare(open_checkpoint(a), open_checkpoint(b))
    [(name, reason)] = found.differences
    assert name == UP and reason.startswith("1 values differ, by 9")
    assert str(found).startswith("1 of 39 tensors differ")
    hf_to_megatron(a, tmp_path / "wide", dtype="float32")
    reasons = {reason for _, reason in compare(open_checkpoint(a), open_checkpoint(tmp_path / "wide")).differences}
    assert reasons == {"BF16 and F32, equal when rounded"}


def test_zero_and_minus_zero_differ_and_nan_equals_itself(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    for folder, value in ((a, 0.0), (b, -0.0)):
        spoil(folder / SINGLE, "model.norm.weight", value)
        spoil(folder / SINGLE, UP)
    assert [name for name, _ in compare(open_checkpoint(a), open_checkpoint(b)).differences] == ["model.norm.weight"]


def test_models_of_other_sizes_are_not_compared(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", replace(PLAIN, num_hidden_layers=2))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 2, .* it is 3\. They are different models"):
        compare(open_checkpoint(a), open_checkpoint(b))


def test_inspecting_tells_format_model_and_every_tensor(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", shard_bytes=20_000)
    hf_to_megatron(source, tmp_path / "megatron")
    count = sum(tensor.numel() for tensor in tensors(source).values())
    for folder, form, names in (
        (source, "Hugging Face, 3 files", list(tensors(source))),
        (tmp_path / "megatron", "Megatron dist-checkpoint, 1 file", list(distributed_files.stored_shapes(PLAIN))),
    ):
        lines = inspect(folder)
        assert any(line.startswith("format     " + form) for line in lines), lines
        assert any(f"{len(names)} tensors, {count:,} values" in line for line in lines), lines
        assert all(sum(line.startswith(name + " ") for line in lines) == 1 for name in names)
    assert "hashes     39 tensors in capo_manifest.json" in inspect(tmp_path / "megatron")
