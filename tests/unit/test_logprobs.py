"""`target_outputs` against the plain float64 computation: values, gradients, ties, memory and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capo_megatron.errors import ConfigError, ShapeError
from capo_megatron.mcore.logprobs import target_outputs

# 1,300 ids make six tiles for small chunks, of which two or three are kept for backward and the others made anew.
VOCAB, PADDED, HIDDEN, TOKENS = 1300, 1408, 6, 33
FLOAT32 = 2e-5  # sums of some thousand float32 terms of order one
FLOAT64 = 1e-12
OUTPUTS = ("logprobs", "entropy", "top")


def inputs(dtype: torch.dtype, tokens: int = TOKENS, vocab: int = VOCAB, padded: int = PADDED) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float, k: int
) -> dict[str, Tensor]:
    logits = hidden.double() @ weight[:vocab].double().t() / temperature
    logprobs = torch.log_softmax(logits, dim=1)
    top, ids = logprobs.sort(dim=1, descending=True, stable=True)
    return {
        "logprobs": logprobs.gather(1, targets[:, None])[:, 0],
        "entropy": -(logprobs.exp() * logprobs).sum(1),
        "top": top[:, :k],
        "ids": ids[:, :k],
    }


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, k: int = 3, **options: Any) -> dict[str, Tensor]:
    found = target_outputs(hidden, weight, targets, vocab_size=vocab, entropy=True, top_k=k, **options)
    assert found.entropy is not None
    assert found.topk is not None
    return {"logprobs": found.logprobs, "entropy": found.entropy, "top": found.topk.logprobs, "ids": found.topk.ids}


def slopes(outputs: dict[str, Tensor]) -> list[Tensor]:
    """Random upstream gradients, the same for both sides."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(outputs[name].shape, generator=generator, dtype=torch.float64) for name in OUTPUTS]


def gradients(outputs: dict[str, Tensor], inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    upstream = [slope.to(outputs[name].dtype) for slope, name in zip(slopes(outputs), OUTPUTS, strict=True)]
    return torch.autograd.grad([outputs[name] for name in OUTPUTS], list(inputs), upstream, **options)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 10 * TOKENS])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)])
