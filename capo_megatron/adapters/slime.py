"""CAPO in slime (written against THUDM/slime 0.3.1 at commit 624b824a898a): a custom advantage function.

    train.py ... --custom-advantage-function-path capo_megatron.adapters.slime.compute_advantages \
        --custom-config-path capo.yaml --use-kl-loss --kl-loss-coef 0 --ref-load ...

    capo.yaml, any of CapoOptions with a prefix:     {capo_tau: 0.6, capo_ref_high: 2.5, capo_ref_low: 1.05}

**What slime hands over.** `compute_advantages(args, rollout_data)` runs on every rank of the last pipeline stage, with
lists that have one item per sample of this data-parallel rank: `log_probs` (or, with --use-rollout-logprobs,
`rollout_log_probs`) and `ref_log_probs`, of this context-parallel rank's tokens, and `loss_masks` over the whole
response. slime deals samples to data-parallel ranks by length, so a group is spread over them: sums per sample are
gathered over the data- and context-parallel ranks. The group is `sample_indices // n_samples_per_prompt`, as slime's
data source counts; the reward is `local_raw_reward`, since `rewards` are normalised already.

slime has `ref_log_probs` only with --use-kl-loss (or --kl-coef) and a --ref-load; and it leaves `log_probs` out when
it makes one optimizer step per rollout: add --use-rollout-logprobs or --get-mismatch-metrics then.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capo_megatron.adapters import CapoOptions, MissingTrainerError, row_advantages
from capo_megatron.errors import ConfigError, ShapeError

COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
_PREFIX = "capo_"


class Part(NamedTuple):
    """What one rank knows of one sample: sums over the tokens it holds."""

    sample: int
    reward: float
    tokens: int
    logprob: float
    reference: float


def compute_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns` in `rollout_data`: per sample of this rank a tensor over the tokens it holds.

    Collective over the data- and context-parallel ranks of a pipeline stage. Raises ConfigError if slime's arguments
    leave out what CAPO needs or contradict it, ShapeError if `rollout_data` is not as described above.
    """
    options = _options(args)
    own = _logprobs(args, rollout_data)
    parts = _local_parts(options, own, rollout_data)
    every = _gather(parts)
    advantage = sample_advantages(options, every, args.n_samples_per_prompt)
    advantages = [torch.full_like(row, advantage[part.sample]) for row, part in zip(own, parts, strict=True)]
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [row.clone() for row in advantages]


def sample_advantages(options: CapoOptions, parts: Sequence[Part], group_size: int) -> dict[int, float]:
    """Sample index -> advantage, from the parts of all ranks in any order."""
    whole: dict[int, Part] = {}
    for part in parts:
        seen = whole.get(part.sample, part._replace(tokens=0, logprob=0.0, reference=0.0))
        whole[part.sample] = seen._replace(
            tokens=seen.tokens + part.tokens,
            logprob=seen.logprob + part.logprob,
            reference=seen.reference + part.reference,
        )
    rows = [whole[sample] for sample in sorted(whole)]
    tokens = torch.tensor([row.tokens for row in rows])
    count = tokens.clamp(min=1)
    means, references = (
        torch.tensor(sums, dtype=torch.float64) / count
        for sums in ([row.logprob for row in rows], [row.reference for row in rows])
    )
    reward = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    group = torch.tensor([row.sample // group_size for row in rows], dtype=torch.long)
    every, _ = row_advantages(options, means, tokens > 0, reward, group, references)
    return {row.sample: value for row, value in zip(rows, every.tolist(), strict=True)}


def _options(args: Namespace) -> CapoOptions:
    given = {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    options = CapoOptions.of(given, "--custom-config-path")
    if args.normalize_advantages:
        raise ConfigError("--normalize-advantages: would whiten CAPO's advantages. Leave it out.")
    if args.kl_coef != 0:
        raise ConfigError(f"--kl-coef {args.kl_coef}: CAPO's advantages do not see it. Use --kl-loss-coef.")
    return options


def _logprobs(args: Namespace, data: dict[str, Any]) -> list[Tensor]:
    name = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if not data.get(name):
        raise ConfigError(
            f"{name}: slime has left them out. Add --get-mismatch-metrics (the trainer scores again) or "
            "--use-rollout-logprobs (the engine's)."
        )
    return data[name]


def _local_parts(options: CapoOptions, own: Sequence[Tensor], data: dict[str, Any]) -> list[Part]:
    reference = data.get("ref_log_probs")
    if options.mask == "on" and not reference:
        raise ConfigError(
            "ref_log_probs: slime has left them out, and the noise mask needs them. Add --use-kl-loss --kl-loss-coef 0 "
            "--ref-load, or set capo_mask: off."
        )
    if "local_raw_reward" not in data or None in data["sample_indices"]:
        raise ShapeError("rollout_data: local_raw_reward or a sample index is missing; CAPO groups samples by index.")
    if len(set(data["sample_indices"])) != len(own):
        raise ShapeError("sample_indices: one occurs twice. CAPO takes one training sample per rollout, not several.")
    masks = _local_masks(data)
    rows = zip(data["sample_indices"], data["local_raw_reward"], own, reference or own, masks, strict=True)
    return [
        Part(int(sample), float(reward), int(mask.sum()), _sum(logprob, mask), _sum(ref, mask))
        for sample, reward, logprob, ref, mask in rows
    ]


def _sum(logprob: Tensor, mask: Tensor) -> float:
    return logprob.detach()[mask.bool()].double().sum().item()


def _local_masks(data: dict[str, Any]) -> list[Tensor]:
    """The loss masks of the tokens that this context-parallel rank holds."""
    mpu = _import("megatron.core").parallel_state
    masks: list[Tensor] = data["loss_masks"]
    if mpu.get_context_parallel_world_size() == 1:
        return masks
    slice_mask = _import("slime.backends.megatron_utils.cp_utils").slice_log_prob_with_cp
    lengths = zip(masks, data["total_lengths"], data["response_lengths"], strict=True)
    return [slice_mask(mask, total, response) for mask, total, response in lengths]


def _gather(parts: list[Part]) -> list[Part]:
    """The parts of all ranks that hold samples of this step."""
    mpu = _import("megatron.core").parallel_state
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, [tuple(part) for part in parts], group=group)
    return [Part(*row) for rows in found for row in rows]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingTrainerError(
            f"{name} cannot be imported ({error}). The adapter is for github.com/THUDM/slime at {COMMIT[:12]}."
        ) from error
