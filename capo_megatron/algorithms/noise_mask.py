"""CAPO's noise mask: leave out answers whose verdict the reference model finds implausible (arXiv 2604.12632)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from capo_megatron.algorithms.counted import Truncated, check_finite, counted_rows, present
from capo_megatron.algorithms.equations import capo_noise_mask, sequence_logprob_mean
from capo_megatron.errors import CheckpointError
from capo_megatron.types import RolloutBatch, Signals

Threshold = float | Literal["quartile"]


class ReferencePerplexityMask:
    """CAPO's noise mask (`equations.capo_noise_mask`) as a TokenMask with memory.

    A threshold is an absolute perplexity, or "quartile": estimated once, on the counted, non-empty responses of the
    first batch that has answers of its class, then frozen (75th percentile of the reference perplexity of correct
    answers for `high`, 25th of wrong ones for `low`, interpolated linearly). Until then that class is kept whole.
    Sees the batch of a whole step, the same on every rank, hence so are the thresholds.
    """

    def __init__(self, high: Threshold = 2.5, low: Threshold = 1.05, truncated: Truncated = "keep") -> None:
        self._given: dict[str, Threshold] = {"ref_high": high, "ref_low": low}
        self._known = {name: float(value) for name, value in self._given.items() if value != "quartile"}
        self._truncated = truncated

    def __call__(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        return self.rows(batch, signals).unsqueeze(1).expand_as(batch.response_mask)

    def rows(self, batch: RolloutBatch, signals: Signals) -> Tensor:
        """[N] bool: keep. Rows without a verdict or without tokens are kept; they train nothing anyway."""
        reference = present(signals.ref_logprobs, "Signals.ref_logprobs")
        check_finite(batch, "ref_logprobs", reference, batch.response_mask)
        mean, answered = sequence_logprob_mean(reference, batch.response_mask)
        judged = answered & counted_rows(batch, self._truncated)
        self._estimate(mean, batch.correct, judged)
        # A threshold that is still unknown removes nothing.
        high, low = self._known.get("ref_high", math.inf), self._known.get("ref_low", math.ulp(0.0))
        return capo_noise_mask(mean, batch.correct, high, low) | ~judged

    def _estimate(self, mean: Tensor, correct: Tensor, judged: Tensor) -> None:
        for name, rows, quantile in (("ref_high", judged & correct, 0.75), ("ref_low", judged & ~correct, 0.25)):
            if name not in self._known and rows.any():
                perplexity = (-mean[rows].double()).clamp(max=700.0).exp()
                self._known[name] = float(perplexity.quantile(quantile))

    def report(self) -> dict[str, float]:
        """The thresholds in force, for the log."""
        return {f"mask/{name}": value for name, value in self._known.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        """The estimated thresholds; configured ones belong to the config."""
        return {name: value for name, value in self._known.items() if self._given[name] == "quartile"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over estimated thresholds. A threshold that the config now gives as a number stays as given."""
        for name, value in state.items():
            if name not in self._given or not (isinstance(value, float | int) and value > 0):
                raise CheckpointError(f"algorithm state reference_mask.{name}={value!r}: expected a perplexity.")
            if self._given[name] == "quartile":
                self._known[name] = float(value)
