"""Tiny random Qwen2 models, an engine on them, and a team of threads, for the tests of rollouts."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.seams import Signal, Weights
from capo_megatron.types import PolicyOutputs, Problem, RolloutBatch


class NumberTokenizer:
    """Token ids as text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def tiny_config(**changes: Any) -> Qwen2Config:
    """2 layers, hidden 32, 4 heads that share 2 key-value heads. Weights wide enough for clear preferences."""
    shape: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    return Qwen2Config(**shape | changes)


def tiny_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """A random model, biases included (Hugging Face starts them at zero, which would hide a bias that is dropped)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(tiny_config(**changes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.5)
    return model


def engine_of(
    model: Qwen2ForCausalLM,
    batch_size: int = 64,
    share: tuple[int, int] = (0, 1),
    version: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TransformersEngine:
    """An engine that holds the weights of `model`."""
    engine = TransformersEngine(model.config, NumberTokenizer(), dtype, batch_size, share)
    engine.load_weights(weights_of(model), version)
    return engine


def weights_of(model: Qwen2ForCausalLM) -> list[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every weight, a tied head left out."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def mixed_problems(count: int, vocab_size: int = 13) -> list[Problem]:
    """Problems with random prompts of 1, 2, ... 5, 1, ... tokens."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, vocab_size, (1 + index % 5,), generator=generator).tolist() for index in range(count)]
    return [Problem(f"problem-{index}", "", tuple(prompt), "") for index, prompt in enumerate(prompts)]


class ModelPolicy:
    """A policy that scores with a Hugging Face model and cannot train."""

    def __init__(self, model: Qwen2ForCausalLM, version: int = 0, temperature: float = 1.0) -> None:
        self.model, self.version, self.temperature = model, version, temperature

    def score(
        self, batch: RolloutBatch, needs: frozenset[Signal], which: Weights = "policy", top_k: int = 0
    ) -> PolicyOutputs:
        with torch.no_grad():
            logprobs = self.model(batch.tokens[:, :-1]).logits.div(self.temperature).log_softmax(-1)
        return PolicyOutputs(logprobs.gather(2, batch.tokens[:, 1:, None]).squeeze(2) * batch.response_mask)

    def train_step(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a proof trains nothing")

    def hf_weights(self, which: Weights = "policy") -> Iterator[tuple[str, Tensor]]:
        return iter(weights_of(self.model))


class Prompts:
    """Problems in order, for ever."""

    def __init__(self, problems: Sequence[Problem] | None = None) -> None:
        self.position, self._problems = 0, problems or mixed_problems(20)

    def take(self, count: int) -> list[Problem]:
        start, self.position = self.position, self.position + count
        return list(self._problems[start : self.position])

    def repeat(self, problems: Sequence[Problem]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class ThreadTeam:
    """One rank of a team whose ranks are threads. What is gathered is pickled, as between processes."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def gather(self, item: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(item)
        self._barrier.wait()
        found = [pickle.loads(answer) for answer in self._board]
        self._barrier.wait()
        return found

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def barrier(self) -> None:
        self._barrier.wait()


def on_ranks(size: int, work: Callable[[ThreadTeam], Any]) -> list[Any]:
    """What `work` returned or raised on each of `size` ranks. A rank left waiting breaks the team after a minute."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ThreadTeam(rank, board, barrier))
        except Exception as error:  # the test looks at it
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
