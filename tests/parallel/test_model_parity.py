"""The Megatron-core models compute what transformers' do, for every family, on every layout, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capo_megatron.config import ParallelConfig
from capo_megatron.mcore import runtime
from capo_megatron.mcore.hf_weights import init_random, load_hf, stream_hf
from capo_megatron.mcore.model import build_model, head_weight
from capo_megatron.weights.shape import ModelShape, hf_config
from capo_megatron.weights.sources import DictSource
from capo_megatron.weights.table import hf_shapes
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

# Float32 sums of a few hundred terms in another order; logits are of size 2, gradients are compared to the largest.
LOGITS = 1e-4
GRADIENTS = 1e-5

# An odd vocabulary, so that two tensor-parallel ranks need padding.
SIZES = {
    "vocab_size": 73,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rope_theta": 30_000.0,
    "initializer_range": 0.1,
}
SHAPES = {
    "qwen2 tied": ModelShape(**SIZES, tie_word_embeddings=True),
    "qwen2": ModelShape(**SIZES),
    "qwen3": ModelShape(**SIZES, model_type="qwen3", head_dim=24, tie_word_embeddings=True),
    "llama": ModelShape(**SIZES, model_type="llama", rope_scaling_factor=32.0),
}
LAYOUTS = {
    "1": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2_sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "pp2_vp2": (2, ParallelConfig(pipeline=2, virtual=2)),
    "tp2_pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "tp2_pp2_vp2_sp": (4, ParallelConfig(tensor=2, pipeline=2, virtual=2, sequence=True)),
    "pp2_dp2": (4, ParallelConfig(pipeline=2)),
}
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Case:
    """A model, tokens and, from transformers, the logits and the gradient of the mean cross-entropy."""

    shape: ModelShape
    weights: dict[str, Tensor]
    tokens: Tensor  # [4, 12]
    logits: Tensor
    gradients: dict[str, Tensor]


@cache
def reference(name: str) -> Case:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    torch.manual_seed(0)
    described = hf_config(shape, "float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases start as ones and zeros, which would hide mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    tokens = torch.randint(0, shape.vocab_size, (4, 12))
    logits = model(tokens).logits
    cross_entropy(logits, tokens).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    weights = {name: model.state_dict()[name].clone() for name in hf_shapes(shape)}
    return Case(shape, weights, tokens, logits.detach(), gradients)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def full_logits(hidden: Tensor, head: Tensor, shape: ModelShape, layout: runtime.Layout) -> Tensor:
    """[b, S, V] on every tensor-parallel rank, from this rank's rows of the head."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits = hidden @ head.T
    if layout.tensor > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    return logits[..., : shape.vocab_size]


def run_schedule(chunks: Sequence[Any], layout: runtime.Layout, case: Case, seen: list[Tensor], train: bool) -> None:
    """One pass of Megatron's pipeline schedule over the case; the last stage appends its logits to `seen`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import unwrap_model

    def forward_step(batches: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        tokens = next(batches)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)

        def loss(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits = full_logits(hidden, head_weight(unwrap_model(chunk)), case.shape, layout)
            seen.append(logits.detach())
            return cross_entropy(logits, tokens), {}

        return chunk(tokens, positions, None), loss

    batches = [iter(case.tokens.chunk(MICRO_BATCHES)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=case.tokens.shape[1],
        micro_batch_size=case.tokens.shape[0] // MICRO_BATCHES,
        forward_only=not train,
    )


def gradients(chunks: Sequence[Any], layout: runtime.Layout, case: Case) -> dict[str, Tensor]:
    """The gradients of the mean cross-entropy under their Hugging Face names. Overwrites the parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    wrapped = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    run_schedule(wrapped, layout, case, [], train=True)
    finalize_model_grads(wrapped)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    return dict(stream_hf(chunks, case.shape, layout))


