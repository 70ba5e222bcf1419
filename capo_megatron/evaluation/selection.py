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
Floats = NDArray[np.float64]
Method = Literal["sc", "ppl", "pc", "rpc"]

FEWEST_TO_PRUNE = 5  # a mixture of five parameters says nothing of fewer responses
TIE = 1e-12  # relative difference below which two masses are equal: sums of the same numbers in another order
MIXTURE_START = (0.5, 1.0, 1.0, 1.5, 2.0)  # weight, shape 1, scale 1, shape 2, scale 2
WEIGHT_BOUNDS = (0.2, 0.8)
LEAST = 0.01  # that a shape or scale may be
_MOST_STEPS, _MOST_TRIALS = 80, 8  # of a fit, and of a line search
_LONGEST = 3.0  # step of a coordinate, of which one unit is a factor of e
_FLAT, _LEAST_GAIN = 1e-5, 1e-8  # steepest gradient at a maximum; relative gain of a step that is worth another


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


def _probabilities(mean_logprob: ArrayLike) -> Floats:
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
    if there are fewer than five, or if the fit fails. The likelihood of so few points has several maxima; found is the
    one that L-BFGS-B reaches from `MIXTURE_START`, as in the authors' code (github.com/WNJXYK/RPC).
    """
    value = np.asarray(prob, dtype=np.float64)
    if value.ndim != 1 or not ((value >= 0) & (value <= 1)).all():
        raise ShapeError("prob: expected one probability in [0, 1] per response. Log-probs need exp() first.")
    return _keep(value[None], np.ones((1, len(value)), dtype=bool), _fit_alone)[0]


def keep_matrix(prob: Floats, given: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """[Q, N] bool: `rpc_keep` of the rows of [Q, N] probabilities; of those that are `given`, if it is.

    All are fitted at once, many times faster, by BFGS from the same start within the same bounds. Of several maxima it
    may reach another one, mostly a higher one: see examples/metrics.md for how often.
    """
    return _keep(prob, given, _fit_together)


def _keep(prob: Floats, given: NDArray[np.bool_] | None, fit: Callable[..., Floats]) -> NDArray[np.bool_]:
    given = np.ones(prob.shape, dtype=bool) if given is None else given
    count = given.sum(axis=1)
    largest = prob.max(axis=1, initial=-1.0, where=given)
    smallest = prob.min(axis=1, initial=2.0, where=given)
    varied = np.flatnonzero((count >= FEWEST_TO_PRUNE) & (smallest < largest))
    keep, value, given = np.ones(prob.shape, dtype=bool), prob[varied], given[varied]
    mixtures = fit(_log(value), given)
    fitted = np.isfinite(mixtures).all(axis=1, keepdims=True)
    mixtures = np.where(fitted, mixtures, MIXTURE_START)  # any: nothing is dropped by it
    mean = (value * given).sum(axis=1) / np.maximum(count[varied], 1)
    keep[varied] = ~(fitted & (_memberships(value, mixtures) < 0.5) & (value < mean[:, None]))  # NaN keeps
    return keep


def mixture_membership(
    prob: ArrayLike, weight: float, shape_1: float, scale_1: float, shape_2: float, scale_2: float
) -> Floats:
    """[N] probability that each response belongs to the component with the larger mean, scale * Gamma(1 + 1/shape)."""
    value = np.asarray(prob, dtype=np.float64)
    return _memberships(value[None], np.array([[weight, shape_1, scale_1, shape_2, scale_2]]))[0]


def _memberships(value: Floats, mixtures: Floats) -> Floats:
    """[Q, N] probability of the component with the larger mean. `mixtures` [Q, 5] as `MIXTURE_START`."""
    share = _Densities(mixtures, _log(value), np.ones(value.shape, dtype=bool)).share
    shape, scale = mixtures[:, 1::2], mixtures[:, 2::2]
    mean = np.log(scale) + np.vectorize(math.lgamma, otypes=[float])(1 + 1 / shape)
    return np.where(mean[:, :1] >= mean[:, 1:], share[:, 0], share[:, 1])


class _Densities:
    """The two weighted Weibull densities of Q mixtures at N points each, which are `given` by their logarithms [Q, N].

    log(w_c f_c(x)) = log(w_c k_c / s_c) + (k_c - 1) log(x / s_c) - (x / s_c)^k_c
    """

    def __init__(self, mixtures: Floats, logs: Floats, given: NDArray[np.bool_]) -> None:
        self.weight = np.stack([mixtures[:, 0], 1 - mixtures[:, 0]], axis=1)  # [Q, 2], as shape and scale
        self.shape, self.scale = mixtures[:, 1::2], mixtures[:, 2::2]
        self.ratio = logs[:, None] - np.log(self.scale)[:, :, None]  # [Q, 2, N]
        self.power = np.exp(np.minimum(self.shape[:, :, None] * self.ratio, 700.0))
        front = np.log(self.weight * self.shape / self.scale)[:, :, None]
        parts = front + (self.shape[:, :, None] - 1) * self.ratio - self.power
        top = parts.max(axis=1, keepdims=True)
        self.share = np.exp(parts - top)  # [Q, 2, N] of each component
        total = self.share.sum(axis=1, keepdims=True)
        self.share *= given[:, None] / total
        self.nll = -((top + np.log(total))[:, 0] * given).sum(axis=1)  # [Q]

    def gradient(self) -> Floats:
        """[Q, 5] of `nll` in weight, shape 1, scale 1, shape 2, scale 2."""
        by_weight = self.share.sum(axis=2) / self.weight
        by_shape = (self.share * (1 / self.shape[:, :, None] + self.ratio * (1 - self.power))).sum(axis=2)
        by_scale = (self.share * (self.power - 1)).sum(axis=2) * self.shape / self.scale
        columns = (by_weight[:, 0] - by_weight[:, 1], by_shape[:, 0], by_scale[:, 0], by_shape[:, 1], by_scale[:, 1])
        return -np.stack(columns, axis=1)


def _log(value: Floats) -> Floats:
    return np.log(np.maximum(value, 1e-300))


def _bounded(free: Floats) -> tuple[Floats, Floats]:
    """([Q, 5] mixtures within their bounds, their derivatives) for coordinates that may be anything."""
    low, high = WEIGHT_BOUNDS
    sigmoid, above = 1 / (1 + np.exp(-free[:, :1])), np.exp(free[:, 1:])
    mixtures = np.concatenate([low + (high - low) * sigmoid, LEAST + above], axis=1)
    return mixtures, np.concatenate([(high - low) * sigmoid * (1 - sigmoid), above], axis=1)


def _objective(free: Floats, logs: Floats, given: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    mixtures, slope = _bounded(free)
    densities = _Densities(mixtures, logs, given)
    return densities.nll, densities.gradient() * slope


def _fit_alone(logs: Floats, given: NDArray[np.bool_]) -> Floats:
    """[Q, 5] mixtures at a maximum of the likelihood of each row of [Q, N] logarithms; NaN where none was found."""
    from scipy.optimize import minimize  # takes a third of a second to import, and only RPC needs it

    def objective(mixture: Floats, row: Floats, known: NDArray[np.bool_]) -> tuple[float, Floats]:
        densities = _Densities(mixture[None], row, known)
        return float(densities.nll[0]), densities.gradient()[0]

    found = np.full((len(logs), len(MIXTURE_START)), np.nan)
    bounds = [WEIGHT_BOUNDS, *[(LEAST, None)] * (len(MIXTURE_START) - 1)]
    with np.errstate(all="ignore"):  # a line search may leave the range of floats and come back
        for index in range(len(logs)):
            row = logs[index : index + 1], given[index : index + 1]
            best = minimize(objective, MIXTURE_START, row, method="L-BFGS-B", jac=True, bounds=bounds)
            if np.isfinite(best.fun):
                found[index] = best.x
    return found


def _fit_together(logs: Floats, given: NDArray[np.bool_]) -> Floats:
    """[Q, 5] mixtures at a maximum of the likelihood of each row of [Q, N] logarithms that are given.

    BFGS with a backtracking line search, of all rows side by side: a tenth to a hundredth of the time of one by one.
    """
    weight, *others = MIXTURE_START
    low, high = WEIGHT_BOUNDS
    start = [math.log((weight - low) / (high - weight)), *(math.log(value - LEAST) for value in others)]
    point = np.tile(start, (len(logs), 1))
    with np.errstate(all="ignore"):  # a long step may leave the range of floats, and is then shortened
        value, slope = _objective(point, logs, given)
        inverse = np.eye(5) / np.maximum(np.linalg.norm(slope, axis=1), 1.0)[:, None, None]
        going = np.arange(len(logs))
        for _ in range(_MOST_STEPS):
            if not len(going):
                break
            before = point[going], value[going], slope[going]
            after = _line_search(*before, inverse[going], logs[going], given[going])
            inverse[going] = _updated(inverse[going], after[0] - before[0], after[2] - before[2])
            point[going], value[going], slope[going] = after
            gain = before[1] - after[1]
            going = going[(np.abs(after[2]).max(axis=1) > _FLAT) & (gain > _LEAST_GAIN * np.abs(before[1]))]
    return _bounded(point)[0]


def _line_search(
    point: Floats, value: Floats, slope: Floats, inverse: Floats, logs: Floats, given: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """The (point, value, slope) that each row goes to: downhill by Armijo's rule, or nowhere."""
    direction = -np.einsum("qij,qj->qi", inverse, slope)
    fall = (direction * slope).sum(axis=1)
    uphill = ~(fall < 0)
    direction[uphill], fall[uphill] = -slope[uphill], -(slope[uphill] ** 2).sum(axis=1)
    step = np.minimum(1.0, _LONGEST / np.maximum(np.abs(direction).max(axis=1), 1e-30))
    found = point.copy(), value.copy(), slope.copy()
    left = np.arange(len(point))
    for _ in range(_MOST_TRIALS):
        tried = point[left] + step[left, None] * direction[left]
        reached, steepness = _objective(tried, logs[left], given[left])
        good = reached <= value[left] + 1e-4 * step[left] * fall[left]
        for old, new in zip(found, (tried, reached, steepness), strict=True):
            old[left[good]] = new[good]
        left = left[~good]
        step[left] *= 0.3
        if not len(left):
            break
    return found


def _updated(inverse: Floats, moved: Floats, turned: Floats) -> Floats:
    """[Q, 5, 5] BFGS update of inverse Hessians by steps and changes of the gradient; none where it would not fit."""
    curvature = (moved * turned).sum(axis=1)
    fits = curvature > 1e-10
    rho = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=fits)
    image = np.einsum("qij,qj->qi", inverse, turned)
    stretch = rho * (1 + rho * (turned * image).sum(axis=1))
    cross = rho[:, None, None] * image[:, :, None] * moved[:, None, :]
    grown = stretch[:, None, None] * moved[:, :, None] * moved[:, None, :]
    return np.where(fits[:, None, None], inverse + grown - cross - cross.transpose(0, 2, 1), inverse)
