"""FP8: what reaches Megatron-core's real configs, what is refused, which shapes products get, where scales stand.

Nothing here multiplies in FP8. The stand-in for TransformerEngine's modules has the two methods through which their
state is read and put back; what happens on a GPU is in tests/gpu.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from capo_megatron.config import ParallelConfig, PrecisionConfig, load
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import cpu, fp8, versions
from capo_megatron.mcore.model import check_layout, transformer_config
from capo_megatron.mcore.runtime import Layout
from capo_megatron.mcore.versions import Accelerator, fp8_obstacles
from capo_megatron.weights.shape import ModelShape

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN_1B = ModelShape(151936, 1536, 28, 12, 2, 8960, name="1.5B", tie_word_embeddings=True)
QWEN_7B = ModelShape(152064, 3584, 28, 28, 4, 18944, name="7B")
QWEN_72B = ModelShape(152064, 8192, 80, 64, 8, 29568, name="72B")
H100 = Accelerator("2.20.2", (9, 0), (13, 0))


def transformer(precision: PrecisionConfig, parallel: ParallelConfig | None = None) -> Any:
    cpu.install()
    parallel = parallel or ParallelConfig()
    layout = Layout.of(parallel, parallel.tensor * parallel.pipeline)
    return transformer_config(QWEN_7B, layout, torch.bfloat16, "selective", precision)


# --- Megatron-core's configs, of the installed release ----------------------------------------------------------------


def test_without_fp8_megatron_is_told_what_it_was_told_before() -> None:
    config = transformer(PrecisionConfig())
    assert config.fp8 is None and not config.fp8_param and not config.first_last_layers_bf16
    assert not (config.apply_rope_fusion or config.bias_activation_fusion or config.bias_dropout_fusion)
    assert config.use_te_activation_func
    assert DistributedDataParallelConfig(**fp8.ddp_settings(PrecisionConfig())) == DistributedDataParallelConfig()
    assert OptimizerConfig(**fp8.optimizer_settings(PrecisionConfig())) == OptimizerConfig()


@pytest.mark.parametrize(
    ("recipe", "numbers"), [("delayed", "hybrid"), ("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")]
)
def test_a_recipe_arrives_under_its_name_with_the_numbers_that_suit_it(recipe: Any, numbers: str) -> None:
    config = transformer(PrecisionConfig(fp8=recipe))
    assert (config.fp8_recipe, config.fp8) == (recipe, numbers)
    assert not config.fp8_param
    assert not (config.fp8_dot_product_attention or config.fp8_multi_head_attention)  # attention stays as it is
    assert config.params_dtype == torch.bfloat16
    other = {"hybrid": "e4m3", "e4m3": "hybrid"}[numbers]
    assert transformer(PrecisionConfig(fp8=recipe, format=other)).fp8 == other


def test_delayed_scaling_has_its_history_and_margin() -> None:
    config = transformer(PrecisionConfig(fp8="delayed", amax_history=16, margin=2))
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo, config.fp8_margin) == (16, "max", 2)


def test_first_and_last_layers_stay_in_bfloat16_on_request() -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = transformer(PrecisionConfig(fp8="blockwise", first_last_bf16=(2, 3)), ParallelConfig(pipeline=2))
    plain = [layer for layer in range(28) if is_first_last_bf16_layer(config, layer)]
    assert plain == [0, 1, 25, 26, 27]
    only_last = transformer(PrecisionConfig(fp8="tensorwise", first_last_bf16=(0, 1)))
    assert [layer for layer in range(28) if is_first_last_bf16_layer(only_last, layer)] == [27]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_fp8_weights_are_known_to_model_gradient_buffers_and_optimizer(recipe: Any) -> None:
    precision = PrecisionConfig(fp8=recipe, param_gather=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # MXFP8 without the shared buffer makes Megatron warn
        ddp = DistributedDataParallelConfig(**fp8.ddp_settings(precision), use_distributed_optimizer=True)
        optimizer = OptimizerConfig(**fp8.optimizer_settings(precision), use_distributed_optimizer=True)
    assert transformer(precision).fp8_param and ddp.fp8_param_gather
    assert optimizer.fp8_recipe == recipe
    shared = recipe == "mxfp8"
    assert ddp.reuse_grad_buf_for_mxfp8_param_ag is optimizer.reuse_grad_buf_for_mxfp8_param_ag is shared


def test_fusions_are_switched_on_one_by_one() -> None:
    swiglu = transformer(PrecisionConfig(fusions=("swiglu",)))
    assert swiglu.bias_activation_fusion and not swiglu.use_te_activation_func and not swiglu.bias_dropout_fusion
    assert transformer(PrecisionConfig(fusions=("dropout_add",))).bias_dropout_fusion


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["fp8=delayed", "first_last_bf16=[1, 0]"],
            r"^precision\.first_last_bf16=\[1, 0\]: precision\.fp8=delayed upd",
        ),
        (["fp8=delayed", "param_gather=true"], r"^precision\.param_gather=true: with precision\.fp8=delayed the weig"),
        (["format=e4m3"], r"^precision\.format: belongs to FP8, and precision\.fp8 is null\. Set precision\.fp8"),
        (["param_gather=true"], r"^precision\.param_gather: belongs to FP8"),
        (["first_last_bf16=[0, 1]"], r"^precision\.first_last_bf16: belongs to FP8"),
        (["fp8=blockwise", "margin=1"], r"^precision\.margin=1: belongs to precision\.fp8=delayed, got blockwise\."),
        (["amax_history=4"], r"^precision\.amax_history=4: belongs to precision\.fp8=delayed, got null\. Remove it\.$"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(options: list[str], message: str) -> None:
    config = load(EXAMPLES / "algorithms" / "capo.yaml", [f"precision.{option}" for option in options])
    with pytest.raises(ConfigError, match=message) as refused:
        config.check(8)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtype=float32", r"^precision\.fp8=tensorwise: needs model\.dtype=bfloat16, got float32\.$"),
        ("parallel.distributed_optimizer=false", r"^precision\.param_gather=true: it is the distributed optimizer"),
    ],
)
def test_fp8_refuses_settings_of_other_sections(override: str, message: str) -> None:
    options = ["precision.fp8=tensorwise", "precision.param_gather=true", override]
    with pytest.raises(ConfigError, match=message):
        load(EXAMPLES / "algorithms" / "capo.yaml", options).check(8)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("fp8", "expected 'delayed' or 'tensorwise' or 'blockwise' or 'mxfp8' or null"), ("custom", "got 'custom'")],
)
def test_other_recipes_are_no_recipes(recipe: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(EXAMPLES / "algorithms" / "capo.yaml", [f"precision.fp8={recipe}"])


@pytest.mark.skipif(versions.accelerator().te is not None, reason="TransformerEngine is installed")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_without_transformer_engine_fp8_is_refused_in_one_line(recipe: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        fp8.check_installed(PrecisionConfig(fp8=recipe))
    assert str(refused.value) == (
        f"precision.fp8={recipe}: needs TransformerEngine, which is not installed or cannot be imported. "
        "Use precision.fp8=null for bfloat16."
    )
    with pytest.raises(ConfigError, match=r'^precision\.fusions: "rope" is a kernel of TransformerEngine'):
        fp8.check_installed(PrecisionConfig(fusions=("rope",)))
    fp8.check_installed(PrecisionConfig(fusions=("swiglu", "dropout_add")))


def test_a_recipe_that_this_gpu_lacks_is_refused_with_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "accelerator", lambda: H100)
    fp8.check_installed(PrecisionConfig(fp8="blockwise"))
    with pytest.raises(ConfigError) as refused:
        fp8.check_installed(PrecisionConfig(fp8="mxfp8"))
    assert str(refused.value) == (
        "precision.fp8=mxfp8: needs a GPU of compute capability 10.x (Blackwell), found 9.0. "
        "Use delayed or tensorwise or blockwise, or null for bfloat16."
    )


@pytest.mark.parametrize(
    ("found", "works"),
    [
        (H100, {"delayed", "tensorwise", "blockwise"}),
        (replace(H100, cuda=(12, 8)), {"delayed", "tensorwise"}),
        (replace(H100, capability=(10, 0)), {"delayed", "tensorwise", "blockwise", "mxfp8"}),
        (replace(H100, capability=(12, 0)), {"delayed", "tensorwise", "blockwise"}),
        (replace(H100, capability=(8, 9)), {"delayed", "tensorwise"}),
        (replace(H100, capability=(8, 0)), set()),
        (replace(H100, capability=None), set()),
        (replace(H100, te=None), set()),
        (replace(H100, te="2.2.1"), {"delayed", "tensorwise"}),
        (replace(H100, te="1.14"), set()),
    ],
)
def test_recipes_depend_on_gpu_cuda_and_transformer_engine(found: Accelerator, works: set[str]) -> None:
    obstacles = fp8_obstacles(found)
    assert {recipe for recipe, reason in obstacles.items() if reason is None} == works
    assert all(reason for recipe, reason in obstacles.items() if recipe not in works)


@pytest.mark.parametrize(
    ("shape", "tensor", "recipes"),
    [
        (QWEN_1B, 1, ("delayed", "tensorwise", "mxfp8", "blockwise")),
        (QWEN_1B, 2, ("delayed", "tensorwise", "mxfp8", "blockwise")),
        (QWEN_7B, 4, ("delayed", "tensorwise", "mxfp8", "blockwise")),
        (QWEN_72B, 8, ("delayed", "tensorwise")),
    ],
    ids=["1.5B", "1.5B TP2", "7B TP4", "72B TP8"],
)
def test_what_a_rank_multiplies_must_suit_the_recipe(shape: ModelShape, tensor: int, recipes: tuple[str, ...]) -> None:
    parallel = ParallelConfig(tensor=tensor)
    for recipe in ("delayed", "tensorwise", "mxfp8", "blockwise"):
        precision = PrecisionConfig(fp8=recipe)  # type: ignore[arg-type]
        if recipe in recipes:
            check_layout(shape, parallel, precision)
            continue
        with pytest.raises(ConfigError, match=rf"^precision\.fp8={recipe}: takes multiples of \d+, and intermediate_s"):
            check_layout(shape, parallel, precision)
    check_layout(shape, parallel)


def test_more_bfloat16_layers_than_a_stage_has_are_refused() -> None:
    precision = PrecisionConfig(fp8="blockwise", first_last_bf16=(0, 8))
    check_layout(QWEN_7B, ParallelConfig(pipeline=2), precision)
    with pytest.raises(ConfigError, match=r"^precision\.first_last_bf16=\[0, 8\]: a pipeline stage has 7 layers"):
        check_layout(QWEN_7B, ParallelConfig(pipeline=4), precision)


# --- micro-batches ----------------------------------------------------------------------------------------------------

ALIGNMENTS = st.sampled_from([1, 16, 32, 128])


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2, 3, 4, 8]), ALIGNMENTS)
@example(15, 1001, 8, 128)
def test_a_padded_micro_batch_has_the_sides_that_fp8_takes(rows: int, targets: int, tensor: int, multiple: int) -> None:
    height, width = found = fp8.padded(rows, targets, tensor, multiple)
    assert height >= rows and width >= targets
    assert width % tensor == 0
    assert prod(found) // tensor % multiple == 0
    # Never more than one block for each row.
    assert prod(found) <= rows * (targets + multiple * tensor)


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2, 3, 4, 8]))
def test_without_fp8_only_sequence_parallelism_pads(rows: int, targets: int, tensor: int) -> None:
    assert fp8.padded(rows, targets, tensor, 1) == (rows, targets + -targets % tensor)


# --- scales -----------------------------------------------------------------------------------------------------------


class Quantised(torch.nn.Linear):
    """A layer with the state of delayed scaling: a forward pass writes the largest input into its history."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        history = self.fp8_meta.setdefault("history", torch.zeros(3))
        history[0] = torch.maximum(history[0], values.abs().max())
        return super().forward(values)

    def get_fp8_meta_tensors(self) -> torch.Tensor | None:
        return self.fp8_meta["history"].clone() if self.fp8_meta else None

    def reset_fp8_meta_tensors(self, tensors: torch.Tensor | None = None) -> None:
        if "history" in self.fp8_meta:
            self.fp8_meta["history"].copy_(torch.zeros(3) if tensors is None else tensors)


def test_a_scoring_pass_leaves_the_scales_as_they_were() -> None:
    used, fresh = Quantised(), Quantised()
    scales = fp8.Scales([torch.nn.Sequential(used, torch.nn.ReLU()), fresh], PrecisionConfig(fp8="delayed"))
    assert scales.unset
    used(torch.tensor([1.0, -2.0, 0.0, 1.5]))
    assert not scales.unset
    history = used.fp8_meta["history"]
    with pytest.raises(KeyError), scales.kept():
        used(torch.full((4,), 9.0))
        fresh(torch.full((4,), 9.0))
        assert history[0] == 9
        raise KeyError("a pass that fails")
    assert used.fp8_meta["history"] is history, "in place: TransformerEngine holds views of it"
    assert history.tolist() == [2, 0, 0]
    assert fresh.fp8_meta["history"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("recipe", [None, "tensorwise", "blockwise", "mxfp8"])
def test_recipes_without_a_state_are_not_asked_for_one(recipe: Any) -> None:
    layer = Quantised()
    scales = fp8.Scales([layer], PrecisionConfig(fp8=recipe))
    with scales.kept():
        layer(torch.ones(4))
    assert layer.fp8_meta["history"][0] == 1 and not scales.unset
