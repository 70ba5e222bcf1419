"""Parts of a run without a model, for tests of the loop. They obey the seams, and what they do depends on their state.

The policy's only weight moves with the rewards it is trained on, and the engine's responses depend on that weight, the
seed and the problem: a run that resumes in any other state than it left soon has other metrics.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor

from capo_megatron.algorithms.equations import reduction_weights
from capo_megatron.config import RunConfig, load
from capo_megatron.data import ShuffledSource
from capo_megatron.runlog.log import RunLog
from capo_megatron.seams import Algorithm, PolicyLoss, SamplingParams, Signal, Sketch, Solo, Weights
from capo_megatron.trainer import Parts
from capo_megatron.types import (
    Grade,
    PolicyOutputs,
    Problem,
    RolloutBatch,
    Sample,
    StepReport,
    TokenLoss,
    TrainBatch,
    Verdict,
)
from tests.e2e.commands import TREE, write_config

Saved = dict[int, tuple[int, float, str, bytes]]  # version, weight, state, tensors


class Killed(BaseException):
    """The run ended here, without a chance to clean up."""


@dataclass
class Events:
    """What happened, in order. `watch` hears of each event first, and may raise."""

    names: list[str] = field(default_factory=list)
    watch: Callable[[str], None] = lambda _: None

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.watch(name)


class FakePolicy:
    def __init__(self, note: Events, skips: Sequence[str | None] = ()) -> None:
        self.version, self.weight = 0, 0.0
        self.trained: list[TrainBatch] = []
        self._note, self._skips = note, list(skips)

    def score(
        self, batch: RolloutBatch, needs: frozenset[Signal], which: Weights = "policy", top_k: int = 0
    ) -> PolicyOutputs:
        self._note(f"score {which}")
        value = batch.response_mask * logprob(self.weight if which == "policy" else 0.0)
        return PolicyOutputs(value, -value if Signal.ENTROPY in needs else None)

    def train_step(
        self, batch: TrainBatch, loss: PolicyLoss, needs: frozenset[Signal] = frozenset(), top_k: int = 0
    ) -> StepReport:
        self._note("train")
        self.trained.append(batch)
        skipped = self._skips.pop(0) if self._skips else None
        if skipped is None:
            self.version += 1
            self.weight += 0.1 + float((batch.weights * batch.advantages).sum())
        return StepReport(self.weight, 1.0, 1e-3, skipped, {"ratio_max": self.weight, "clip_share": self.weight})

    def update_reference(self, decay: float) -> None:
        self._note(f"update reference {decay}")

    def hf_weights(self, which: Weights = "policy") -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.tensor(self.weight, dtype=torch.float64)


class FakeEngine:
    def __init__(self, note: Events) -> None:
        self.version, self.share = -1, (0, 1)
        self.asked: list[tuple[list[str], SamplingParams]] = []
        self._note, self._weight = note, 0.0

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        self.asked.append(([problem.id for problem in problems], params))
        self._note("generate")
        return [[self._sample(problem, number, params.seed) for number in range(samples)] for problem in problems]

    def _sample(self, problem: Problem, number: int, seed: int) -> Sample:
        drawn = zlib.crc32(repr((problem.id, number, seed, round(self._weight, 6))).encode())
        length = 1 + drawn // 2 % 3
        return Sample((3,) * length, (logprob(self._weight),) * length, str(drawn % 2), False, self.version)

    def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
    ) -> list[list[float]]:
        return [[logprob(self._weight)] * len(response) for _, response in sequences]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._note("refit")
        (self._weight,) = (float(tensor) for _, tensor in hf)
        self.version = version

    def sketches(self) -> dict[str, Sketch]:
        return {"weight": (self._weight, self._weight, abs(self._weight))}

    def forget(self) -> None: ...

    def sleep(self) -> None:
        self._note("sleep")

    def wake(self) -> None:
        self._note("wake")


def logprob(weight: float) -> float:
    return -1.0 - weight % 0.5


class FakeReward:
    """A response "1" is right, and to a problem whose answer is "easy" every response is."""

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        right = [text == "1" or problem.answer == "easy" for problem, text in zip(problems, responses, strict=True)]
        return [Grade(Verdict.CORRECT if value else Verdict.WRONG, float(value)) for value in right]

    def close(self) -> None:
        return None


class FakeStore:
    def __init__(self, note: Events, saved: Saved) -> None:
        self._note, self._saved = note, saved

    def save(
        self, step: int, policy: Any, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Path:
        self._note(f"save {step}")
        self._saved[step] = (policy.version, policy.weight, json.dumps(state), save(dict(tensors or {})))
        self._note(f"saved {step}")
        return Path()

    def load(self, policy: Any, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        if not self._saved:
            return None
        step = max(self._saved) if step is None else step
        policy.version, policy.weight, state, _ = self._saved[step]
        return step, json.loads(state)

    def tensors(self, step: int) -> dict[str, Tensor]:
        return load_tensors(self._saved[step][-1])


class NotedLog(RunLog):
    def __init__(self, note: Events, config: RunConfig) -> None:
        super().__init__(Path(config.output), config.log, "", Solo(), config.train.steps)
        self.warnings: list[str] = []
        self._note = note

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note(f"log {step}")
        super().step(step, metrics)
        self._note(f"logged {step}")

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Memory:
    """A token mask that keeps everything and remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, batch: RolloutBatch, signals: object) -> Tensor:
        self.asked += 1
        return batch.response_mask

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]


