"""Weights in FP8 for vLLM: what rounding does to them, what is sent, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capo_megatron.assemble import describe
from capo_megatron.cli import main
from capo_megatron.config import RolloutConfig, VllmConfig, load
from capo_megatron.errors import ConfigError, RolloutError
from capo_megatron.mcore import versions
from capo_megatron.rollout.proof import Probe
from capo_megatron.rollout.sketch import differing, sketch, sketches
from capo_megatron.rollout.vllm import check_fp8_device, check_fp8_shape
from capo_megatron.seams import Solo
from capo_megatron.weights.blockwise import dequantise, is_quantised, quantise, quantised, rounded, saved_bytes
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.table import hf_shapes
from tests.unit.test_rollout_proof import PARAMS
from tests.unit.tiny_qwen2 import ModelPolicy, Prompts, engine_of, tiny_model, weights_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FP8 = ["rollout.engine=vllm", "rollout.vllm.weights=fp8"]


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, columns, generator=generator).mul(2).exp2()
    return (torch.randn(rows, columns, generator=generator) * sizes * 0.02).to(dtype)


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    """The scale of every number."""
    rows, columns = (torch.arange(side) // 128 for side in weight.shape)
    return scale[rows][:, columns]


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(128, 128), (256, 384), (1, 1), (130, 129), (127, 300), (48, 128)])
def test_the_error_is_bounded_in_every_block(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = drawn(*size, dtype)
    values, scale = quantise(weight)
    assert (values.shape, values.dtype, values.is_contiguous()) == (size, torch.float8_e4m3fn, True)
    assert (scale.shape, scale.dtype) == ((-(-size[0] // 128), -(-size[1] // 128)), torch.float32)
    error = (dequantise(values, scale) - weight.float()).abs()
    assert bool((error <= torch.maximum(weight.float().abs() / 16, spread(scale, weight) * 2**-10)).all())
    assert error.max() > 0 or weight.numel() == 1
    relative = (error.norm() / weight.float().norm()).item()
    assert weight.numel() == 1 or 0.01 < relative < 0.03


def test_blocks_are_scaled_each_for_itself_and_edges_by_what_is_there() -> None:
    weight = torch.full((130, 260), 1e-3)
    weight[:128, 128:256], weight[129, 259], weight[128, 0] = 7.0, 448.0, -448 * 2.0**-5
    _, scale = quantise(weight)
    small = 2.0**-18  # of 1e-3: the largest value is at most 448
    assert scale.tolist() == [[small, 2.0**-6, small], [2.0**-5, small, 1.0]]


@pytest.mark.parametrize("largest", [1e-38, 1e-4, 0.02, 1.0, 447.99, 448.0, 448.01, 1e6, 3.0e38])
def test_a_scale_is_the_smallest_power_of_two_that_suffices(largest: float) -> None:
    weight = torch.zeros(128, 128)
    weight[5, 7], weight[6, 8] = -largest, largest / 2
    values, scale = quantise(weight)
    assert float(torch.frexp(scale)[0]) == 0.5 and 0 < float(scale) < torch.inf
    assert float(scale) >= 2**-22 and largest / float(scale) <= 448 * (1 + 1e-6)
    assert largest / float(scale) > 224 * (1 - 1e-6) or float(scale) == 2**-22
    assert bool(values.float().isfinite().all())
    if largest > 1e-6:
        assert abs(dequantise(values, scale)[5, 7] / -largest - 1) < 1 / 16


def test_zeros_stay_zero() -> None:
    values, scale = quantise(torch.zeros(200, 200, dtype=torch.bfloat16))
    assert not values.float().any() and bool((scale > 0).all()) and bool(scale.isfinite().all())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_become_so(wrong: float) -> None:
    weight = drawn(256, 128)
    weight[200, 3] = wrong
    found = dequantise(*quantise(weight))
    assert not found[128:].isfinite().any() and bool(found[:128].isfinite().all())


def test_quantising_again_changes_nothing() -> None:
    """Neither the same way, nor by the formula with which vLLM makes DeepGEMM's scales."""
    weight = torch.cat([drawn(256, 256), torch.zeros(128, 256, dtype=torch.bfloat16), drawn(128, 256) * 1e-4])
    once = dequantise(*quantise(weight))
    assert torch.equal(dequantise(*quantise(once)), once)
    blocks = once.view(4, 128, 2, 128)
    theirs = torch.pow(2.0, (blocks.abs().amax(dim=(1, 3)).clamp(1e-4) / 448).log2().ceil())
    again = (blocks / theirs[:, None, :, None]).to(torch.float8_e4m3fn).float() * theirs[:, None, :, None]
    assert torch.equal(again.view(once.shape), once)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_the_products_of_the_layers_are_sent_with_their_scales() -> None:
    shape = ModelShape(151, 128, 2, 2, 1, 192, tie_word_embeddings=False)
    sizes = hf_shapes(shape)
    sent = dict(quantised((name, torch.ones(size)) for name, size in sizes.items()))
    assert [name for name in sent if not name.endswith("_scale_inv")] == list(sizes)
    scaled = {
        name.removesuffix("_scale_inv"): tuple(t.shape) for name, t in sent.items() if name.endswith("_scale_inv")
    }
    layer = {
        "self_attn.q_proj": (1, 1),
        "self_attn.k_proj": (1, 1),
        "self_attn.v_proj": (1, 1),
        "self_attn.o_proj": (1, 1),
        "mlp.gate_proj": (2, 1),
        "mlp.up_proj": (2, 1),
        "mlp.down_proj": (1, 2),
    }
    assert scaled == {f"model.layers.{i}.{name}.weight": size for i in range(2) for name, size in layer.items()}
    for name, tensor in sent.items():
        if not name.endswith("_scale_inv"):
            assert tuple(tensor.shape) == sizes[name]
            assert tensor.dtype == (torch.float8_e4m3fn if name in scaled else torch.float32)
    in_fp8 = sum(t.nbytes for t in sent.values())
    saved = sum(saved_bytes(name, size, 4) for name, size in sizes.items())
    assert in_fp8 == sum(torch.ones(size).nbytes for size in sizes.values()) - saved


