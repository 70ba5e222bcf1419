"""Procedural tasks: problems made from a seed, so that nothing needs to be downloaded.

    chain                   chains of arithmetic mod 10, the laptop setting; everything about it is in `chain`
    one_digit               few-shot one-digit sums or products for a small pretrained model; see `one_digit`
    reasoning_gym/<name>    any task of the reasoning-gym package; see `gym`

**Disjoint by construction.** Which split a question belongs to is a hash of its text (`splits.split_of`): 6/8 of all
questions can only be training problems, 1/8 validation, 1/8 evaluation. No seed or number of problems can make the
splits meet, and evaluation problems are the same for every seed of a run, so that runs can be compared question by
question.
"""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from capo_megatron.config import DataConfig, ModelConfig
from capo_megatron.data.chain import ChainOptions, ChainTask, chain_tokenizer
from capo_megatron.data.gym import GymTask
from capo_megatron.data.one_digit import OneDigitOptions, OneDigitTask
from capo_megatron.data.problems import did_you_mean
from capo_megatron.data.splits import Demonstration, read_options
from capo_megatron.data.templates import Template, load_template
from capo_megatron.data.tokenizer import load_tokenizer
from capo_megatron.errors import DataError
from capo_megatron.notices import warn_once
from capo_megatron.types import Problem

_GYM = "reasoning_gym/"
_OWN_PROMPTS = ("chain", "one_digit")


class Task(Protocol):
    """Makes problems. The first m of n problems are the same for every n >= m."""

    name: str
    reward: str  # the `reward.kind` that grades its answers
    stop: tuple[str, ...]  # what ends a response besides end-of-sequence, for `rollout.stop`

    def train_problems(self, count: int) -> list[Problem]:
        """`count` distinct problems; depends on the seed of the run. Raises DataError if there are not so many."""

    def validation_problems(self, count: int) -> list[Problem]:
        """`count` distinct problems, the same for every seed."""

    def evaluation_problems(self, count: int) -> list[Problem]:
        """`count` distinct problems, the same for every seed."""

    @property
    def template(self) -> Template:
        """From a question to its prompt."""

    def question(self, problem: Problem) -> str:
        """The text that `template` made the problem's prompt of."""

    def demonstrations(self, count: int, step: int) -> list[Demonstration]:
        """`count` fresh examples for step `step` of a supervised warm-up; depends on the seed of the run and `step`."""


def make_task(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, instruction: str | None = None
) -> Task:
    """The task that `config.task` names, with `config.task_options`. Raises DataError.

    `instruction` goes into the prompts of reasoning-gym; chain and one_digit have no room for it in theirs, and a
    warning says so.
    """
    name, options = config.task or "", config.task_options
    _check_name(name)
    if name.startswith(_GYM):
        template = load_template(config.template, config.system_prompt, tokenizer, instruction)
        return GymTask(name.removeprefix(_GYM), options, template, tokenizer, seed)
    if config.template not in ("plain", DataConfig.template) or config.system_prompt is not None:
        raise DataError(f"data.template: the task {name} writes its own prompts. Use plain, and no system_prompt.")
    if instruction is not None:
        warn_once(
            f"data.task={name}: it writes its own prompts, without algorithm.instruction. No response can be expected "
            "to have what that asks for. Use problem files or a task of reasoning_gym."
        )
    if name == "chain":
        return ChainTask(read_options(name, ChainOptions, options), tokenizer, seed)
    return OneDigitTask(read_options(name, OneDigitOptions, options), tokenizer, seed)


def _check_name(name: str) -> None:
    if not name.startswith(_GYM) and name not in _OWN_PROMPTS:
        known = [*_OWN_PROMPTS, f"{_GYM}<name>"]
        raise DataError(f"data.task: no task {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")


def tokenizer_for(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer: `model.tokenizer`, or the one beside the model's weights, or the task's own.

    Raises DataError if there is none, or it cannot be loaded.
    """
    if data.task is not None:
        _check_name(data.task)
    path = model.tokenizer or model.path
    if path is not None:
        return load_tokenizer(path)
    if data.task == "chain":
        return chain_tokenizer()
    raise DataError(
        f"model.tokenizer: not given, no model.path to look in, and {data.task or 'data.train'} brings none of its own."
    )
