"""Supervised warm-up: make a base model from a task's demonstrations, once, and keep it as a Hugging Face directory.

It is the same policy, pipeline and optimizer step as reinforcement learning, with cross-entropy as its loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from capo_megatron.algorithms.equations import reduction_weights
from capo_megatron.config import TrainConfig, WarmupConfig
from capo_megatron.data import Task, encode
from capo_megatron.errors import ConfigError
from capo_megatron.rollout.proof import batch_from_sequences
from capo_megatron.seams import Policy
from capo_megatron.types import PolicyOutputs, Signals, TokenLoss, TrainBatch

_RECIPE = "warmup.json"


def train_config(warmup: WarmupConfig, train: TrainConfig) -> TrainConfig:
    """The optimisation of the warm-up: its own schedule, and the run's micro-batches and recomputation."""
    return TrainConfig(
        steps=warmup.steps,
        lr=warmup.lr,
        min_lr=warmup.min_lr,
        lr_schedule="cosine",
        lr_warmup_steps=warmup.lr_warmup_steps,
        betas=warmup.betas,
        weight_decay=warmup.weight_decay,
        micro_batch_tokens=train.micro_batch_tokens,
        recompute=train.recompute,
        logprob_chunk_tokens=train.logprob_chunk_tokens,
    )


def is_made(directory: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether `directory` holds the base model of this recipe. Raises ConfigError if it holds something else."""
    if not directory.exists():
        return False
    try:
        found = json.loads((directory / _RECIPE).read_text())
    except (OSError, json.JSONDecodeError):
        raise ConfigError(
            f"warmup.path: {directory} exists and is not a base model of this program. Choose another path."
        ) from None
    wanted = json.loads(json.dumps(recipe))
    if found != wanted:
        changed = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        raise ConfigError(
            f"warmup.path: {directory} was made with other settings ({', '.join(changed)}). "
            "Delete it to make it again, or choose another path."
        )
    return True


def sign(directory: Path, recipe: Mapping[str, Any]) -> None:
    """Note the recipe beside a finished base model."""
    (directory / _RECIPE).write_text(json.dumps(recipe, indent=1))


def warm_up(
    config: WarmupConfig,
    policy: Policy,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, float], None],
) -> None:
    """Train `policy` on fresh demonstrations by token-mean cross-entropy. `progress` hears (step, loss). Collective."""
    for step in range(config.steps):
        examples = task.demonstrations(config.batch, step)
        prompts = encode(tokenizer, [example.prompt for example in examples])
        responses = encode(tokenizer, [example.response for example in examples])
        batch = batch_from_sequences(list(zip(prompts, responses, strict=True)), pad_id=tokenizer.pad_token_id or 0)
        nothing = torch.zeros(batch.response_mask.shape)
        weights = reduction_weights(batch.response_mask, "token-mean").float()
        report = policy.train_step(TrainBatch(batch, Signals(nothing), nothing, weights), cross_entropy)
        progress(step + 1, report.loss)


def cross_entropy(now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
    """[n, T] negative log-likelihood of the demonstrated tokens, in nats."""
    return TokenLoss(-now.logprobs)