# --- the proof --------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 13}


def probe(tolerance: float) -> Probe:
    return Probe(4, tolerance, 3e-2, rounded)


def test_a_rounded_engine_holds_equal_weights_and_its_gap_is_arithmetic() -> None:
    model = tiny_model(**WIDE)
    policy, coarse = ModelPolicy(model), engine_of(model)
    coarse.load_weights(rounded(weights_of(model)), 0)
    gap = probe(1e9).prove(coarse, policy, Prompts(), PARAMS, Solo(), 0)["refit/gap_median"]
    assert gap > 1 + 1e-3, "FP8 is seen"
    with pytest.raises(RolloutError, match="The weights are equal, so it is what is computed with them"):
        probe(1e-4).prove(coarse, policy, Prompts(), PARAMS, Solo(), 0)
    with pytest.raises(RolloutError, match=r"holds other values than the policy in \d+ of 26 tensors"):
        Probe(4, 1e-4, 3e-2).prove(coarse, policy, Prompts(), PARAMS, Solo(), 0)


def test_a_rounded_engine_with_old_or_misplaced_weights_is_told_from_rounding() -> None:
    old, new = (weights_of(tiny_model(seed, **WIDE)) for seed in (0, 1))
    policy = ModelPolicy(tiny_model(1, **WIDE), 1)
    engine = engine_of(tiny_model(**WIDE))
    proof = probe(1e-1)
    engine.load_weights(rounded(old), 0)
    loose = probe(1e9)
    loose.prove(engine, ModelPolicy(tiny_model(**WIDE)), Prompts(), PARAMS, Solo(), 0)
    proof._held, proof._sequences = loose._held, loose._sequences
    engine.load_weights(rounded(old), 1)
    with pytest.raises(RolloutError, match="The engine still has the weights of version 0"):
        proof.prove(engine, policy, Prompts(), PARAMS, Solo(), 0)
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    swapped = {gate: up, up: gate}
    engine.load_weights(rounded([(swapped.get(name, name), tensor) for name, tensor in new]), 1)
    with pytest.raises(RolloutError, match=rf"{gate} is what the policy has as {up}"):
        Probe(4, 1e-3, 3e-2, rounded).prove(engine, policy, Prompts(), PARAMS, Solo(), 0)


@pytest.mark.parametrize("size", [(64, 128), (4096, 256)])
def test_sketches_tell_weights_of_any_size_apart_and_not_roundings(size: tuple[int, int]) -> None:
    one, other = (drawn(*size, seed=seed) for seed in (1, 2))
    assert differing({"w": sketch(one)}, {"w": sketch(other)}, 0.1) == ["w"]
    assert not differing(sketches([("w", one)]), {"w": sketch(one.double().float())}, 1e-6)
    name = "x_proj.weight"
    assert is_quantised(name)
    held = sketches(rounded([(name, one)]))
    assert not differing(held, sketches(rounded(rounded([(name, one)]))), 1e-6)
    assert not differing(held, {name: sketch(one)}, 0.2), "rounding moves a projection by some percent"


# --- what is refused --------------------------------------------------------------------------------------------------