def test_values_and_gradients_equal_the_plain_computation_for_every_chunk(
    chunk: int, temperature: float, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = inputs(dtype)
    found = ours(hidden, weight, targets, VOCAB, temperature=temperature, chunk_tokens=chunk)
    expected = reference(hidden, weight, targets, VOCAB, temperature, 3)
    for name in OUTPUTS:
        assert found[name].dtype == dtype
        assert_close(found[name], expected[name], tolerance)
    assert torch.equal(found["ids"], expected["ids"])
    for got, want in zip(gradients(found, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True):
        assert_close(got, want, 10 * tolerance)  # sums over all tokens or all ids


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_output_alone_has_the_right_gradient(name: str) -> None:
    hidden, weight, targets = inputs(torch.float64)
    found = ours(hidden, weight, targets, VOCAB, chunk_tokens=1)[name]
    expected = reference(hidden, weight, targets, VOCAB, 1.0, 3)[name]
    slope = slopes(reference(hidden, weight, targets, VOCAB, 1.0, 3))[OUTPUTS.index(name)]
    for got, want in zip(
        torch.autograd.grad(found, (hidden, weight), slope),
        torch.autograd.grad(expected, (hidden, weight), slope),
        strict=True,
    ):
        assert_close(got, want, FLOAT64)


@pytest.mark.parametrize("chunk", [1, TOKENS])
def test_logprobs_without_entropy_have_the_same_values_and_gradients(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.float64)
    found = target_outputs(hidden, weight, targets, vocab_size=VOCAB, chunk_tokens=chunk, temperature=0.6)
    expected = reference(hidden, weight, targets, VOCAB, 0.6, 3)
    assert found.entropy is None
    assert found.topk is None
    assert_close(found.logprobs, expected["logprobs"], FLOAT64)
    slope = slopes(expected)[0]
    for got, want in zip(
        torch.autograd.grad(found.logprobs, (hidden, weight), slope),
        torch.autograd.grad(expected["logprobs"], (hidden, weight), slope),
        strict=True,
    ):
        assert_close(got, want, FLOAT64)


@pytest.mark.parametrize(("vocab", "padded", "fast"), [(17, 20, False), (VOCAB, PADDED, True)])
def test_gradcheck(vocab: int, padded: int, fast: bool) -> None:
    hidden, weight, targets = inputs(torch.float64, tokens=4, vocab=vocab, padded=padded)

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = ours(hidden, weight, targets, vocab, temperature=0.8, chunk_tokens=1)
        return tuple(found[name] for name in OUTPUTS)

    assert torch.autograd.gradcheck(function, (hidden, weight), fast_mode=fast)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_the_plain_computation(data: st.DataObject) -> None:
    tokens, vocab = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 1500))
    padded = vocab + data.draw(st.integers(0, 300))
    k = data.draw(st.integers(1, min(vocab, 300)))
    temperature, chunk = data.draw(st.sampled_from([0.3, 1.0, 1.7])), data.draw(st.integers(1, 20))
    hidden, weight, targets = inputs(torch.float64, tokens, vocab, padded)
    found = ours(hidden, weight, targets, vocab, k, temperature=temperature, chunk_tokens=chunk)
    expected = reference(hidden, weight, targets, vocab, temperature, k)
    for name in OUTPUTS:
        assert_close(found[name], expected[name], FLOAT64)
    assert torch.equal(found["ids"], expected["ids"])
    for got, want in zip(gradients(found, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True):
        assert_close(got, want, 10 * FLOAT64)


def test_chunk_sizes_agree_to_float32_rounding() -> None:
    hidden, weight, targets = inputs(torch.float32)
    one, *others = (ours(hidden, weight, targets, VOCAB, chunk_tokens=chunk) for chunk in (1, 7, TOKENS, 1000))
    for other in others:
        assert torch.equal(one["ids"], other["ids"])
        for name in OUTPUTS:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=2e-6)


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        weight[VOCAB:] = 1e3
    found = ours(hidden, weight, targets, VOCAB)
    assert_close(found["logprobs"], reference(hidden, weight, targets, VOCAB, 1.0, 3)["logprobs"], FLOAT32)
    assert found["ids"].max() < VOCAB
    assert not gradients(found, (hidden, weight))[1][VOCAB:].any()


def test_equally_likely_tokens_come_by_ascending_id() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        weight[:] = weight.sign()  # 64 different rows, so that ties reach over all tiles
        hidden[:] = 1.0
    for k in (1, 2, 5, 40, 700):
        found = ours(hidden, weight, targets, VOCAB, k, chunk_tokens=1)
        assert torch.equal(found["ids"], reference(hidden, weight, targets, VOCAB, 1.0, k)["ids"])


def test_top_k_of_the_whole_vocabulary_is_a_permutation() -> None:
    hidden, weight, targets = inputs(torch.float32, vocab=19, padded=32)
    found = ours(hidden, weight, targets, 19, k=19)
    assert torch.equal(found["ids"].sort(dim=1).values, torch.arange(19).expand(TOKENS, 19))
    assert_close(found["top"].exp().sum(1), torch.ones(TOKENS), FLOAT32)


