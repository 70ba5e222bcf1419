"""The example configs are valid, and there is one per algorithm."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from capo_megatron.algorithms import ALGORITHMS, build
from capo_megatron.assemble import describe
from capo_megatron.config import load
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import versions
from capo_megatron.weights.shape import ModelShape, hf_config
from capo_megatron.weights.table import hf_shapes
from tests.unit.byte_tokenizer import byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPARED = sorted((EXAMPLES / "algorithms").glob("*.yaml"))
QWEN_MATH = {
    "1.5b": ModelShape(151936, 1536, 28, 12, 2, 8960, tie_word_embeddings=True, name="Qwen2.5-Math-1.5B"),
    "7b": ModelShape(152064, 3584, 28, 28, 4, 18944, name="Qwen2.5-Math-7B"),
    "72b": ModelShape(152064, 8192, 80, 64, 8, 29568, name="Qwen2.5-Math-72B"),
}
RANKS = {"qwen2.5-math-1.5b": 8, "qwen2.5-math-7b": 8, "qwen2.5-math-72b": 64}


@pytest.mark.parametrize("path", [*COMPARED, *EXAMPLES.glob("*.yaml")], ids=lambda path: path.name)
def test_an_example_is_a_valid_config(path: Path) -> None:
    config = load(path)
    config.check(8 if path in COMPARED else RANKS.get(path.stem, 2))
    build(config.algorithm)


@pytest.mark.parametrize("kind", list(ALGORITHMS))
def test_the_quickstarts_config_takes_any_algorithm(kind: str, tmp_path: Path) -> None:
    needed = ["data.perturbations=[typo, typo]"] if kind == "scapo" else []
    config = load(EXAMPLES / "quickstart.yaml", [f"output={tmp_path / 'run'}", f"algorithm.kind={kind}", *needed])
    assert config.algorithm.kind == kind
    assert describe(config, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kind=scapo"], r"no problem has any\. Set data\.perturbations=\[typo, typo\]\.$"),
        (["kind=simko", "top_k=18"], r"^algorithm\.top_k=18: the model has 17 tokens\. Lower it\.$"),
    ],
)
def test_what_the_quickstarts_config_lacks_for_an_algorithm_is_said(
    options: list[str], message: str, tmp_path: Path
) -> None:
    config = load(EXAMPLES / "quickstart.yaml", [f"output={tmp_path}", *(f"algorithm.{text}" for text in options)])
    with pytest.raises(ConfigError, match=message):
        describe(config, 1)


def test_every_algorithm_has_an_example_of_its_name() -> None:
    assert {path.stem for path in COMPARED} == set(ALGORITHMS)
    assert all(load(path).algorithm.kind == path.stem for path in COMPARED)


def test_examples_of_algorithms_differ_in_the_algorithm_and_what_it_needs_alone() -> None:
    plain = load(EXAMPLES / "algorithms" / "grpo.yaml")
    for path in COMPARED:
        config = load(path)
        data = replace(config.data, perturbations=())
        assert replace(config, output=plain.output, algorithm=plain.algorithm, data=data) == plain, path.name


# --- Qwen2.5-Math on H100 ---------------------------------------------------------------------------------------------


def model_folder(folder: Path, shape: ModelShape) -> Path:
    """A Hugging Face folder of a model's full shape: a small tokenizer, and 4 GB files that are all hole."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(shape, "bfloat16")))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, size in hf_shapes(shape).items():
        if 2 * sum(map(prod, files[-1].values())) > 4e9:
            files.append({})
        files[-1][name] = size
    places = {}
    for index, tensors in enumerate(files):
        places |= dict.fromkeys(tensors, f"model-{index}.safetensors")
        hollow_safetensors(folder / f"model-{index}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    byte_tokenizer().save_pretrained(folder)
    return folder


def hollow_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, size in tensors.items():
        start, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        file.truncate(8 + len(described) + end)


def on_h100(folder: Path, size: str, *options: str) -> list[str]:
    """What `check` needs besides the example: a model, and problems."""
    found = [f"output={folder / 'run'}", f"model.path={model_folder(folder / 'model', QWEN_MATH[size])}"]
    for name, first in (("train", 0), ("validation", 300)):
        problems = [{"problem": f"What is {number} + 1?", "answer": number + 1} for number in range(first, first + 300)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
        found.append(f"data.{name}=[{folder / name}.jsonl]")
    return [*found, *options]


@pytest.mark.parametrize(("size", "ranks"), [("1.5b", 8), ("7b", 8), ("7b", 32), ("72b", 64), ("72b", 128)])
def test_check_accepts_an_example_on_the_nodes_that_it_is_for(size: str, ranks: int, tmp_path: Path) -> None:
    path = EXAMPLES / f"qwen2.5-math-{size}.yaml"
    shown = "\n".join(describe(load(path, on_h100(tmp_path, size)), ranks))
    assert f"layout        {ranks} ranks = tensor" in shown
    assert "128 prompts x 8 samples = 1,024 responses a step, at most 3,046 tokens each" in shown
    assert "problems      300 for training, 300 for validation" in shown
    # vLLM's share of the GPU holds all responses that an engine is given to decode at once.
    given, kept = (
        int(re.search(text, shown)[1]) for text in (r"values of (\d+) responses", r"tokens: (\d+) sequences")
    )
    assert kept >= given and "of a GPU of 80.00 GiB" in shown


@pytest.mark.parametrize("size", QWEN_MATH)
def test_an_example_has_the_papers_setting(size: str) -> None:
    config = load(EXAMPLES / f"qwen2.5-math-{size}.yaml")
    rollout, train, capo = config.rollout, config.train, config.algorithm
    assert (rollout.prompts, rollout.prompts // train.minibatches, rollout.samples, config.eval.samples) == (
        128,
        64,
        8,
        16,
    )
    assert (config.data.max_prompt_tokens, rollout.max_tokens, rollout.temperature) == (1050, 3046, 1.0)
    assert (train.lr, capo.clip_low, capo.clip_high, capo.beta, capo.entropy_coef) == (1e-6, 0.2, 0.2, 0.0, 0.0)
    assert (capo.tau, train.steps) == ((0.6, 600) if size == "1.5b" else (0.5, 400))
    assert (capo.ref_high, capo.ref_low) == (2.5, 1.05)


@pytest.mark.skipif(versions.accelerator().te is not None, reason="TransformerEngine is installed")
def test_check_refuses_fp8_without_transformer_engine(tmp_path: Path) -> None:
    config = load(EXAMPLES / "qwen2.5-math-7b.yaml", on_h100(tmp_path, "7b", "precision.fp8=blockwise"))
    with pytest.raises(ConfigError, match=r"^precision\.fp8=blockwise: needs TransformerEngine, which is not"):
        describe(config, 8)


@pytest.mark.parametrize(
    ("size", "fp8", "fits"), [("1.5b", "blockwise", True), ("72b", "tensorwise", True), ("72b", "blockwise", False)]
)
def test_examples_take_fp8_where_their_shape_allows(
    size: str, fp8: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "accelerator", lambda: versions.Accelerator("2.20.2", (9, 0), (13, 0)))
    config = load(EXAMPLES / f"qwen2.5-math-{size}.yaml", on_h100(tmp_path, size, f"precision.fp8={fp8}"))
    if fits:
        assert describe(config, 64)
        return
    with pytest.raises(ConfigError, match=r"^precision\.fp8=blockwise: takes multiples of 128, and intermediate_size"):
        describe(config, 64)
