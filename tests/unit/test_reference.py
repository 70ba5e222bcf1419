"""The reference weights: frozen, or a moving average of the policy's."""

from __future__ import annotations

import pytest
import torch

from capo_megatron.mcore.reference import Reference


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).to(dtype)


def move(layer: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += by


def seen_in_place(reference: Reference, layer: torch.nn.Module) -> torch.Tensor:
    with reference.in_place():
        return layer.weight.detach().clone()


def test_the_average_follows_the_policy_by_its_decay_and_gives_the_policy_back() -> None:
    layer = model()
    start = layer.weight.detach().clone()
    reference = Reference([layer], averaged=True)
    reference.freeze()
    for _ in range(3):
        move(layer, 1.0)
        reference.follow(0.75)
    own = layer.weight.detach().clone()
    behind = 0.25 * (1 * 0.75**2 + 2 * 0.75 + 3)  # how far the average of start, +1, +2, +3 has come
    torch.testing.assert_close(seen_in_place(reference, layer), start + behind)
    assert torch.equal(layer.weight, own)
    reference.follow(0.0)
    assert torch.equal(seen_in_place(reference, layer), own)


def test_an_average_of_bfloat16_weights_takes_steps_below_their_resolution() -> None:
    layer = model(torch.bfloat16)
    start = layer.weight.detach().float()
    reference = Reference([layer], averaged=True)
    reference.freeze()
    move(layer, 1.0)
    for _ in range(1000):
        reference.follow(0.999)
    gained = seen_in_place(reference, layer).float() - start
    torch.testing.assert_close(gained, torch.full_like(gained, 1 - 0.999**1000), rtol=0, atol=0.01)  # bfloat16's


def test_a_frozen_reference_neither_moves_nor_is_saved() -> None:
    layer = model()
    reference = Reference([layer], averaged=False)
    with pytest.raises(RuntimeError, match="freeze_reference"), reference.in_place():
        pass
    reference.freeze()
    start = layer.weight.detach().clone()
    move(layer, 1.0)
    assert torch.equal(seen_in_place(reference, layer), start)
    assert reference.sharded_state_dict({}, ["model"]) == {}
    with pytest.raises(AssertionError):
        reference.follow(0.9)


def test_the_policy_comes_back_when_scoring_by_the_reference_fails() -> None:
    layer = model()
    reference = Reference([layer], averaged=True)
    reference.freeze()
    move(layer, 1.0)
    own = layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), reference.in_place():
        raise ZeroDivisionError
    assert torch.equal(layer.weight, own)