def config_of(*options: str, output: Path) -> Any:
    return load(EXAMPLES / "quickstart.yaml", [f"output={output / 'run'}", *options])


@pytest.mark.parametrize(
    ("capability", "found"), [(None, "none is visible"), ((8, 0), "found 8.0")], ids=["a CPU", "an A100"]
)
def test_a_device_without_fp8_is_refused(capability: tuple[int, int] | None, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.vllm\.weights=fp8: needs a GPU of compute .* {found}\. Use "):
        check_fp8_device(capability)
    for good in ((8, 9), (9, 0), (10, 0)):
        check_fp8_device(good)


SHAPES = {
    "0.5b": ModelShape(151936, 896, 24, 14, 2, 4864, name="Qwen2.5-0.5B"),
    "1.5b": ModelShape(151936, 1536, 28, 12, 2, 8960, name="Qwen2.5-Math-1.5B"),
    "7b": ModelShape(152064, 3584, 28, 28, 4, 18944, name="Qwen2.5-Math-7B"),
    "72b": ModelShape(152064, 8192, 80, 64, 8, 29568, name="Qwen2.5-Math-72B"),
}


@pytest.mark.parametrize(
    ("size", "tensor", "wrong"),
    [
        ("0.5b", 1, ""),
        ("0.5b", 2, "attention heads x head_dim of Qwen2.5-0.5B is 448"),
        ("1.5b", 2, ""),
        ("7b", 4, ""),
        ("72b", 1, ""),
        ("72b", 8, "intermediate_size of Qwen2.5-Math-72B is 3696"),
    ],
)
def test_a_cut_across_blocks_is_refused(size: str, tensor: int, wrong: str) -> None:
    if not wrong:
        check_fp8_shape(SHAPES[size], tensor)
        return
    with pytest.raises(
        ConfigError, match=rf"^rollout\.vllm\.weights=fp8: takes multiples of 128, and {wrong} on a rank"
    ):
        check_fp8_shape(SHAPES[size], tensor)


def test_check_and_train_refuse_fp8_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "capability", lambda: None)
    monkeypatch.setattr("capo_megatron.rollout.vllm.check_installed", lambda: None)
    quickstart = str(EXAMPLES / "quickstart.yaml")
    for command in ("check", "train"):
        assert main([command, quickstart, *FP8, "model.dtype=bfloat16"]) == 2
        said = capsys.readouterr().err
        assert (
            said.startswith("capo-megatron: ConfigError: rollout.vllm.weights=fp8: needs a GPU")
            and said.count("\n") == 1
        )
    assert main(["check", quickstart, *FP8]) == 2
    assert "rollout.vllm.weights=fp8: needs model.dtype=bfloat16, got float32." in capsys.readouterr().err
    assert main(["check", quickstart, "rollout.vllm.weights=fp8"]) == 2
    assert "belongs to rollout.engine=vllm, got transformers" in capsys.readouterr().err


def test_check_plans_for_other_gpus_and_recommends_a_correction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capo_megatron.notices import warn_once

    wide = ["model.shape.hidden_size=256", "model.shape.intermediate_size=512", "model.shape.num_key_value_heads=4"]
    config = config_of(*FP8, "model.dtype=bfloat16", *wide, output=tmp_path)
    warn_once.cache_clear()
    shown = "\n".join(describe(config, 1, gpu_gib=80))
    assert "engine: its own whole copy of the weights, the layers' in FP8" in shown
    assert [record.message for record in caplog.records] == [
        "rollout.vllm.weights=fp8: responses are sampled with rounded weights, and nothing corrects for that. Set "
        "algorithm.importance_cap (e.g. 2)."
    ]
    caplog.clear()
    warn_once.cache_clear()
    corrected = config_of(*FP8, "model.dtype=bfloat16", *wide, "algorithm.importance_cap=2", output=tmp_path)
    describe(corrected, 1, gpu_gib=80)
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"takes multiples of 128, and hidden_size of \S+ is 64 on a rank"):
        describe(config_of(*FP8, "model.dtype=bfloat16", output=tmp_path), 1, gpu_gib=80)


def test_the_proofs_bounds_are_those_of_fp8_where_the_engine_is_in_it(tmp_path: Path) -> None:
    plain = config_of("model.dtype=bfloat16", output=tmp_path)
    coarse = config_of(*FP8, "model.dtype=bfloat16", output=tmp_path)
    assert (plain.probe_tolerance, plain.rounding) == (2e-2, 1e-2)
    assert (coarse.probe_tolerance, coarse.rounding) == (1e-1, 3e-2)
    assert not RolloutConfig(vllm=VllmConfig(weights="fp8")).in_fp8, "the transformers engine has none"
