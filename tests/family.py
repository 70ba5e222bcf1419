"""Steps that hold whatever any algorithm reads, and every algorithm with options that make it do its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capo_megatron.algorithms import (
    CapoConfig,
    CdeConfig,
    CodapoConfig,
    DapoConfig,
    DcpoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ScapoConfig,
    SimkoConfig,
    SurrogateConfig,
)
from capo_megatron.seams import Algorithm
from capo_megatron.types import PolicyOutputs, Problem, RolloutBatch, Segment, Signals, TopK
from tests.rollouts import make_batch

VOCABULARY, TOP = 6, 3

PLAIN: dict[str, SurrogateConfig] = {
    "capo": CapoConfig(),
    "grpo": GrpoConfig(),
    "dr_grpo": DrGrpoConfig(length=20),
    "dapo": DapoConfig(overlong_buffer=3, max_length=5),
    "gspo": GspoConfig(),
    "codapo": CodapoConfig(),
    "cde": CdeConfig(),
    "simko": SimkoConfig(quantile=0.5, alpha=0.3),
    "dcpo": DcpoConfig(),
    "scapo": ScapoConfig(credit=0.5),
}
VARIANTS: dict[str, SurrogateConfig] = PLAIN | {
    "capo_pairs": CapoConfig(mask_scope="pairs", norm="group"),
    "capo_mass": CapoConfig(norm="mass", weight_floor=0.2),
    "capo_penalty": CapoConfig(beta=0.1, kl_in="reward"),
    "capo_sequence": CapoConfig(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "grpo_masked": GrpoConfig(mask="on"),
    "grpo_penalty": GrpoConfig(beta=0.1, kl_in="reward"),
    "dcpo_penalty": DcpoConfig(beta=0.1, kl_in="reward", distance="square", group_share=1.0),
}


def step(
    lengths: Sequence[int],
    correct: Sequence[int],
    group: Sequence[int],
    *,
    confidence: Sequence[float] | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[RolloutBatch, Signals]:
    """Rows as in `make_batch`, each ending with a token of confidence, and every signal there is.

    Random numbers that depend on the row alone, not on the width. Problem 1 has one perturbed prompt, others two.
    """
    random = torch.Generator().manual_seed(seed)
    stated = torch.rand(len(lengths), generator=random) if confidence is None else torch.tensor(confidence)
    batch = make_batch(lengths, correct, group, extra={"confidence": stated.float()}, **options)
    mask, shape = batch.response_mask, batch.response_mask.shape
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    sampled = torch.randint(VOCABULARY, (len(lengths), shape[1] + 1), generator=random)

    def logprobs() -> Tensor:
        return -torch.rand(shape, generator=random) * mask

    old, reference, perturbed = logprobs(), 2 * logprobs(), torch.stack([logprobs(), logprobs()], dim=2)
    perturbed[batch.group == 1, :, 1] = float("nan")
    engine = old + 0.1 * logprobs()
    segment = torch.where(last, Segment.CONFIDENCE, Segment.REASONING).to(torch.uint8) * mask
    problems = tuple(Problem(f"problem-{index}", "", (1, 2), "") for index in range(max(group, default=0) + 1))
    batch = replace(batch, tokens=sampled, segment=segment, sampler_logprobs=engine, problems=problems)
    return batch, Signals(old, reference, perturbed_logprobs=perturbed)


def uneven(**options: Any) -> tuple[RolloutBatch, Signals]:
    """Groups of 5, 3 (all right), 2 (all wrong), 1, 4 rows, interleaved; one row empty, one ungradable, one cut."""
    group = [0, 4, 1, 0, 2, 0, 3, 4, 1, 0, 2, 4, 0, 1, 4]
    correct = [1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0]
    lengths = [2, 5, 3, 4, 1, 0, 3, 2, 4, 3, 5, 1, 2, 5, 3]
    gradable, truncated = [1] * 15, [0] * 15
    gradable[12], truncated[1] = 0, 1
    return step(lengths, correct, group, gradable=gradable, truncated=truncated, **options)


def advantages(algorithm: Algorithm, batch: RolloutBatch, scored: Signals) -> Tensor:
    """What the trainer does: the estimator's advantages times every mask."""
    result = algorithm.estimator(batch, scored)
    for mask in algorithm.masks:
        result = result * mask(batch, scored)
    return result


def current(batch: RolloutBatch, scored: Signals, seed: int = 1) -> PolicyOutputs:
    """A policy that has moved a little: log-probs as leaves, entropies and top K that depend on them."""
    random = torch.Generator().manual_seed(seed)
    mask = batch.response_mask
    logprobs = (scored.old_logprobs + 0.5 * torch.randn(mask.shape, generator=random) * mask).requires_grad_()
    entropy = torch.rand(mask.shape, generator=random) * mask + 0.1 * logprobs.square()
    ids = torch.rand(*mask.shape, VOCABULARY, generator=random).argsort(dim=2)[..., :TOP]
    top = logprobs.unsqueeze(2) * torch.tensor([0.5, 1.0, 2.0])
    return PolicyOutputs(logprobs, entropy, TopK(ids, top))


def wider(part: Any, columns: int = 3) -> Any:
    """A batch or signals with more padding on the right."""
    return part._map(lambda value: _pad(value, columns) if value.ndim > 1 else value)


def _pad(value: Tensor, columns: int) -> Tensor:
    sides = (0, 0) * (value.ndim - 2) + (0, columns)
    return torch.nn.functional.pad(value, sides, value=0)
