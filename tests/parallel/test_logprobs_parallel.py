"""`target_outputs` on vocabulary shards equals `target_outputs` on the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from capo_megatron.errors import ShapeError
from capo_megatron.mcore.logprobs import target_outputs
from capo_megatron.types import PolicyOutputs
from tests.parallel.launch import run_ranks

# name -> tokens, vocabulary, padded vocabulary, dtype, options
CASES: dict[str, tuple[int, int, int, torch.dtype, dict[str, Any]]] = {
    "log-probs only": (33, 1300, 1408, torch.float32, {"temperature": 0.7, "chunk_tokens": 1}),
    "everything": (33, 1300, 1408, torch.float32, {"entropy": True, "top_k": 5, "chunk_tokens": 1}),
    "float64": (9, 1300, 1408, torch.float64, {"entropy": True, "top_k": 5, "temperature": 0.7}),
    "ranks of padding only": (33, 17, 512, torch.float32, {"entropy": True, "top_k": 3}),
    "more top-k than a shard has": (8, 20, 32, torch.float64, {"entropy": True, "top_k": 15}),
    "ties": (12, 50, 64, torch.float32, {"top_k": 30}),
    "no tokens": (0, 50, 64, torch.float32, {"entropy": True, "top_k": 3}),
    "bfloat16": (33, 300, 512, torch.bfloat16, {"entropy": True, "top_k": 3}),
}
# Sums in another order; for bfloat16, partial gradients are rounded to 8 bits before they are added up.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    tokens, vocab, padded, dtype, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    hidden = torch.randn(tokens, 8, generator=generator).to(dtype)
    weight = torch.randn(padded, 8, generator=generator).to(dtype)
    if name == "ties":
        hidden, weight = torch.ones_like(hidden), weight.sign()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def flat(found: PolicyOutputs) -> list[Tensor]:
    outputs = [found.logprobs]
    if found.entropy is not None:
        outputs.append(found.entropy)
    return outputs if found.topk is None else [*outputs, found.topk.logprobs]


def evaluate(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, group: Any) -> dict[str, Any]:
    """Outputs, and the gradients for a fixed random upstream gradient of all of them."""
    _, vocab, _, _, options = CASES[name]
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    found = target_outputs(hidden, weight, targets, vocab_size=vocab, group=group, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in flat(found)]
    by_hidden, by_weight = torch.autograd.grad(flat(found), (hidden, weight), upstream)
    return {
        "outputs": [part.detach() for part in flat(found)],
        "ids": None if found.topk is None else found.topk.ids,
        "hidden": by_hidden,
        "weight": by_weight,
    }


def on_a_shard() -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    results = {}
    for name in CASES:
        hidden, weight, targets = inputs(name)
        shard = weight.chunk(group.size())[group.rank()].clone()
        results[name] = evaluate(name, hidden, shard, targets, group)
    hidden, weight, targets = inputs("ties")
    targets[3] = 50
    with pytest.raises(ShapeError, match="position 3"):  # on every rank alike, before any collective
        target_outputs(hidden, weight.chunk(group.size())[group.rank()], targets, vocab_size=50, group=group)
    return results


@pytest.mark.parallel
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_give_the_outputs_and_gradients_of_the_whole_head(ranks: int) -> None:
    everyone = run_ranks(on_a_shard, ranks)
    for name, (*_, dtype, _) in CASES.items():
        whole = evaluate(name, *inputs(name), None)
        parts = [results[name] for results in everyone]
        near = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
        for part in parts:
            assert part["ids"] is None or torch.equal(part["ids"], whole["ids"]), name
            assert all(torch.equal(*pair) for pair in zip(part["outputs"], parts[0]["outputs"], strict=True)), name
        for found, expected in zip(parts[0]["outputs"], whole["outputs"], strict=True):
            torch.testing.assert_close(found, expected, **near, msg=lambda text, name=name: f"{name}: {text}")
        by_hidden = torch.stack([part["hidden"].double() for part in parts]).sum(0)
        by_weight = torch.cat([part["weight"] for part in parts])
        torch.testing.assert_close(by_hidden, whole["hidden"].double(), **near)
        torch.testing.assert_close(by_weight, whole["weight"], **near)
