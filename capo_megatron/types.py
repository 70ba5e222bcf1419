"""The data that flows through a training step, as frozen, checked types.

Shape letters, used everywhere:

    P  problems of a step          G  samples per problem         N  = P * G responses
    S  padded sequence length      T  = S - 1 targets             n  rows of a micro-batch
    K  top-k                       V  vocabulary

**One alignment rule.** Per-token tensors are *target-aligned*: `[N, T]`, and column `t` speaks of predicting
`tokens[:, t + 1]`. Sequences are right-padded. Log-probs are float32, in nats, taken at the sampling temperature, and
0.0 wherever the mask is False. Perplexity is `exp(-mean log-prob over the response's targets)`.

Example, one row with a prompt of two tokens `a b` and a response `c d $`, padded to S = 6:

    tokens          a  b  c  d  $  _
    target (t)         0  1  2  3  4      column t predicts tokens[t + 1]
    response_mask      F  T  T  T  F
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, Union

from capo_megatron.errors import ShapeError

if TYPE_CHECKING:  # what grades, measures records or draws figures has no tensors, and should not wait for torch
    import torch
    from torch import Tensor

Rows = Union[slice, Sequence[int], "Tensor"]
_Batch = TypeVar("_Batch", bound="_Rowwise")


class Segment:
    """Values of `RolloutBatch.segment`: which part of a response a target belongs to."""

    NONE = 0
    REASONING = 1
    ANSWER = 2
    CONFIDENCE = 3


class Verdict(str, Enum):
    """What the grader says of one response."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"  # the reference answer cannot be read: nobody can be right or wrong
    TIMEOUT = "timeout"  # grading was killed for running too long or taking too much memory

    @property
    def gradable(self) -> bool:
        """True where the verdict says something about the response."""
        return self in (Verdict.CORRECT, Verdict.WRONG)


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its verifiable answer.

    `prompt` is the text the model sees (template applied) and `prompt_ids` its token ids. `answer` is the reference
    answer in the form the reward function expects. `extra` carries what a scorer or an algorithm may need.
    """

    id: str
    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    perturbed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response, before padding. `logprobs` are the engine's, at the sampling temperature, one per id."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool
    version: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What an algorithm reads from a response: named numbers, the segments that begin at some tokens, what to grade."""

    values: Mapping[str, float] = field(default_factory=dict)  # become named rewards
    starts: Mapping[int, int] = field(default_factory=dict)  # index of a response token -> the Segment from there on
    answer: str | None = None  # the part of the text that is graded; None: all of it


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict on one response, the named rewards it earned, and the answer that was read from it (if any)."""

    verdict: Verdict
    reward: float
    extracted: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


class _Rowwise:
    """Row slicing and device moves for dataclasses whose tensors all have rows first."""

    __slots__ = ()

    def slice(self: _Batch, rows: Rows) -> _Batch:
        """The same batch with only these rows, in this order."""
        return self._map(lambda tensor: tensor[_index(rows, tensor.device)])

    def to(self: _Batch, device: torch.device | str) -> _Batch:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def trim(self: _Batch, targets: int) -> _Batch:
        """The same batch cut to its first `targets` target columns (T); nothing but padding may lie beyond."""
        width = {"tokens": targets + 1}
        return self._map(lambda tensor: tensor[:, :targets] if tensor.ndim > 1 else tensor, width)

    def _map(self: _Batch, function: Any, width: Mapping[str, int] | None = None) -> _Batch:
        """Apply `function` to every tensor, except that those named in `width` are cut to that many columns."""
        from torch import Tensor

        changed: dict[str, Any] = {}
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if isinstance(value, Tensor):
                cut = (width or {}).get(spec.name)
                changed[spec.name] = function(value) if cut is None else value[:, :cut]
            elif isinstance(value, _Rowwise):
                changed[spec.name] = value._map(function, width)
            elif isinstance(value, Mapping):
                changed[spec.name] = {key: function(item) for key, item in value.items()}
        return replace(self, **changed)  # type: ignore[type-var]


def _index(rows: Rows, device: torch.device) -> slice | Tensor:
    if isinstance(rows, slice):
        return rows
    import torch

    return torch.as_tensor(rows, dtype=torch.long, device=device)


def _check(owner: str, name: str, value: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if tuple(value.shape) != shape:
        raise ShapeError(f"{owner}.{name}: shape {tuple(value.shape)}, expected {shape}.")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(f"{owner}.{name}: dtype {value.dtype}, expected {allowed}.")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch(_Rowwise):
    """N sampled and graded responses, the G siblings of a problem adjacent."""

    problems: tuple[Problem, ...]  # P; `group` indexes into it, also after slicing
    tokens: Tensor  # [N, S] int64, right-padded
    response_mask: Tensor  # [N, T] bool: the target was sampled by the policy
    segment: Tensor  # [N, T] uint8, see Segment
    group: Tensor  # [N] int64, index into problems
    rewards: Mapping[str, Tensor]  # name -> [N] float32; always has "reward"; "correct" is 0. or 1.
    gradable: Tensor  # [N] bool; False: the verdict says nothing about the response, which is then not trained on
    truncated: Tensor  # [N] bool: hit max_tokens
    sampler_logprobs: Tensor  # [N, T] float32, from the engine that sampled
    policy_version: int  # optimizer steps behind the weights that sampled; they may be a step older than the policy
    progress: float = 0.0  # share of the run's steps that come before the one that trains on these, from 0 to below 1

    def __post_init__(self) -> None:
        import torch

        rows, targets = self.response_mask.shape
        spec = {
            "tokens": ((rows, targets + 1), torch.int64),
            "response_mask": ((rows, targets), torch.bool),
            "segment": ((rows, targets), torch.uint8),
            "group": ((rows,), torch.int64),
            "gradable": ((rows,), torch.bool),
            "truncated": ((rows,), torch.bool),
            "sampler_logprobs": ((rows, targets), torch.float32),
        }
        for name, (shape, dtype) in spec.items():
            _check("RolloutBatch", name, getattr(self, name), shape, dtype)
        for name in ("reward", "correct"):
            if name not in self.rewards:
                raise ShapeError(f"RolloutBatch.rewards: {name!r} is missing, got {sorted(self.rewards)}.")
        for name, value in self.rewards.items():
            _check("RolloutBatch", f"rewards[{name!r}]", value, (rows,), torch.float32)

    @property
    def correct(self) -> Tensor:
        """[N] bool: the verifier accepted the response."""
        return self.rewards["correct"] > 0.5

    @property
    def lengths(self) -> Tensor:
        """[N] int64: prompt plus response tokens of each row."""
        import torch

        positions = torch.arange(1, self.response_mask.shape[1] + 1, device=self.tokens.device)
        return (self.response_mask * positions).amax(dim=1) + 1

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class TopK(_Rowwise):
    """The K most likely tokens per target over the whole vocabulary, most likely first."""

    ids: Tensor  # [N, T, K] int64
    logprobs: Tensor  # [N, T, K] float32


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOutputs(_Rowwise):
    """What one forward pass says of the sampled tokens. Parts that nobody asked for are None.

    Float32, 0.0 off the response mask. In training these carry gradients; in scoring they do not.
    """

    logprobs: Tensor  # [N, T] nats, of tokens[:, 1:], at the sampling temperature
    entropy: Tensor | None = None  # [N, T] nats
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Signals(_Rowwise):
    """Scored once per rollout by frozen weights; None unless the algorithm declared the need."""

    old_logprobs: Tensor  # [N, T] the policy before the step's first update; it sampled, unless a rollout was ahead
    ref_logprobs: Tensor | None = None  # [N, T] the reference model
    old_entropy: Tensor | None = None  # [N, T] nats
    old_topk: TopK | None = None
    perturbed_logprobs: Tensor | None = None  # [N, T, K] after K perturbed prompts; NaN where a problem has fewer


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch(_Rowwise):
    """One mini-batch, ready to train on. Rows can be sliced freely: nothing inside depends on the slicing.

    `weights` is the reduction: the loss of the mini-batch is `sum(weights * token_loss)`, whoever computes which rows.
    """

    rollouts: RolloutBatch
    signals: Signals
    advantages: Tensor  # [N, T] float32, masks applied
    weights: Tensor  # [N, T] float32; 0.0 where dropped or padded

    def __post_init__(self) -> None:
        import torch

        shape = tuple(self.rollouts.response_mask.shape)
        _check("TrainBatch", "advantages", self.advantages, shape, torch.float32)
        _check("TrainBatch", "weights", self.weights, shape, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """Unreduced loss of a micro-batch and named per-token quantities worth logging (no gradient needed)."""

    loss: Tensor  # [n, T]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [n, T]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, the same on every rank.

    `metrics` holds the response-token means of `TokenLoss.metrics`; a name that ends in `_max` is maximised instead.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: str | None = None  # why the step was not taken: "non-finite loss" or "non-finite gradient", and where
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One graded response of an evaluation: one line of a records file."""

    question: str
    benchmark: str
    sample: int
    prompt: str
    response: str
    extracted: str | None
    answer: str
    correct: bool
    verdict: str
    tokens: int
    logprob_sum: float  # nats, at temperature 1 under the evaluated model
    truncated: bool
    model: str
    step: int
    schema: int = 2
    lowest_logprobs: tuple[float, ...] | None = None  # of the least likely tokens, ascending; as many as are wanted
    stated_confidence: float | None = None  # in [0, 1], as the model says it, or read from its choice probabilities
