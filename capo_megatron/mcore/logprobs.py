"""Log-probs, entropy and top-k of target tokens, straight from hidden states and the vocabulary-sharded head weight.

    z = hidden @ weight.T / temperature          logits over the true vocabulary
    log p(y) = z_y - logsumexp(z)                H = -sum_j p_j log p_j          top-k: the k largest log p_j

The [tokens, vocabulary] logits never exist. They are made in *tiles*: all tokens times a slice of the vocabulary.
Forward keeps a running maximum and sum per token (the online softmax), which merge over tiles and over tensor-parallel
ranks by the same rule. Backward makes each tile anew, or finds it among the few that memory allowed to keep, turns it
into the gradient of the logits, and finishes that slice of the weight's gradient in a single matrix product. So nothing
is accumulated over tiles but the gradient of `hidden`, in float32, and the gradient of a bfloat16 weight is as exact as
that of one plain product, without a float32 copy of it: the reason to slice the vocabulary rather than the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from capo_megatron.errors import ConfigError, ShapeError
from capo_megatron.types import PolicyOutputs, TopK

_SMALL_COLUMNS = 1024  # [M, 1024] float32 are always granted: about what one layer keeps for backward
_NARROWEST = 256  # columns of a tile: narrower products waste the processor
_ALIGNMENT = 128  # columns: tensor cores and vector units want even strides
_CPU_NUMBERS = 1 << 22  # of a tile: on CPU it is worked on several times and should stay in the last-level cache


def target_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
    top_k: int = 0,
) -> PolicyOutputs:
    """Log-probs of `targets`, and if asked the entropy and the `top_k` most likely tokens, of M positions.

    hidden   [M, H] float32, float64, bfloat16 or float16: what enters the output layer at the M positions
    weight   [padded vocabulary / ranks, H], same dtype: this rank's rows of the head; shards lie in rank order
    targets  [M] int64, ids over the whole vocabulary; the same on every rank of `group`, like M itself

    Returns flat `PolicyOutputs`: logprobs [M], entropy [M] or None, topk ids and logprobs [M, top_k] or None, in nats
    at `temperature`, the same bits on every rank of `group` (the tensor-parallel ranks; None = not sharded). Among
    equally likely tokens the lowest id comes first. Rows of the head at or beyond `vocab_size` are padding and have no
    probability, unlike in Megatron's own loss.

    Precision: the matrix product yields the model's dtype, as in Megatron's forward, and everything after it is
    float32 (float64 for float64). On CPU, where bfloat16 products can be 20 times slower than float32 ones, the
    product is taken in float32 and then rounded to the model's dtype.

    Gradients flow from all three outputs to `hidden` and `weight`; work for outputs without a gradient is skipped. The
    gradient of `hidden` is this rank's PARTIAL sum, over its own vocabulary shard. The caller adds the shards up by
    having fed `hidden` through `copy_to_tensor_model_parallel_region` (its backward all-reduces) or the
    sequence-parallel gather (its backward reduce-scatters). Without gradients nothing is kept.

    Memory beyond inputs, outputs and gradients: at most `chunk_tokens` rows of this rank's logits in float32 (or
    [M, 1024], if that is more). Usually half or more of it stays from forward to backward and saves that share of the
    recomputation: more `chunk_tokens` is faster, all of M recomputes little. Half-precision products and the top-k
    need a tile or two besides.

    Raises ShapeError for inputs that do not fit together or a target outside [0, vocab_size), ConfigError for a
    temperature that is not positive.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    _check(hidden, weight, targets, vocab_size, top_k, ranks)
    if not temperature > 0:
        raise ConfigError(
            f"temperature: {temperature} gives no log-probs, only values > 0 do. Use the temperature of sampling, or 1."
        )
    first = rank * weight.shape[0]
    rows = min(max(vocab_size - first, 0), weight.shape[0])
    width, kept = _tiling(hidden.shape[0], rows, chunk_tokens, 2 if entropy or top_k else 1, hidden.device)
    head = _Head(first, rows, vocab_size, temperature, entropy, top_k, group if ranks > 1 else None, width, kept)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        logprobs, spread, ids, top = _TargetOutputs.apply(hidden, weight, targets, head)
        return PolicyOutputs(logprobs, spread, TopK(ids, top) if top_k else None)
    return _outputs(hidden, weight, targets, head._replace(kept=0), [])[0]


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, top_k: int, ranks: int) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ShapeError(
            f"hidden: {tuple(hidden.shape)} {hidden.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype},"
            " expected [M, H] and [vocabulary, H] of one dtype."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ShapeError(
            f"targets: {tuple(targets.shape)} {targets.dtype}, expected ({hidden.shape[0]},) int64, one per position."
        )
    if weight.shape[0] * ranks < vocab_size:
        raise ShapeError(f"weight: {ranks} x {weight.shape[0]} rows are fewer than the vocabulary of {vocab_size}.")
    if not 0 <= top_k <= vocab_size:
        raise ShapeError(f"top_k: {top_k}, expected 0 (off) to the vocabulary of {vocab_size}.")
    if targets.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(targets)).tolist()
    if low < 0 or high >= vocab_size:
        wrong = int(((targets < 0) | (targets >= vocab_size)).nonzero()[0])
        raise ShapeError(f"targets: id {int(targets[wrong])} at position {wrong} is outside [0, {vocab_size}).")


