"""The proof after a refit that engine and policy are the same model: a few fixed sequences, scored by both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise
from capo_megatron.errors import RolloutError
from capo_megatron.rollout.collect import align
from capo_megatron.rollout.requests import PromptAndResponse, few
from capo_megatron.rollout.sketch import Sketch, differing, same, sketches
from capo_megatron.seams import Policy, PromptSource, RolloutEngine, SamplingParams, Team
from capo_megatron.types import Problem, RolloutBatch, Segment

_TOKENS = 256  # of a response at most: an engine may need a request per token
_LARGEST = 80.0  # nats; exp of more is no float32


class Probe:
    """Sequences on which every refit is proven. Drawn once, from the engine's first weights, and then kept."""

    def __init__(
        self,
        rows: int,
        tolerance: float,
        rounding: float = 1e-5,
        as_held: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]] = iter,
    ) -> None:
        """`rows` responses (0: nothing is proven), and the largest median exp|gap| - 1 that is accepted.

        `rounding` is by how much sketches of equal weights may differ, relative; `as_held` gives the policy's weights
        the values that the engine has of them, where that rounds what it takes.
        """
        self.rows, self.tolerance, self.rounding, self._as_held = rows, tolerance, rounding, as_held
        self._sequences: list[PromptAndResponse] = []
        self._held: dict[int, dict[str, Sketch]] = {}  # by this rank's engine: at first, and at the last two proofs

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
        Raises RolloutError on every rank if versions differ, a gap is not finite, or the median exceeds 1 + tolerance;
        then the weights of both are compared, so that the error says which side has moved.
        """
        if self.rows == 0:
            return {}
        if not self._sequences:
            self._sequences = self._draw(engine, prompts, params, team)
        batch = batch_from_sequences(self._sequences, pad_id, policy.version)
        theirs = policy.score(batch, frozenset()).logprobs[batch.response_mask]
        gaps = gather_or_raise(team, lambda: self._gap(engine, policy, theirs, params.temperature))
        wrong = [rank for rank, (median, _, _) in enumerate(gaps) if median - 1 > self.tolerance]
        if wrong:
            expected = sketches(self._as_held(policy.hf_weights()))
            reasons = gather_or_raise(team, lambda: self._reason(engine, expected, theirs, params.temperature))
            raise RolloutError(self._describe(wrong[0], gaps[wrong[0]], reasons[wrong[0]]))
        self._remember(engine)
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
        found: list[PromptAndResponse] = [
            (problem.prompt_ids, group[0].ids) for problem, group in zip(problems, drawn, strict=True) if group
        ]
        if not found:
            raise RolloutError("rollout.probe_rows: the engine gave up on every probe response. Look at its messages.")
        return found

    def _gap(
        self, engine: RolloutEngine, policy: Policy, theirs: Tensor, temperature: float
    ) -> tuple[float, float, float]:
        """(median, 99th percentile, maximum) of exp|gap|."""
        if engine.version != policy.version:
            raise RolloutError(
                f"the engine holds policy version {engine.version}, the policy is at {policy.version}: the refit did "
                "not run. Call load_weights after every optimizer step."
            )
        ours = torch.tensor(_flat(engine.logprobs(self._sequences, temperature)))
        if not bool((ours.isfinite() & theirs.isfinite()).all()):
            raise RolloutError(
                "refit: log-probs of the probe responses are not finite (engine: "
                f"{int((~ours.isfinite()).sum())}, policy: {int((~theirs.isfinite()).sum())} of {len(ours)} tokens). "
                "The weights hold NaN or infinity: look at the loss and gradient norm of the last steps."
            )
        factor = _factors(ours, theirs)
        median, tail = torch.quantile(factor, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
        return median, tail, float(factor.max())

    def _remember(self, engine: RolloutEngine) -> None:
        first, last = min(self._held, default=engine.version), max(self._held, default=engine.version)
        kept = {version: held for version, held in self._held.items() if version in (first, last)}
        self._held = kept | {engine.version: engine.sketches()}

    def _reason(self, engine: RolloutEngine, expected: Mapping[str, Sketch], theirs: Tensor, temperature: float) -> str:
        """Which side has moved, as far as it can be told."""
        held = engine.sketches()
        wrong = differing(expected, held, self.rounding)
        if wrong:
            for version, before in self._held.items():
                if version != engine.version and not differing(before, held, self.rounding):
                    return f"The engine still has the weights of version {version}: the refit did not reach it."
            return self._misplaced(expected, held, wrong)
        scored = torch.tensor(_flat(engine.logprobs(self._sequences, temperature)))
        engine.forget()
        again = torch.tensor(_flat(engine.logprobs(self._sequences, temperature)))
        if _factors(again, theirs).median() - 1 <= self.tolerance:
            return (
                "The weights are equal, and so are the log-probs once the engine has forgotten its prefix cache: that "
                "held keys and values of older weights. It has to be reset after every refit."
            )
        unscaled = torch.tensor(_flat(engine.logprobs(self._sequences, 1.0)))
        if temperature not in (0.0, 1.0) and torch.allclose(scored, unscaled, atol=1e-6):
            return (
                f"The weights are equal, but the engine's log-probs are those at temperature 1, not {temperature:g}: "
                "it reports them before it applies the temperature."
            )
        return (
            "The weights are equal, so it is what is computed with them: compare rope_theta, rms_norm_eps, "
            "tie_word_embeddings and dtype of both; only if a gap of this size is expected (low precision), raise "
            "rollout.probe_tolerance."
        )

    def _misplaced(self, expected: Mapping[str, Sketch], held: Mapping[str, Sketch], wrong: Sequence[str]) -> str:
        swapped = [
            f"{name} is what the policy has as {other}"
            for name in wrong
            for other in wrong
            if other != name and same(held[name], expected[other], self.rounding)
        ]
        if swapped:
            return f"The engine has weights in the wrong places: {few(swapped)}."
        gone = [name for name in wrong if held[name][2] == 0]
        what = f" ({few(gone)} all zero)" if gone else ""
        return (
            f"The engine holds other values than the policy in {len(wrong)} of {len(expected)} tensors: "
            f"{few(wrong)}{what}. The refit left them out, or changed them."
        )

    def _describe(self, rank: int, gap: tuple[float, float, float], reason: str) -> str:
        median, tail, largest = gap
        return (
            f"rollout.probe_tolerance={self.tolerance}: after the refit, engine and policy give the sampled tokens "
            f"probabilities that differ by a factor of {median:.4g} in the median, {tail:.4g} at the 99th percentile, "
            f"{largest:.4g} at most (rank {rank}, {len(self._sequences)} probe responses). Sampling would not follow "
            f"the policy. {reason}"
        )


def _factors(ours: Tensor, theirs: Tensor) -> Tensor:
    """exp|gap| in float64 of two rows of log-probs."""
    return (ours.double() - theirs.double()).abs().clamp_max(_LARGEST).exp()


def _flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


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
