"""Every way in which a refit is known to go wrong is found by the proof, with the right reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.proof import Probe
from capo_megatron.seams import SamplingParams, Solo
from tests.unit.tiny_qwen2 import ModelPolicy, Prompts, weights_of
from tests.vllm_engine.engines import engine, long_problems, wide_model

Weights = list[tuple[str, Tensor]]
PARAMS = SamplingParams(12, temperature=0.7)
LAYER = "model.layers.1."


class Run:
    """An engine that was proven with the weights of versions 0 and 1; the policy is at version 2."""

    def __init__(self) -> None:
        self.engine: Any = engine(tied=False)
        self.probe, self.prompts = Probe(4, 1e-3, 1e-5), Prompts(long_problems(20))
        for version in (0, 1):
            self.engine.load_weights(self.weights(version), version)
            self.prove(version)

    def weights(self, version: int) -> Weights:
        return weights_of(wide_model(version, tied=False))

    def prove(self, version: int) -> dict[str, float]:
        policy = ModelPolicy(wide_model(version, tied=False), version, PARAMS.temperature)
        return self.probe.prove(self.engine, policy, self.prompts, PARAMS, Solo(), 0)

    def found(self) -> str:
        """What the proof of version 2 says."""
        with pytest.raises(RolloutError) as error:
            self.prove(2)
        return str(error.value)


@pytest.fixture
def run() -> Run:
    return Run()


def swapped(weights: Weights, one: str, other: str) -> Weights:
    names = {f"{LAYER}{one}.weight": f"{LAYER}{other}.weight", f"{LAYER}{other}.weight": f"{LAYER}{one}.weight"}
    return [(names.get(name, name), tensor) for name, tensor in weights]


def test_right_weights_are_proven(run: Run) -> None:
    run.engine.load_weights(run.weights(2), 2)
    assert run.prove(2)["refit/gap_max"] < 1 + 1e-4


def test_a_tensor_that_was_not_synced(run: Run) -> None:
    name = f"{LAYER}mlp.down_proj.weight"
    old = dict(run.weights(1))[name]
    run.engine.load_weights([(n, old if n == name else tensor) for n, tensor in run.weights(2)], 2)
    assert f"other values than the policy in 1 of 39 tensors: {name}. The refit left them out" in run.found()


def test_a_sync_that_was_skipped(run: Run) -> None:
    assert "the engine holds policy version 1, the policy is at 2: the refit did not run" in run.found()


def test_a_sync_that_only_renamed_the_version(run: Run) -> None:
    run.engine.load_weights(run.weights(1), 2)
    assert "The engine still has the weights of version 1: the refit did not reach it" in run.found()


def test_an_engine_that_restarted_with_the_first_weights(run: Run) -> None:
    run.engine.load_weights(run.weights(0), 2)
    assert "The engine still has the weights of version 0" in run.found()


def test_query_and_key_swapped(run: Run) -> None:
    run.engine.load_weights(swapped(run.weights(2), "self_attn.q_proj", "self_attn.k_proj"), 2)
    text = run.found()
    assert f"{LAYER}self_attn.k_proj.weight is what the policy has as {LAYER}self_attn.q_proj.weight" in text


def test_gate_and_up_swapped(run: Run) -> None:
    run.engine.load_weights(swapped(run.weights(2), "mlp.gate_proj", "mlp.up_proj"), 2)
    assert f"{LAYER}mlp.gate_proj.weight is what the policy has as {LAYER}mlp.up_proj.weight" in run.found()


def test_a_bias_that_was_dropped(run: Run) -> None:
    name = f"{LAYER}self_attn.q_proj.bias"
    run.engine.load_weights([(n, torch.zeros_like(t) if n == name else t) for n, t in run.weights(2)], 2)
    assert f"1 of 39 tensors: {name} ({name} all zero)" in run.found()


def test_a_prefix_cache_that_was_not_reset(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forget = run.engine.forget
    monkeypatch.setattr(run.engine, "forget", lambda: None)
    run.engine.load_weights(run.weights(2), 2)
    monkeypatch.setattr(run.engine, "forget", forget)
    assert "once the engine has forgotten its prefix cache" in run.found()


def test_a_temperature_that_is_not_applied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = run.engine.logprobs

    def raw(sequences: Sequence[Any], _: float) -> list[list[float]]:
        return logprobs(sequences, 1.0)

    run.engine.load_weights(run.weights(2), 2)
    monkeypatch.setattr(run.engine, "logprobs", raw)
    assert "those at temperature 1, not 0.7" in run.found()


def test_what_is_computed_with_equal_weights(run: Run) -> None:
    run.engine.load_weights(run.weights(2), 2)
    model = wide_model(2, tied=False)
    model.model.rotary_emb.inv_freq *= 0.5
    with pytest.raises(RolloutError, match="The weights are equal, so it is what is computed with them"):
        run.probe.prove(run.engine, ModelPolicy(model, 2, PARAMS.temperature), run.prompts, PARAMS, Solo(), 0)