def measure(
    parallel: ParallelConfig, cases: Sequence[Case]
) -> list[tuple[Tensor | None, dict[str, Any], dict[str, Any]]]:
    """Of each case: the logits (on the last stage), the streamed weights, and the gradients."""
    started = runtime.start(parallel, seed=0)
    results = []
    for case in cases:
        chunks = build_model(case.shape, started.layout, torch.float32)
        load_hf(chunks, case.shape, started.layout, DictSource(case.weights))
        seen: list[Tensor] = []
        with torch.no_grad():
            run_schedule(chunks, started.layout, case, seen, train=False)
        streamed = dict(stream_hf(chunks, case.shape, started.layout))
        logits = torch.cat(seen) if seen else None
        results.append((logits, streamed, gradients(chunks, started.layout, case)))
    started.stop()
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_weights_and_gradients_equal_transformers(layout: str) -> None:
    size, parallel = LAYOUTS[layout]
    cases = [reference(name) for name in SHAPES]
    per_rank = run_ranks(measure, size, parallel, cases)
    for case, results in zip(cases, zip(*per_rank, strict=True), strict=True):
        logits = [found for found, _, _ in results if found is not None]
        assert len(logits) == size // parallel.pipeline
        for found in logits:
            torch.testing.assert_close(found, case.logits, atol=LOGITS, rtol=0)
        for _, streamed, grads in results:
            assert list(streamed) == list(hf_shapes(case.shape))
            for name, value in case.weights.items():
                assert torch.equal(streamed[name], value), f"{name} is not bit-equal after a round trip"
                scale = case.gradients[name].abs().max()
                worst = (grads[name] - case.gradients[name]).abs().max() / scale
                assert worst < GRADIENTS, f"gradient of {name} is off by {worst:.1e} of its largest entry"


def variants(case: Case) -> dict[str, Any]:
    """What one rank computes with recomputation, and what bfloat16 weights look like after a round trip."""
    started = runtime.start(ParallelConfig(), seed=0)
    found: dict[str, Any] = {}
    for recompute in ("selective", "full"):
        chunks = build_model(case.shape, started.layout, torch.float32, recompute)
        load_hf(chunks, case.shape, started.layout, DictSource(case.weights))
        found[recompute] = gradients(chunks, started.layout, case)
    chunks = build_model(case.shape, started.layout, torch.bfloat16)
    load_hf(chunks, case.shape, started.layout, DictSource(case.weights))
    found["bfloat16"] = dict(stream_hf(chunks, case.shape, started.layout))
    seen: list[Tensor] = []
    with torch.no_grad():
        run_schedule(chunks, started.layout, case, seen, train=False)
    found["bfloat16 logits"] = torch.cat(seen)
    started.stop()
    return found


def test_recomputation_keeps_the_gradients_and_bfloat16_only_rounds() -> None:
    case = reference("qwen2 tied")
    [found] = run_ranks(variants, 1, case)
    for recompute in ("selective", "full"):
        for name, gradient in case.gradients.items():
            worst = (found[recompute][name] - gradient).abs().max() / gradient.abs().max()
            assert worst < GRADIENTS, f"{recompute}: gradient of {name} is off by {worst:.1e} of its largest entry"
    for name, value in case.weights.items():
        assert torch.equal(found["bfloat16"][name], value.bfloat16()), name
    # bfloat16 keeps 8 bits: a few per cent of the largest logit after four layers.
    gap = (found["bfloat16 logits"].float() - case.logits).abs().max() / case.logits.abs().max()
    assert gap < 0.05


def random_weights(parallel: ParallelConfig, shape: ModelShape) -> dict[str, Tensor]:
    started = runtime.start(parallel, seed=0)
    chunks = build_model(shape, started.layout, torch.float32)
    init_random(chunks, shape, started.layout, seed=3)
    streamed = dict(stream_hf(chunks, shape, started.layout))
    started.stop()
    return streamed


def test_seeded_random_weights_do_not_depend_on_the_layout() -> None:
    shape = SHAPES["qwen2"]
    [alone] = run_ranks(random_weights, 1, ParallelConfig(), shape)
    for found in run_ranks(random_weights, 4, ParallelConfig(tensor=2, pipeline=2), shape):
        assert all(torch.equal(found[name], alone[name]) for name in hf_shapes(shape))


def streamed_in_small_buckets(parallel: ParallelConfig, case: Case) -> dict[str, Tensor]:
    from capo_megatron.mcore import hf_weights

    hf_weights.BUCKET_BYTES = 20_000  # a few tensors each; the embedding alone is larger than that
    started = runtime.start(parallel, seed=0)
    chunks = build_model(case.shape, started.layout, torch.float32)
    load_hf(chunks, case.shape, started.layout, DictSource(case.weights))
    streamed = dict(stream_hf(chunks, case.shape, started.layout))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.zero_()
    started.stop()
    return streamed


def test_streamed_weights_do_not_depend_on_the_bucket_size_nor_share_memory_with_the_model() -> None:
    case = reference("qwen2")
    for found in run_ranks(streamed_in_small_buckets, 2, ParallelConfig(tensor=2), case):
        assert all(torch.equal(found[name], value) for name, value in case.weights.items())