def fake_algorithm(**changes: Any) -> Algorithm:
    memory = Memory()
    return Algorithm(
        name="fake",
        estimator=lambda batch, _: batch.rewards["reward"].unsqueeze(1) * batch.response_mask,
        loss=lambda now, _: TokenLoss(-now.logprobs),
        reduction=lambda batch: reduction_weights(batch.response_mask, "token-mean").float(),
        masks=(memory,),
        stateful={"memory": memory},
        report=lambda: {"fake/asked": float(memory.asked)},
        **changes,
    )


def fake_config(folder: Path, **sections: Any) -> RunConfig:
    """Four steps of one mini-batch, two problems of four samples; a save every other step; no validation, no probe."""
    sizes = {"prompts": 2, "samples": 4, "max_tokens": 8, "probe_rows": 0}
    train = {"steps": 4, "minibatches": 1, "micro_batch_tokens": 256}
    given = {"output": str(folder / "run"), "log": {"console": "off"}, "eval": {"every": 0}, "checkpoint": {"every": 2}}
    given |= {name: value for name, value in sections.items() if name not in ("rollout", "train")}
    rollout, train = sizes | sections.get("rollout", {}), train | sections.get("train", {})
    return load(write_config(folder, TREE, rollout=rollout, train=train, **given))


def fake_parts(
    config: RunConfig,
    note: Events,
    saved: Saved | None = None,
    algorithm: Algorithm | None = None,
    skips: Sequence[str | None] = (),
    easy: Sequence[int] = (),
) -> Parts:
    """Twelve problems, of which those numbered in `easy` are always solved, and three for validation."""
    problems = [Problem(f"p{index}", "", (1, 2), "easy" if index in easy else "") for index in range(12)]
    return Parts(
        policy=FakePolicy(note, skips),
        engine=FakeEngine(note),
        reward=FakeReward(),
        prompts=ShuffledSource(problems, config.seed, shuffle=False),
        validation=[Problem(f"v{index}", "", (1, 2), "") for index in range(3)],
        algorithm=algorithm or fake_algorithm(),
        store=FakeStore(note, {} if saved is None else saved),
        log=NotedLog(note, config),
        team=Solo(),
        sampling=SamplingParams(max_tokens=8),
        pad_id=0,
        beside=Solo(),
    )
