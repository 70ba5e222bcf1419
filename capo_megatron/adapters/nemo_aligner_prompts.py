"""Prompts and rule-based rewards for NeMo-Aligner 0.7.0, see `nemo_aligner.py`. Legacy, contract-tested.

read_problems, Prompts, KeepPromptIds   in the place of RLHFDataset, which replaces a prompt that is too long by
                                        another and has no answers: prompts that know the id of their problem
Verifier                                in the place of RemoteGPTRMClient: rewards without a reward-model server
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capo_megatron.errors import DataError
from capo_megatron.seams import RewardFunction
from capo_megatron.types import Problem

_LOG = logging.getLogger(__name__)


def read_problems(path: str | Path, encode: Callable[[str], Sequence[int]], max_tokens: int) -> list[Problem]:
    """Problems of a JSONL file with the keys text (the whole prompt) and answer. Raises DataError with file:line.

    Prompts of more than `max_tokens` tokens are left out and counted in the log.
    """
    problems, too_long = [], 0
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            text, answer = str(record["text"]), str(record["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: no JSON object with the keys text and answer ({error!r}).") from error
        ids = tuple(encode(text))
        if len(ids) > max_tokens:
            too_long += 1
            continue
        problems.append(Problem(id=f"{path}:{number}", prompt=text, prompt_ids=ids, answer=answer))
    if too_long:
        _LOG.warning("%s: %d prompts of more than %d tokens are left out", path, too_long, max_tokens)
    if not problems:
        raise DataError(f"{path}: no prompt of at most {max_tokens} tokens in this file.")
    return problems


class Prompts(torch.utils.data.Dataset):
    """The problems `ids` of a list as NeMo-Aligner's prompt rows. A prompt's id is its problem's place in the list."""

    def __init__(self, problems: Sequence[Problem], ids: range) -> None:
        self._problems = problems
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt_id = self._ids[index]
        tokens = torch.tensor(self._problems[prompt_id].prompt_ids, dtype=torch.int64)
        return {"text": tokens, "length": len(tokens), "loss_multiplier": True, "prompt_ids": prompt_id}


@dataclass(frozen=True)
class KeepPromptIds:
    """A collate function that adds the ids to what the stock one makes."""

    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**self.collate(rows), "prompt_ids": torch.tensor([row["prompt_ids"] for row in rows])}


class Verifier:
    """Grades responses by a `RewardFunction` in the place of a reward-model client, while generation goes on.

    `problems` is the list that prompt ids index; `tokenizer` is NeMo's. The reward function sees neither the
    end-of-sequence token nor one of the `end_strings`. One rank of a model-parallel group grades and tells the others,
    since a grading that times out on one rank only would make them differ.
    """

    def __init__(
        self, reward: RewardFunction, problems: Sequence[Problem], tokenizer: Any, end_strings: Sequence[str] = ()
    ) -> None:
        self._reward = reward
        self._problems = problems
        self._tokenizer = tokenizer
        self._end_strings = tuple(end_strings)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def infer_rm(self, rollout_batch: Mapping[str, Tensor]) -> PendingRewards:
        """A future of rewards [n, 1]; NaN where the verdict says nothing of the response. Collective, like `result`."""
        from nemo_aligner.utils.distributed import run_if_model_parallel_src

        return PendingRewards(run_if_model_parallel_src(self.submit, rollout_batch), rollout_batch["prompt_ids"].device)

    def submit(self, rollout_batch: Mapping[str, Tensor]) -> Future[list[float]]:
        """Start grading. The future holds one reward per row."""
        names = ("response_tokens", "prompt_lengths", "response_lengths", "prompt_ids")
        rows = zip(*(rollout_batch[name].tolist() for name in names), strict=True)
        texts, problems = [], []
        for tokens, start, end, prompt_id in rows:
            ids = tokens[start:end]
            text = self._tokenizer.ids_to_text(ids[:-1] if ids[-1:] == [self._tokenizer.eos_id] else ids)
            texts.append(self._without_end(text))
            problems.append(self._problems[prompt_id])
        return self._thread.submit(self._grade, problems, texts)

    def _without_end(self, text: str) -> str:
        end = next((end for end in self._end_strings if end and text.endswith(end)), "")
        return text.removesuffix(end)

    def _grade(self, problems: list[Problem], texts: list[str]) -> list[float]:
        grades = self._reward.grade(problems, texts)
        return [grade.reward if grade.verdict.gradable else float("nan") for grade in grades]

    def close(self) -> None:
        """Stop the grading thread and the reward function's processes."""
        self._thread.shutdown()
        self._reward.close()


@dataclass(frozen=True)
class PendingRewards:
    """Rewards under way; `future` is None on ranks that are told."""

    future: Future[list[float]] | None
    device: torch.device

    def result(self) -> Tensor:
        """[n, 1] float32, the same on the ranks of a model-parallel group. Raises what the reward function raised."""
        from nemo_aligner.utils.distributed import broadcast_2d_tensor_within_mp

        rewards = None
        if self.future is not None:
            rewards = torch.tensor(self.future.result(), dtype=torch.float32, device=self.device).unsqueeze(1)
        return broadcast_2d_tensor_within_mp(rewards)
