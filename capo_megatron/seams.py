"""Every seam of the system on one page. Whoever implements a Protocol here can be swapped in without touching the loop.

The way of the data: a `PromptSource` gives problems, a `RolloutEngine` samples, a `RewardFunction` grades, a `Policy`
scores and trains, an `Algorithm` says what to train on, a `CheckpointStore` remembers, and a `Team` is the set of ranks
that do all this together. `trainer.train` is the only place where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from capo_megatron.errors import CheckpointError
from capo_megatron.notices import warn_once
from capo_megatron.types import (
    Grade,
    PolicyOutputs,
    Problem,
    Reading,
    RolloutBatch,
    Sample,
    Signals,
    StepReport,
    TokenLoss,
    TrainBatch,
)


class Signal(Enum):
    """What `Policy.score` computes beyond the log-probs of the sampled tokens."""

    REF_LOGPROBS = "ref_logprobs"
    ENTROPY = "entropy"
    TOPK = "topk"
    PERTURBED = "perturbed"  # log-probs of the responses after each problem's perturbed prompts


class Stateful(Protocol):
    """Remembers something between steps. States hold JSON values only: a checkpoint never unpickles anything."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# --- an algorithm and its parts -----------------------------------------------------------------------------------


class AdvantageEstimator(Protocol):
    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N, T] float32 advantages of the whole step, 0.0 off the response mask."""


class TokenMask(Protocol):
    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N, T] bool, True = keep. The trainer multiplies the advantages by it; the row stays in every denominator."""


class PolicyLoss(Protocol):
    def __call__(self, now: PolicyOutputs, mb: TrainBatch) -> TokenLoss:
        """[n, T] unreduced loss to minimise, for any subset of rows. Runs on the last pipeline stage only."""


class Reduction(Protocol):
    def __call__(self, batch: RolloutBatch) -> Tensor:
        """[N, T] float32 weights of a whole mini-batch, 0.0 off-mask and on rows that must not train.

        Rows with `gradable` False always get 0.0 and count in no denominator.
        """


class ResponseReader(Protocol):
    def __call__(self, ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> Reading:
        """What a response says beside its answer; `decode` gives the text of token ids. Never raises on bad text."""


@dataclass(frozen=True)
class Algorithm:
    """A policy-optimisation method as data: what to compute on a step's `[N, T]` tensors. Knows nothing of ranks."""

    name: str
    estimator: AdvantageEstimator
    loss: PolicyLoss
    reduction: Reduction
    masks: tuple[TokenMask, ...] = ()
    needs: frozenset[Signal] = frozenset()  # scored once by frozen weights, before the first update
    idle: Callable[[RolloutBatch], frozenset[Signal]] = lambda _: frozenset()  # needs that this batch does without
    loss_needs: frozenset[Signal] = frozenset()  # of the current policy, with gradient, inside `loss`
    top_k: int = 0
    keep_group: Callable[[RolloutBatch], bool] | None = None  # sees one group; False: replace it by another problem's
    max_refills: int = 10  # rounds of replacement before the run stops with an error
    reselect: Callable[[RolloutBatch, Signals], Sequence[int] | None] | None = None  # groups to sample again next step
    instruction: str | None = None  # added to every problem's text, before the template
    read: ResponseReader | None = None  # its values become named rewards, its segments `RolloutBatch.segment`
    reference_decay: float | None = None  # after each step: reference = decay * reference + (1 - decay) * policy
    scheduled: bool = False  # what it does depends on `RolloutBatch.progress`
    corrects_sampler: bool = False  # its loss makes up for responses that older weights or another engine sampled
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # parts with memory, by name
    report: Callable[[], dict[str, float]] = dict  # numbers of its own worth logging after a step

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := sorted(self.stateful.keys() - state.keys()):
            raise CheckpointError(
                f"algorithm state: the checkpoint has none for {missing}, it has {sorted(state)}: other options of "
                f"{self.name} trained it. Choose another output, or those options."
            )
        if unused := sorted(state.keys() - self.stateful.keys()):
            warn_once(
                f"algorithm state: the checkpoint remembers {unused}, of which the present options of {self.name} make "
                "no use. The next checkpoint forgets it."
            )
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])


# --- where problems, responses and grades come from ---------------------------------------------------------------


