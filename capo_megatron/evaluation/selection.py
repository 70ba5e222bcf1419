"""Choosing one answer among a question's N samples: self-consistency, perplexity, perplexity consistency, and RPC.

Zhou et al., "Bridging Internal Probability and Self-Consistency for Effective and Efficient LLM Reasoning",
arXiv 2502.00511. With p = exp(mean log-prob per token) of a response:

    sc   mass of an answer = number of responses that give it
    ppl  mass = largest p among them
    pc   mass = sum of p over distinct completions that give it
    rpc  the same sum over the completions that survive pruning: see `rpc_keep`

A response from which no answer could be read has `None` as its answer: it cannot win. Answers are compared as they are;
`cluster_answers` makes equal what a predicate calls equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capo_megatron.errors import ConfigError, ShapeError

Answer = TypeVar("Answer", bound=Hashable)
Method = Literal["sc", "ppl", "pc", "rpc"]

FEWEST_TO_PRUNE = 5  # a mixture of five parameters says nothing of fewer responses
TIE = 1e-12  # relative difference below which two masses are equal: sums of the same numbers in another order
MIXTURE_START = (0.5, 1.0, 1.0, 1.5, 2.0)  # weight, shape 1, scale 1, shape 2, scale 2
MIXTURE_BOUNDS = ((0.2, 0.8), (0.01, None), (0.01, None), (0.01, None), (0.01, None))


def cluster_answers(answer: Sequence[Answer | None], equal: Callable[[Answer, Answer], bool]) -> list[Answer | None]:
    """Each answer replaced by the first one of its cluster; None stays None.

    Answers that `equal` calls equal share a cluster, and so do those connected through others (union-find).
    """
    distinct = list(dict.fromkeys(item for item in answer if item is not None))
    parent = list(range(len(distinct)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for later in range(len(distinct)):
        for earlier in range(later):
            low, high = sorted((root(earlier), root(later)))
            if low != high and equal(distinct[earlier], distinct[later]):
                parent[high] = low
    first = {item: distinct[root(index)] for index, item in enumerate(distinct)}
    return [None if item is None else first[item] for item in answer]


def answer_mass(
    answer: Sequence[Answer | None],
    mean_logprob: ArrayLike,
    completion_id: Sequence[Hashable],
    method: Method = "pc",
) -> dict[Answer, float]:
    """Answer -> mass, in order of first appearance.

    `mean_logprob` [N] nats per token, NaN for a response without one (it has mass only in sc); `completion_id` [N] the
    text or token ids of each response: equal completions count once in pc and rpc, with the first one's p. Divide by
    the number of responses (sc) or the total mass (pc, rpc) for the share, which serves as confidence.
    """
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r}: unknown. Choose one of {', '.join(get_args(Method))}.")
    prob = _probabilities(mean_logprob)
    if not len(answer) == len(prob) == len(completion_id):
        raise ShapeError(
            f"answer, mean_logprob, completion_id: {len(answer)}, {len(prob)} and {len(completion_id)} rows; "
            "they must be equal in number."
        )
    keep = rpc_keep(prob) if method == "rpc" else np.ones(len(prob), dtype=bool)
    parts: dict[Answer, dict[Hashable, float]] = {}
    for row, item in enumerate(answer):
        if item is None:
            continue
        own = parts.setdefault(item, {})
        key = completion_id[row] if method in ("pc", "rpc") else row
        own.setdefault(key, 1.0 if method == "sc" else float(prob[row] * keep[row]))
    combine = max if method == "ppl" else math.fsum
    return {item: combine(own.values()) for item, own in parts.items()}


def _probabilities(mean_logprob: ArrayLike) -> NDArray[np.float64]:
    """exp(mean log-prob), 0.0 for NaN. Raises ShapeError above 0 nats, but for rounding."""
    logs = np.asarray(mean_logprob, dtype=np.float64)
    if (logs > 1e-3).any():
        row = int((logs > 1e-3).argmax())
        raise ShapeError(f"mean_logprob: {logs[row]} in row {row}; log-probs are at most 0.")
    return np.nan_to_num(np.exp(np.minimum(logs, 0.0)), nan=0.0)


def select_answer(
    answer: Sequence[Answer | None],
    mean_logprob: ArrayLike,
    completion_id: Sequence[Hashable],
    method: Method = "pc",
) -> list[Answer]:
    """The answers with the largest mass, in order of first appearance; several on a tie, none if nobody answered.

    See `answer_mass` for the arguments and `expected_accuracy` for rating a tie.
    """
    mass = answer_mass(answer, mean_logprob, completion_id, method)
    top = max(mass.values(), default=0.0)
    return [item for item, value in mass.items() if math.isclose(value, top, rel_tol=TIE)]


def expected_accuracy(winners: Sequence[Answer], is_correct: Callable[[Answer], bool]) -> float:
    """Share of the tied winners that are right: the expectation of a random pick. 0 if nobody answered."""
    return sum(bool(is_correct(item)) for item in winners) / len(winners) if len(winners) else 0.0


# --- pruning --------------------------------------------------------------------------------------------------------


def rpc_keep(prob: ArrayLike) -> NDArray[np.bool_]:
    """[N] bool: responses that RPC's pruning keeps, given each one's p = exp(mean log-prob).

    A mixture of two Weibull distributions is fitted to p by maximum likelihood. A response is dropped iff it belongs
    rather to the component with the smaller mean and p is below the mean of all. Nothing is dropped if all p are equal,
    if there are fewer than five, or if the fit fails.
    """
    value = np.asarray(prob, dtype=np.float64)
    if value.ndim != 1 or not ((value >= 0) & (value <= 1)).all():
        raise ShapeError("prob: expected one probability in [0, 1] per response. Log-probs need exp() first.")
    if len(value) < FEWEST_TO_PRUNE or value.min() == value.max():
        return np.ones(len(value), dtype=bool)
    fitted = _fit_mixture(value)
    if fitted is None:
        return np.ones(len(value), dtype=bool)
    high = mixture_membership(value, *fitted)
    return ~((high < 0.5) & (value < value.mean()))  # NaN keeps


def mixture_membership(
    prob: ArrayLike, weight: float, shape_1: float, scale_1: float, shape_2: float, scale_2: float
) -> NDArray[np.float64]:
    """[N] probability that each response belongs to the component with the larger mean, scale * Gamma(1 + 1/shape)."""
    value = np.asarray(prob, dtype=np.float64)
    parts = _Components(np.array([weight, shape_1, scale_1, shape_2, scale_2]), _log(value)).parts
    share = np.exp(parts[0] - np.logaddexp(parts[0], parts[1]))
    first_is_high = math.log(scale_1) + math.lgamma(1 + 1 / shape_1) >= math.log(scale_2) + math.lgamma(1 + 1 / shape_2)
    return share if first_is_high else 1 - share


class _Components:
    """The two weighted Weibull densities at N points, given the points' logarithms.

    log(w_c f_c(x)) = log(w_c k_c / s_c) + (k_c - 1) log(x / s_c) - (x / s_c)^k_c
    """

    def __init__(self, params: NDArray[np.float64], logs: NDArray[np.float64]) -> None:
        self.weight = np.array([[params[0]], [1 - params[0]]])
        self.shape, self.scale = params[1::2, None], params[2::2, None]
        self.ratio = logs - np.log(self.scale)  # [2, N]
        self.power = np.exp(np.minimum(self.shape * self.ratio, 700.0))
        self.parts = np.log(self.weight * self.shape / self.scale) + (self.shape - 1) * self.ratio - self.power


def _log(value: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(np.maximum(value, 1e-300))


def _fit_mixture(value: NDArray[np.float64]) -> tuple[float, ...] | None:
    """(weight, shape 1, scale 1, shape 2, scale 2) at a maximum of the likelihood, or None if none was found."""
    from scipy.optimize import minimize  # takes a third of a second to import, and only RPC needs it

    with np.errstate(all="ignore"):  # a line search may leave the range of floats and come back
        found = minimize(
            _mixture_nll, MIXTURE_START, (_log(value),), method="L-BFGS-B", jac=True, bounds=MIXTURE_BOUNDS
        )
    return tuple(map(float, found.x)) if np.isfinite(found.x).all() and np.isfinite(found.fun) else None


def _mixture_nll(params: NDArray[np.float64], logs: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Negative log-likelihood of the mixture at points with these logarithms, and its gradient."""
    c = _Components(params, logs)
    total = np.logaddexp(c.parts[0], c.parts[1])
    share = np.exp(c.parts - total)
    by_weight = share.sum(axis=1) / c.weight[:, 0]
    by_shape = (share * (1 / c.shape + c.ratio * (1 - c.power))).sum(axis=1)
    by_scale = (share * (c.power - 1) * c.shape / c.scale).sum(axis=1)
    gradient = [by_weight[0] - by_weight[1], by_shape[0], by_scale[0], by_shape[1], by_scale[1]]
    return -float(total.sum()), -np.array(gradient)
