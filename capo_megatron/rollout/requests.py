"""What is asked of an engine, and what every engine refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from capo_megatron.errors import RolloutError
from capo_megatron.seams import SamplingParams
from capo_megatron.types import Problem

PromptAndResponse = tuple[Sequence[int], Sequence[int]]  # token ids


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turns responses into text."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> Any: ...


class Limits(Protocol):
    """The part of a model's config that bounds what can be asked of it."""

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def check_fits(problem: Problem, max_tokens: int, model: Limits) -> None:
    """Raise RolloutError unless the model can continue this prompt by `max_tokens`."""
    length = len(problem.prompt_ids)
    if length == 0:
        raise RolloutError(f"problem {problem.id!r}: the prompt is empty, so nothing predicts a first token.")
    if length + max_tokens > model.max_position_embeddings:
        raise RolloutError(
            f"problem {problem.id!r}: {length} prompt tokens and rollout.max_tokens={max_tokens} need "
            f"{length + max_tokens} positions, the model has {model.max_position_embeddings}. Lower "
            "rollout.max_tokens or data.max_prompt_tokens, or set model.max_position_embeddings."
        )
    lowest, highest = min(problem.prompt_ids), max(problem.prompt_ids)
    if lowest < 0 or highest >= model.vocab_size:
        raise RolloutError(
            f"problem {problem.id!r}: token ids {lowest} to {highest} in the prompt, the model's embedding has "
            f"ids 0 to {model.vocab_size - 1}. Use the tokenizer that belongs to the model."
        )


def check_params(params: SamplingParams, samples: int) -> None:
    """Raise RolloutError unless sampling can be done so."""
    wrong = [
        (params.max_tokens < 1, f"rollout.max_tokens={params.max_tokens}: a response needs at least 1 token"),
        (samples < 1, f"rollout.samples={samples}: at least 1 response per problem is needed"),
        (not params.temperature >= 0, f"rollout.temperature={params.temperature}: must be 0 (greedy) or more"),
        (not 0 < params.top_p <= 1, f"rollout.top_p={params.top_p}: must be above 0 and at most 1"),
        (params.top_k < 0, f"rollout.top_k={params.top_k}: must be 0 (off) or more"),
    ]
    for fails, message in wrong:
        if fails:
            raise RolloutError(f"{message}.")


def check_awake(asleep: bool, action: str) -> None:
    """Raise RolloutError if an engine that sleeps is asked for something."""
    if asleep:
        raise RolloutError(f"rollout engine: {action} while it sleeps. Call wake() first.")


def check_ready(asleep: bool, version: int, action: str) -> None:
    """Raise RolloutError if an engine sleeps or has no weights (version -1)."""
    check_awake(asleep, action)
    if version < 0:
        raise RolloutError(
            f"rollout engine: {action} without weights (none were loaded, or the last load failed). "
            "Call load_weights with every weight of the policy first."
        )


def check_complete(wrong: Sequence[str], version: int, model_type: str, layers: int) -> None:
    """Raise RolloutError if something was wrong with the weights of a refit."""
    if wrong:
        raise RolloutError(
            f"rollout weights of version {version}: {few(wrong, '; ')}. The engine holds no usable weights now. "
            f"Policy and engine must be built from the same config.json ({model_type}, {layers} layers)."
        )


def few(items: Sequence[str], separator: str = ", ") -> str:
    """The first of these, and how many there are beside them."""
    return separator.join(items[:5]) + (f"{separator}and {len(items) - 5} more" if len(items) > 5 else "")
