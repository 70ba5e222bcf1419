"""Supervised warm-up: make a base model from a task's demonstrations, once, and keep it as a Hugging Face directory.

It is the same policy, pipeline and optimizer step as reinforcement learning, with cross-entropy as its loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from capo_megatron.agreement import gather_or_raise
from capo_megatron.algorithms.equations import reduction_weights
from capo_megatron.config import RunConfig, TrainConfig, WarmupConfig
from capo_megatron.data import Task, encode, make_task
from capo_megatron.errors import ConfigError
from capo_megatron.mcore.model import DTYPES
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.rollout.proof import batch_from_sequences
from capo_megatron.runlog import writing
from capo_megatron.seams import Policy
from capo_megatron.types import PolicyOutputs, Signals, TokenLoss, TrainBatch
from capo_megatron.weights.huggingface import DirectorySource, save_hf
from capo_megatron.weights.shape import ModelShape
from capo_megatron.weights.sources import WeightSource

Say = Callable[[str], None]  # shows a line to the user

_RECIPE = "warmup.json"


@dataclass(frozen=True)
class Base:
    """The base model that a run's warm-up makes, once: a Hugging Face directory beside the run's own folder."""

    directory: Path
    recipe: Mapping[str, Any]  # JSON values: what it is made of
    config: RunConfig
    shape: ModelShape
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> Base:
        """The base model of a config with a `warmup`. Runs whose outputs have one parent share it."""
        assert config.warmup is not None
        recipe = {
            "seed": config.seed,
            "model": asdict(replace(config.model, reference=None)),  # which the base does not depend on
            "warmup": asdict(config.warmup) | {"path": None},  # it may be spelled in several ways, and moved
            "task": config.data.task,
            "task_options": config.data.task_options,
        }
        directory = Path(config.output).parent / config.warmup.path
        return cls(directory, json.loads(json.dumps(recipe)), config, shape, tokenizer)

    def is_made(self) -> bool:
        """Whether the directory holds this model. Raises ConfigError if it holds something else."""
        return is_made(self.directory, self.recipe)

    def weights(self) -> WeightSource:
        """The weights of the model that was made."""
        return DirectorySource(self.directory)

    def make(self, start: WeightSource, team: Runtime, say: Say) -> None:
        """Train and write it, unless it is there. Raises CapoError if it cannot be written. Collective."""
        if gather_or_raise(team, self.is_made)[0]:
            return
        config, warmup = self.config, self.config.warmup
        assert warmup is not None
        optimisation = train_config(warmup, config.train)
        policy = MegatronPolicy(
            self.shape, team, optimisation, dtype=DTYPES[config.model.dtype], total_steps=warmup.steps
        )
        policy.load(start)
        task = make_task(config.data, self.tokenizer, config.seed)
        warm_up(warmup, policy, task, self.tokenizer, _progress(warmup.steps, say))
        gather_or_raise(team, lambda: self._save(policy, team))

    def _save(self, policy: MegatronPolicy, team: Runtime) -> None:
        """Write the directory aside and rename it, so that it is whole or absent."""
        weights = policy.hf_weights()
        if team.rank == 0:
            aside = self.directory.with_name(f".{self.directory.name}.unfinished")
            save_hf(aside, self.shape, weights)
            with writing(self.directory):
                self.tokenizer.save_pretrained(str(aside))
                (aside / _RECIPE).write_text(json.dumps(self.recipe, indent=1))
                aside.rename(self.directory)
        for _ in weights:  # every rank takes part in gathering every tensor
            pass


def _progress(steps: int, say: Say) -> Callable[[int, float], None]:
    """Says about ten times how far a warm-up is."""
    began = time.monotonic()

    def progress(step: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            left = (time.monotonic() - began) / step * (steps - step)
            say(f"warm-up {step}/{steps}  loss {loss:.3f}  {left:.0f} s left")

    return progress


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
    if found != recipe:
        changed = sorted(key for key in {*found, *recipe} if found.get(key) != recipe.get(key))
        raise ConfigError(
            f"warmup.path: {directory} was made with other settings ({', '.join(changed)}). "
            "Delete it to make it again, or choose another path."
        )
    return True


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
