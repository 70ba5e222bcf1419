"""The proof after a refit that engine and policy are the same model: a few fixed sequences, scored by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise
from capo_megatron.errors import RolloutError
from capo_megatron.rollout.collect import align
from capo_megatron.rollout.requests import PromptAndResponse
from capo_megatron.seams import Policy, PromptSource, RolloutEngine, SamplingParams, Team
from capo_megatron.types import Problem, RolloutBatch, Segment

_TOKENS = 256  # of a response at most: an engine may need a request per token
_LARGEST = 80.0  # nats; exp of more is no float32


class Probe:
    """Sequences on which every refit is proven. Drawn once, from the engine's first weights, and then kept."""

    def __init__(self, rows: int, tolerance: float) -> None:
        """`rows` responses (0: nothing is proven), and the largest median exp|gap| - 1 that is accepted."""
        self.rows, self.tolerance = rows, tolerance
        self._sequences: list[PromptAndResponse] = []

    def prove(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: PromptSource,
        params: SamplingParams,
        team: Team,
        pad_id: int,
    ) -> dict[str, float]:
        """The gap between the log-probs of engine and policy, the worst of all ranks' engines. Collective.

        gap = log-prob by the engine - log-prob by the policy, per response token, at `params.temperature`; logged are
        "refit/gap_median", "refit/gap_p99" and "refit/gap_max" of exp|gap|, which is 1 for equal models.
        Raises RolloutError on every rank if versions differ, a gap is not finite, or the median exceeds 1 + tolerance.
        """
        if self.rows == 0:
            return {}
        if not self._sequences:
            self._sequences = self._draw(engine, prompts, params, team)
        batch = batch_from_sequences(self._sequences, pad_id, policy.version)
        theirs = policy.score(batch, frozenset()).logprobs[batch.response_mask]
        gaps = gather_or_raise(team, lambda: self._gap(engine, policy, theirs, params.temperature))
        for rank, gap in enumerate(gaps):
            self._judge(rank, gap)
        worst = torch.tensor(gaps).amax(dim=0).tolist()
        return dict(zip(("refit/gap_median", "refit/gap_p99", "refit/gap_max"), worst, strict=True))

    def _draw(
        self, engine: RolloutEngine, prompts: PromptSource, params: SamplingParams, team: Team
    ) -> list[PromptAndResponse]:
        """Responses of the first engine to the problems that come next, which the source then gives once more."""
        before = prompts.state_dict()
        problems = prompts.take(self.rows)
        prompts.load_state_dict(before)
        first = engine.share[0] == 0  # every rank of an engine has to take part
        short = replace(params, max_tokens=min(params.max_tokens, _TOKENS))
        drawn = gather_or_raise(team, lambda: engine.generate(problems, 1, short) if first else None)[0]
        assert drawn is not None, "rank 0 belongs to the first engine"
        return [(problem.prompt_ids, group[0].ids) for problem, group in zip(problems, drawn, strict=True)]

    def _gap(
        self, engine: RolloutEngine, policy: Policy, theirs: Tensor, temperature: float
    ) -> tuple[float, float, float]:
        """(median, 99th percentile, maximum) of exp|gap|."""
        if engine.version != policy.version:
            raise RolloutError(
                f"the engine holds policy version {engine.version}, the policy is at {policy.version}: the refit did "
                "not run. Call load_weights after every optimizer step."
            )
        scored = engine.logprobs(self._sequences, temperature)
        ours = torch.tensor([value for response in scored for value in response])
        if not bool((ours.isfinite() & theirs.isfinite()).all()):
            raise RolloutError(
                "refit: log-probs of the probe responses are not finite (engine: "
                f"{int((~ours.isfinite()).sum())}, policy: {int((~theirs.isfinite()).sum())} of {len(ours)} tokens). "
                "The weights hold NaN or infinity: look at the loss and gradient norm of the last steps."
            )
        factor = (ours.double() - theirs.double()).abs().clamp_max(_LARGEST).exp()
        median, tail = torch.quantile(factor, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
        return median, tail, float(factor.max())

    def _judge(self, rank: int, gap: tuple[float, float, float]) -> None:
        median, tail, largest = gap
        if median - 1 <= self.tolerance:
            return
        raise RolloutError(
            f"rollout.probe_tolerance={self.tolerance}: after the refit, engine and policy give the sampled tokens "
            f"probabilities that differ by a factor of {median:.4g} in the median, {tail:.4g} at the 99th percentile, "
            f"{largest:.4g} at most (rank {rank}, {len(self._sequences)} probe responses). Sampling would not follow "
            "the policy. Compare rope_theta, rms_norm_eps, tie_word_embeddings and dtype of both; only if a gap of "
            "this size is expected (low precision), raise rollout.probe_tolerance."
        )


def batch_from_sequences(sequences: Sequence[PromptAndResponse], pad_id: int, version: int = 0) -> RolloutBatch:
    """A batch that `Policy.score` accepts of (prompt ids, response ids), one problem per row, nothing graded."""
    tokens, mask = align(sequences, pad_id)
    rows, zeros = len(sequences), torch.zeros(len(sequences))
    return RolloutBatch(
        problems=tuple(
            Problem(id=f"probe-{row}", prompt="", prompt_ids=tuple(prompt), answer="")
            for row, (prompt, _) in enumerate(sequences)
        ),
        tokens=tokens,
        response_mask=mask,
        segment=mask.to(torch.uint8) * Segment.REASONING,
        group=torch.arange(rows),
        rewards={"reward": zeros, "correct": zeros},
        gradable=torch.zeros(rows, dtype=torch.bool),
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape, dtype=torch.float32),
        policy_version=version,
    )