def test_bfloat16_is_as_exact_as_the_plain_bfloat16_computation() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found = ours(hidden, weight, targets, VOCAB, chunk_tokens=1)
    logprobs = torch.log_softmax((hidden @ weight[:VOCAB].t()).float(), dim=1)
    top = logprobs.topk(3, dim=1).values
    plain = {"entropy": -(logprobs.exp() * logprobs).sum(1), "top": top}
    plain["logprobs"] = logprobs.gather(1, targets[:, None])[:, 0]
    exact = reference(hidden, weight, targets, VOCAB, 1.0, 3)

    def worst(values: Tensor, true: Tensor) -> float:
        return float((values.double() - true.double()).norm() / true.double().norm())

    for name in OUTPUTS:
        assert found[name].dtype == torch.float32
        assert worst(found[name], exact[name]) <= 1.2 * worst(plain[name], exact[name]) + 1e-6
    parts = zip(*(gradients(each, (hidden, weight)) for each in (found, plain)), strict=True)
    doubles = tuple(tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    truth = gradients(reference(*doubles, targets, VOCAB, 1.0, 3), doubles)
    for (mine, theirs), true in zip(parts, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert worst(mine, true) <= 1.2 * worst(theirs, true) + 1e-6


def test_confident_tokens_stay_finite() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        hidden *= 3e3
    found = ours(hidden, weight, targets, VOCAB)
    expected = reference(hidden, weight, targets, VOCAB, 1.0, 3)
    torch.testing.assert_close(found["logprobs"].double(), expected["logprobs"], rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(found["entropy"].double(), expected["entropy"], rtol=0, atol=1e-2)
    assert all(gradient.isfinite().all() for gradient in gradients(found, (hidden, weight)))


def test_no_tokens_give_empty_outputs_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(torch.float32, tokens=0)
    found = ours(hidden, weight, targets, VOCAB)
    assert [tuple(found[name].shape) for name in (*OUTPUTS, "ids")] == [(0,), (0,), (0, 3), (0, 3)]
    by_hidden, by_weight = gradients(found, (hidden, weight))
    assert by_hidden.shape == (0, HIDDEN)
    assert by_weight.shape == weight.shape
    assert not by_weight.any()


def test_backward_twice_gives_the_same_gradients() -> None:
    hidden, weight, targets = inputs(torch.float32)
    found = ours(hidden, weight, targets, VOCAB)
    first = gradients(found, (hidden, weight), retain_graph=True)
    again = gradients(found, (hidden, weight))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_frozen_inputs_get_no_gradient_and_no_grad_keeps_nothing() -> None:
    hidden, weight, targets = inputs(torch.float32)
    ours(hidden.detach(), weight, targets, VOCAB)["logprobs"].sum().backward()
    assert weight.grad is not None
    weight.grad = None
    ours(hidden, weight.detach(), targets, VOCAB)["logprobs"].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert all(tensor.grad_fn is None for tensor in ours(hidden, weight, targets, VOCAB).values())


class LargestResult(TorchDispatchMode):
    """Elements of the largest new tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_exceeds_the_logits_of_a_chunk(dtype: torch.dtype) -> None:
    tokens, vocab, chunk = 256, 5000, 60
    hidden, weight, targets = inputs(dtype, tokens, vocab, vocab)
    with LargestResult() as seen:
        found = ours(hidden, weight, targets, vocab, chunk_tokens=chunk)
        gradients(found, (hidden, weight))
    assert 0 < seen.largest <= chunk * vocab < tokens * vocab


def test_what_stays_for_backward_is_no_more_than_the_logits_of_a_chunk() -> None:
    tokens, vocab, chunk = 256, 5000, 150
    hidden, weight, targets = inputs(torch.float32, tokens, vocab, vocab)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(0 if tensor is hidden or tensor is weight else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(hidden, weight, targets, vocab, chunk_tokens=chunk)
    assert chunk * vocab / 2 <= sum(saved) <= chunk * vocab


@pytest.mark.parametrize("wrong", [-1, VOCAB, PADDED])
def test_a_target_outside_the_vocabulary_is_named_with_its_position(wrong: int) -> None:
    hidden, weight, targets = inputs(torch.float32)
    targets[5] = wrong
    with pytest.raises(ShapeError, match=rf"targets: id {wrong} at position 5 is outside \[0, 1300\)"):
        ours(hidden, weight, targets, VOCAB)


def test_inputs_that_do_not_fit_are_refused() -> None:
    hidden, weight, targets = inputs(torch.float32)
    cases: list[tuple[Any, str]] = [
        (lambda: ours(hidden, weight[:, 1:], targets, VOCAB), "hidden: "),
        (lambda: ours(hidden, weight.double(), targets, VOCAB), "hidden: "),
        (lambda: ours(hidden, weight, targets[1:], VOCAB), "targets: "),
        (lambda: ours(hidden, weight, targets.int(), VOCAB), "targets: "),
        (lambda: ours(hidden, weight, targets, PADDED + 1), "weight: "),
        (lambda: ours(hidden, weight, targets, VOCAB, VOCAB + 1), "top_k: "),
    ]
    for call, start in cases:
        with pytest.raises(ShapeError, match="^" + start):
            call()
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"^temperature: "):
            ours(hidden, weight, targets, VOCAB, temperature=temperature)