class _Head(NamedTuple):
    """What one call asks of this rank's rows of the head, and how it goes about it."""

    first: int  # global id of the first row
    rows: int  # rows that are no padding; 0 on a rank that holds padding only
    vocab_size: int
    temperature: float
    entropy: bool
    top_k: int
    group: dist.ProcessGroup | None
    width: int  # rows of a tile
    kept: int  # tiles whose logits stay from forward to backward, from the first on

    def tiles(self) -> list[slice]:
        return [slice(start, min(start + self.width, self.rows)) for start in range(0, self.rows, self.width)]


def _tiling(tokens: int, rows: int, chunk_tokens: int, buffers: int, device: torch.device) -> tuple[int, int]:
    """Rows of a tile, and how many tiles can be kept; `buffers` [tokens, width] are in use at one time."""
    budget = max(chunk_tokens * rows, _SMALL_COLUMNS * tokens)
    numbers = budget // (4 * buffers)
    if device.type == "cpu":
        numbers = min(numbers, _CPU_NUMBERS)
    width = max(numbers // max(1, tokens), _NARROWEST)
    width = -(-rows // max(1, -(-rows // width)))  # as many tiles, evenly wide
    width = max(1, min(rows, -(-width // _ALIGNMENT) * _ALIGNMENT))
    return width, max(0, budget // max(1, width * tokens) - buffers)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden @ weight.T / temperature, [M, width]."""
    dtype = _compute_dtype(hidden)
    if hidden.dtype == dtype:
        logits = torch.mm(hidden, weight.t())
    elif hidden.device.type == "cpu":
        logits = torch.mm(hidden.to(dtype), weight.to(dtype).t())
        logits.copy_(logits.to(hidden.dtype))
    else:
        logits = torch.mm(hidden, weight.t()).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


@dataclass(slots=True)
class _Seen:
    """What is known of each token's softmax after some part of the vocabulary. Sums are of exp(z - peak)."""

    peak: Tensor  # [M] largest logit
    total: Tensor  # [M] sum of exp(z - peak)
    target: Tensor  # [M] the target's logit, 0 while it was not met
    moment: Tensor | None  # [M] sum of exp(z - peak) * (z - peak)
    top: TopK | None  # [M, k] largest logits (not log-probs yet), largest first, and their global ids

    def merge(self, other: _Seen) -> _Seen:
        """Both parts together; `other` holds the higher ids."""
        peak = torch.maximum(self.peak, other.peak)
        here, there = self.peak - peak, other.peak - peak
        mine, yours = here.exp(), there.exp()
        moment = top = None
        if self.moment is not None and other.moment is not None:
            moment = mine * (self.moment + here * self.total) + yours * (other.moment + there * other.total)
        if self.top is not None and other.top is not None:
            ids = torch.cat((self.top.ids, other.top.ids), 1)
            top = _best(torch.cat((self.top.logprobs, other.top.logprobs), 1), ids, self.top.ids.shape[1])
        return _Seen(peak, mine * self.total + yours * other.total, self.target + other.target, moment, top)


def _best(values: Tensor, ids: Tensor, k: int) -> TopK:
    """The k largest values of each row, the earlier first among equals."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return TopK(ids.gather(1, order[:, :k]), values[:, :k])


def _outputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, kept: list[Tensor]
) -> tuple[PolicyOutputs, Tensor]:
    """The outputs and the logsumexp [M] of the logits.

    The first `head.kept` tiles are appended to `kept`, each followed by its peaks.
    """
    seen: _Seen | None = None
    for number, rows in enumerate(head.tiles()):
        logits = _logits(hidden, weight[rows], head.temperature)
        part = _look(logits, targets, head.first + rows.start, head)
        if number < head.kept:
            kept += [logits, part.peak]
        del logits  # before the next tile is made
        seen = part if seen is None else seen.merge(part)
    seen = _merge_ranks(seen or _nothing_seen(hidden, head), head.group)
    spread = seen.total.log()
    normalizer = seen.peak + spread
    entropy = None if seen.moment is None else spread - seen.moment / seen.total
    top = None if seen.top is None else TopK(seen.top.ids, seen.top.logprobs - normalizer[:, None])
    return PolicyOutputs(seen.target - normalizer, entropy, top), normalizer


def _look(logits: Tensor, targets: Tensor, first: int, head: _Head) -> _Seen:
    """What one tile says, whose first column is id `first`.

    Leaves z - peak in the place of the logits z, or exp(z - peak) where the entropy is not asked for.
    """
    peak = logits.amax(1)
    columns, inside = _columns(targets, first, logits.shape[1])
    target = torch.where(inside, logits.gather(1, columns[:, None])[:, 0], 0.0)
    top = _top(logits, first, head) if head.top_k else None
    logits.sub_(peak[:, None])
    if not head.entropy:
        return _Seen(peak, logits.exp_().sum(1), target, None, top)
    powers = logits.exp()
    total = powers.sum(1)
    return _Seen(peak, total, target, powers.mul_(logits).sum(1), top)


def _columns(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns of global ids in a tile, clamped into it, and whether they lie in it."""
    columns = ids - first
    clamped = columns.clamp(0, width - 1)
    return clamped, clamped == columns


def _top(logits: Tensor, first: int, head: _Head) -> TopK:
    """The tile's `top_k` largest logits and their global ids, equal logits by ascending id.

    `topk` promises the values, but not which of several equal ones it picks. So the ids above the k-th value are taken
    from it, and those equal to the k-th value from a second search, for the lowest ids.
    """
    width, low = logits.shape[1], torch.finfo(logits.dtype).min
    k = min(head.top_k, width)
    values, columns = logits.topk(k, dim=1)
    last = values[:, -1:]
    backwards = torch.arange(width, 0, -1, dtype=logits.dtype, device=logits.device)  # exact: widths are below 2**24
    ranked, ties = torch.where(logits == last, backwards, 0.0).topk(k, dim=1)
    values = torch.cat((torch.where(values > last, values, low), torch.where(ranked > 0, last, low)), 1)
    columns, order = torch.cat((columns, ties), 1).sort(dim=1)
    best = _best(values.gather(1, order), columns + first, k)
    short = (0, head.top_k - k)  # a tile may have fewer columns
    return TopK(pad(best.ids, short, value=head.vocab_size - 1), pad(best.logprobs, short, value=low))


def _nothing_seen(like: Tensor, head: _Head) -> _Seen:
    """No part of the vocabulary, e.g. the share of a rank that holds padding only; it weighs nothing in a merge."""
    zero = like.new_zeros(like.shape[0], dtype=_compute_dtype(like))
    peak = torch.full_like(zero, torch.finfo(zero.dtype).min)
    logits = peak[:, None].repeat(1, head.top_k)
    top = TopK(torch.full_like(logits, head.vocab_size - 1, dtype=torch.int64), logits) if head.top_k else None
    return _Seen(peak, zero, zero, zero if head.entropy else None, top)


def _merge_ranks(seen: _Seen, group: dist.ProcessGroup | None) -> _Seen:
    """The parts of all ranks together: one collective, and one more for the ids of the top-k."""
    if group is None:
        return seen
    packed = torch.stack([seen.peak, seen.total, seen.target, *([] if seen.moment is None else [seen.moment])], 1)
    sums = packed.shape[1]
    if seen.top is not None:
        packed = torch.cat((packed, seen.top.logprobs), 1)
        ids = _gather(seen.top.ids, group)
    everyone = []
    for rank, part in enumerate(_gather(packed, group)):
        moment = None if seen.moment is None else part[:, 3]
        top = None if seen.top is None else TopK(ids[rank], part[:, sums:])
        everyone.append(_Seen(part[:, 0], part[:, 1], part[:, 2], moment, top))
    return reduce(_Seen.merge, everyone)


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """`tensor` of every rank, in rank order."""
    everyone = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    if tensor.numel():
        dist.all_gather_into_tensor(everyone, tensor.contiguous(), group=group)
    return everyone.chunk(group.size())


class _TargetOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        kept: list[Tensor] = []
        found, normalizer = _outputs(hidden, weight, targets, head, kept)
        ids, top = (None, None) if found.topk is None else (found.topk.ids, found.topk.logprobs)
        ctx.set_materialize_grads(False)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, targets, normalizer, found.entropy, ids, *kept)
        if ids is not None:
            ctx.mark_non_differentiable(ids)
        return found.logprobs, found.entropy, ids, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normalizer, entropy, top_ids, *kept = ctx.saved_tensors
        by_logprob, by_entropy, _, by_top = upstream
        if by_logprob is None and by_entropy is None and by_top is None:
            return None, None, None, None
        head: _Head = ctx.head
        slopes = _Slopes.of(by_logprob, by_entropy, by_top, entropy, 1.0 / head.temperature)
        sums = _Sums.zero(hidden, weight, head.rows, ctx.needs_input_grad)
        for number, rows in enumerate(head.tiles()):
            if number < head.kept:
                tile = slopes.of_kept(kept[2 * number], kept[2 * number + 1] - normalizer, head.entropy)
            else:
                tile = slopes.of_logits(_logits(hidden, weight[rows], head.temperature).sub_(normalizer[:, None]))
            slopes.add_selected(tile, targets, top_ids, head.first + rows.start)
            sums.add(tile, hidden, weight, rows)
            del tile  # before the next one is made
        return None if sums.hidden is None else sums.hidden.to(hidden.dtype), sums.weight, None, None


@dataclass(slots=True)
class _Slopes:
    """Upstream gradients of M tokens, arranged for d loss / d logits, all divided by the temperature.

    d loss / d z_j = [j = y] g_y + [j in top-k] g_j - p_j (sum of all those g + g_H (log p_j + H))
    """

    target: Tensor | None  # [M] g_y
    top: Tensor | None  # [M, k] g_j
    constant: Tensor  # [M, 1] -(sum of g + g_H H)
    logprob: Tensor | None  # [M, 1] -g_H

    @classmethod
    def of(
        cls, by_logprob: Tensor | None, by_entropy: Tensor | None, by_top: Tensor | None, entropy: Tensor, scale: float
    ) -> _Slopes:
        target = None if by_logprob is None else by_logprob * scale
        top = None if by_top is None else by_top * scale
        logprob = None if by_entropy is None else by_entropy * -scale
        parts = [-part for part in (target, None if top is None else top.sum(1)) if part is not None]
        parts += [] if logprob is None else [logprob * entropy]
        constant = sum(parts[1:], start=parts[0])
        return cls(target, top, constant[:, None], None if logprob is None else logprob[:, None])

    def of_logits(self, logprobs: Tensor) -> Tensor:
        """The gradient by a tile's logits, written over its log-probs, without what targets and top-k add."""
        if self.logprob is None:
            return logprobs.exp_().mul_(self.constant)
        probabilities = logprobs.exp()
        return logprobs.mul_(self.logprob).add_(self.constant).mul_(probabilities)

    def of_kept(self, tile: Tensor, shift: Tensor, entropy: bool) -> Tensor:
        """The same for a tile as forward left it (see `_look`), with `shift` = peak - normalizer. The tile stays."""
        if entropy:
            return self.of_logits(tile + shift[:, None])
        return tile * (self.constant * shift.exp()[:, None])

    def add_selected(self, tile: Tensor, targets: Tensor, ids: Tensor | None, first: int) -> None:
        """Add what targets and top-k get beyond their share of the softmax."""
        # One call each, so that no place is added to twice in one: the order of such additions is not fixed on GPU.
        for index, slope in ((targets[:, None], self.target), (ids, self.top)):
            if slope is not None and index is not None:
                columns, inside = _columns(index, first, tile.shape[1])
                tile.scatter_add_(1, columns, torch.where(inside, slope.view_as(index), 0.0))


@dataclass(slots=True)
class _Sums:
    """The gradients being made; None where nobody needs one."""

    hidden: Tensor | None  # [M, H] float32 or float64
    weight: Tensor | None  # like the weight

    @classmethod
    def zero(cls, hidden: Tensor, weight: Tensor, rows: int, needed: tuple[bool, ...]) -> _Sums:
        by_hidden = torch.zeros_like(hidden, dtype=_compute_dtype(hidden)) if needed[0] else None
        by_weight = torch.empty_like(weight) if needed[1] else None
        if by_weight is not None:
            by_weight[rows:].zero_()
        return cls(by_hidden, by_weight)

    def add(self, slopes: Tensor, hidden: Tensor, weight: Tensor, rows: slice) -> None:
        """Account for a tile; slopes [M, width] is d loss / d logits."""
        product = slopes.dtype if hidden.device.type == "cpu" else hidden.dtype
        slopes = slopes.to(product)
        if self.hidden is not None and self.hidden.dtype == product:
            self.hidden.addmm_(slopes, weight[rows].to(product))
        elif self.hidden is not None:
            self.hidden.add_(torch.mm(slopes, weight[rows]))
        if self.weight is not None and self.weight.dtype == product:
            torch.mm(slopes.t(), hidden, out=self.weight[rows])
        elif self.weight is not None:
            self.weight[rows] = torch.mm(slopes.t(), hidden.to(product))