class PromptSource(Stateful, Protocol):
    def take(self, count: int) -> list[Problem]:
        """The next `count` problems in a seeded order that every rank agrees on; starts a new pass when one ends."""

    def repeat(self, problems: Sequence[Problem]) -> None:
        """Give these (in this order, repeats allowed) before anything new. Part of the state."""

    def find(self, ids: Sequence[str]) -> list[Problem]:
        """The problems of these ids, in this order."""


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. `seed` and the problem decide the tokens: not the batch, rank or layout."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_ids: tuple[int, ...] = ()  # sampling ends after one of these, which is part of the response
    seed: int = 0


Sketch = tuple[float, float, float]  # of a weight, see `rollout.sketch`


class RolloutEngine(Protocol):
    share: tuple[int, int]  # (index, count): this rank samples the index-th of count shares of a step's problems

    @property
    def version(self) -> int:
        """Of the weights it holds, -1 before the first load."""

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        """For each problem its `samples` responses, without those on which the engine gave up for good."""

    def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
    ) -> list[list[float]]:
        """The engine's own log-probs of given (prompt ids, response ids), for the proof after a refit."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Refit: take every weight under its Hugging Face name. All or nothing: RolloutError if one is missing."""

    def sketches(self) -> dict[str, Sketch]:
        """What it holds of every weight, under its Hugging Face name. Collective over the ranks of an engine."""

    def forget(self) -> None:
        """Forget keys and values that were computed with the weights of some time ago."""

    def sleep(self) -> None:
        """Free memory before training."""

    def wake(self) -> None:
        """Be ready to take weights and generate."""


class RewardFunction(Protocol):
    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        """One grade per (problem, response) pair. Never raises on bad text, never hangs."""

    def close(self) -> None: ...


# --- the model ------------------------------------------------------------------------------------------------------

Weights = Literal["policy", "reference"]


class Policy(Protocol):
    version: int  # optimizer steps taken

    def score(
        self, batch: RolloutBatch, needs: frozenset[Signal], which: Weights = "policy", top_k: int = 0
    ) -> PolicyOutputs:
        """Outputs for every row, on CPU, the same on every rank. Collective; no gradient."""

    def train_step(
        self, batch: TrainBatch, loss: PolicyLoss, needs: frozenset[Signal] = frozenset(), top_k: int = 0
    ) -> StepReport:
        """One optimizer step on a mini-batch that every rank holds whole. Collective."""

    def update_reference(self, decay: float) -> None:
        """Move the reference towards the policy: an exponential moving average, kept in float32 and checkpointed."""

    def hf_weights(self, which: Weights = "policy") -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names, whole, one at a time, on every rank. Collective."""


class CheckpointStore(Protocol):
    def save(
        self, step: int, policy: Policy, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Path:
        """Write model, optimizer, `state` (JSON values) and `tensors` aside, then rename; keep the last few.

        Collective.
        """

    def load(self, policy: Policy, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Restore the latest (or a given) checkpoint into `policy`, saved on any layout; None if there is none."""

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The `tensors` that a checkpoint was saved with, on every rank; empty without."""


# --- ranks and logs ---------------------------------------------------------------------------------------------------


@runtime_checkable
class Team(Protocol):
    """The ranks of a run, seen without naming a backend."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, item: Any) -> list[Any]:
        """`item` of every rank, in rank order, on every rank. Collective."""

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is True on one. Collective."""

    def barrier(self) -> None: ...


@dataclass(frozen=True)
class Solo:
    """A team of one."""

    rank: int = 0
    size: int = 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        return None


class Rollout(Protocol):
    """Responses with their texts and grades, row by row, as `rollout.collect` gives them."""

    @property
    def batch(self) -> RolloutBatch: ...
    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def grades(self) -> Sequence[Grade]: ...


class Logger(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; the seconds and tokens/s of its phases are added."""

    def samples(self, step: int, rollout: Rollout, signals: Signals, advantages: Tensor) -> None:
        """Keep some responses of a step for people to read."""

    def phase(self, name: str, tokens: int = 0) -> AbstractContextManager[Any]:
        """Time a block of a step. The value has `tokens`, to be set where the count is not known beforehand."""

    def warn(self, text: str) -> None: ...

    def resume_from(self, step: int) -> None:
        """Begin, or continue after `step`: forget what was recorded later. -1 forgets everything."""
