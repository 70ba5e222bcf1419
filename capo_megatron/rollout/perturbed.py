"""The policy's log-probs of the same responses after other wordings of their problems (SCAPO's credit)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from capo_megatron.rollout.collect import align
from capo_megatron.seams import Policy
from capo_megatron.types import RolloutBatch


def perturbed_logprobs(policy: Policy, batch: RolloutBatch, pad_id: int) -> Tensor:
    """[N, T, K] log-probs of each response's tokens after its problem's k-th perturbed prompt, aligned with `batch`.

    K is the largest number of `Problem.perturbed` prompts in the batch; NaN where a problem has fewer, 0.0 off the
    response mask. Prompts differ in length: a token keeps its column, whatever column it had for the policy.
    One teacher-forced pass per k. Collective.
    """
    wordings = [batch.problems[group].perturbed for group in batch.group.tolist()]
    most = max((len(prompts) for prompts in wordings), default=0)
    found = torch.zeros(*batch.response_mask.shape, most)
    for k in range(most):
        has = torch.tensor([len(prompts) > k for prompts in wordings])
        found[~has, :, k] = float("nan")
        rows = torch.nonzero(has).flatten()
        prompts = [wordings[row][k] for row in rows.tolist()]
        mask = batch.response_mask[rows]
        scored, where = _score(policy, batch.slice(rows), prompts, pad_id)
        values = torch.zeros(mask.shape)
        values[mask] = scored[where]  # both list the responses' tokens row by row
        found[rows, :, k] = values
    return found


def _score(policy: Policy, batch: RolloutBatch, prompts: list[tuple[int, ...]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(log-probs, response mask) of the batch's responses behind `prompts`, one per row."""
    responses = [row[1:][mask].tolist() for row, mask in zip(batch.tokens, batch.response_mask, strict=True)]
    tokens, mask = align(list(zip(prompts, responses, strict=True)), pad_id)
    zeros = torch.zeros(mask.shape)
    moved = replace(batch, tokens=tokens, response_mask=mask, segment=mask.to(torch.uint8), sampler_logprobs=zeros)
    return policy.score(moved, frozenset()).logprobs, mask
