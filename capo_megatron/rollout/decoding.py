"""The decoding loop of the embedded engine: one batch of prompts in, all its responses out.

`model.generate(..., custom_generate=Decoder(...))` lets Hugging Face prepare the inputs and runs this loop in place of
its own. It differs in what it does not do: prefill a prompt once per sample, copy the whole KV cache to append a token,
repeat keys and values for grouped-query attention, or go on computing responses that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.sampling import choose
from capo_megatron.seams import SamplingParams

ATTENTION = "grouped_sdpa"  # the name under which `grouped_attention` is known to transformers
_DROP_SHARE = 8  # ended rows leave the batch once they are one in this many: moving the cache costs about one step
_HEADROOM = 64  # smallest number of free positions to allocate when the cache grows


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention output [n, queries, heads, head size]; query [n, heads, queries, head size], keys with fewer heads.

    When decoding there is one query per head, and the heads that share a key-value head are handed over as that many
    queries of one head: the same sums without repeating keys and values for every head.
    """
    rows, heads, queries, size = query.shape
    if queries != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    folded = query.view(rows, key.shape[1], heads // key.shape[1], size)
    if query.device.type == "cpu":
        out = _few_queries(folded, key, value, attention_mask, options["scaling"])
    else:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=options["scaling"])
    return out.reshape(rows, 1, heads, size), None


def _few_queries(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention as two batched products: for few queries 2 to 6 times faster than PyTorch's kernel for CPUs."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), value)


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, in a buffer with free columns at its end: a step writes one column in place."""

    keys: Tensor  # [rows, key-value heads, capacity, head size]
    values: Tensor

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit  # positions that will ever be held
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new positions; all keys and values so far."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        if self.length > self.keys.shape[-2]:
            self._rebuild(slice(None), held=start)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        self._rebuild(indices, held=self.length)

    def _rebuild(self, rows: Tensor | slice, held: int) -> None:
        room = min(self.limit, max(held + max(_HEADROOM, held // 2), self.length))
        self.keys = _moved(self.keys, rows, held, room)
        self.values = _moved(self.values, rows, held, room)


def _moved(old: Tensor, rows: Tensor | slice, held: int, room: int) -> Tensor:
    kept = old[rows, :, :held]
    new = kept.new_empty(*kept.shape[:2], room, kept.shape[3])
    new[:, :, :held] = kept
    return new


@dataclass(frozen=True)
class Responses:
    """What a batch of rows was answered, on the CPU."""

    tokens: Tensor  # [rows, max_tokens] int64; row r ends after lengths[r] tokens, what follows means nothing
    logprobs: Tensor  # [rows, max_tokens] float32
    lengths: Tensor  # [rows] int64
    truncated: Tensor  # [rows] bool: no stop token among max_tokens


class Decoder:
    """A token loop for `generate(custom_generate=...)`: several responses to each of a batch of left-padded prompts."""

    def __init__(
        self, prompt_of: Sequence[int], draws: np.ndarray, params: SamplingParams, names: Sequence[str]
    ) -> None:
        """Row r answers prompt `prompt_of[r]` with the uniform numbers `draws[r]`; `names[r]` is its problem's id."""
        self.prompt_of, self.draws, self.params, self.names = prompt_of, draws, params, names

    def __call__(
        self,
        model: Any,  # a PreTrainedModel with GenerationMixin; no type in transformers says so
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Responses:
        """The responses. Hugging Face's processors and criteria are not applied: `SamplingParams` says all."""
        first = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs))
        prompt_of = torch.tensor(self.prompt_of, device=input_ids.device)
        cache = inputs["past_key_values"]
        cache.batch_select_indices(prompt_of)
        rows = _Rows(self, prompt_of, input_ids, inputs["attention_mask"])
        logits = first.logits[prompt_of, -1]
        for position in range(self.params.max_tokens):
            tokens = rows.sample(position, logits)
            if position + 1 == self.params.max_tokens or rows.all_ended():
                break
            keep = rows.drop_ended()
            if keep is not None:
                cache.batch_select_indices(keep)
                tokens = tokens[keep]
            step = rows.inputs(position, tokens)
            logits = model(past_key_values=cache, use_cache=True, logits_to_keep=1, **step).logits[:, -1]
        return rows.responses()


class _Rows:
    """The rows still in the batch, and what all rows were answered so far."""

    def __init__(self, decoder: Decoder, prompt_of: Tensor, input_ids: Tensor, mask: Tensor | None) -> None:
        device, count = input_ids.device, len(prompt_of)
        self.params, self.names = decoder.params, decoder.names
        self.draws = torch.from_numpy(decoder.draws).to(device)
        self.stop_ids = torch.tensor(self.params.stop_ids, dtype=torch.long, device=device)
        self.rows = torch.arange(count, device=device)  # which row each place of the batch holds
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)  # by place
        self.ended_count = 0
        self.tokens = torch.zeros(count, self.params.max_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(count, self.params.max_tokens, dtype=torch.float32, device=device)
        self.lengths = torch.full((count,), self.params.max_tokens, device=device)
        self.truncated = torch.ones(count, dtype=torch.bool, device=device)
        self.width = input_ids.shape[1]
        self.visible: Tensor | None = None  # [places, 1, 1, width + max_tokens] bool; None: no row is padded
        self.prompt_lengths = torch.full((count,), self.width, device=device)  # by place
        if mask is not None:
            self.prompt_lengths = mask.sum(dim=1)[prompt_of]
            visible = torch.nn.functional.pad(mask.bool(), (0, self.params.max_tokens), value=True)
            self.visible = visible[prompt_of, None, None]

    def sample(self, position: int, logits: Tensor) -> Tensor:
        """[places] the next token of every place, at this position of its response. RolloutError on NaN or infinity."""
        tokens, logprobs, finite = choose(logits, self.draws[self.rows, position], self.params)
        self.tokens[self.rows, position] = tokens
        self.logprobs[self.rows, position] = logprobs
        stopped = torch.isin(tokens, self.stop_ids) & ~self.ended
        broken = ~(finite | self.ended)
        self.lengths[self.rows[stopped]] = position + 1
        self.truncated[self.rows[stopped]] = False
        self.ended |= stopped
        # The only point of a step at which the host waits for the device.
        self.ended_count, broken_count = torch.stack((self.ended.sum(), broken.sum())).tolist()
        if broken_count:
            self._refuse(position, broken)
        return tokens

    def _refuse(self, position: int, broken: Tensor) -> None:
        found = sorted({self.names[row] for row in self.rows[broken].tolist()})
        raise RolloutError(
            f"problem {found[0]!r}: non-finite logits at response token {position} (and in {len(found) - 1} other "
            "problems of the batch). The weights hold NaN or infinity, or overflow in this precision: look at the loss "
            "and gradient norm of the last steps, or use model.dtype=float32."
        )

    def all_ended(self) -> bool:
        return self.ended_count == len(self.rows)

    def drop_ended(self) -> Tensor | None:
        """The places to keep, if there are enough ended ones to drop; None: all of them stay."""
        if self.ended_count * _DROP_SHARE < len(self.rows):
            return None
        keep = torch.nonzero(~self.ended).squeeze(-1)
        self.rows, self.prompt_lengths = self.rows[keep], self.prompt_lengths[keep]
        self.ended, self.ended_count = self.ended[keep], 0
        if self.visible is not None:
            self.visible = self.visible[keep]
        return keep

    def inputs(self, position: int, tokens: Tensor) -> dict[str, Tensor | None]:
        """What the model needs to see the tokens sampled at `position`."""
        seen = None if self.visible is None else self.visible[..., : self.width + position + 1]
        positions = (self.prompt_lengths + position).unsqueeze(-1)
        return {"input_ids": tokens.unsqueeze(-1), "position_ids": positions, "attention_mask": seen}

    def responses(self) -> Responses:
        return Responses(self.tokens.cpu(), self.logprobs.cpu(), self.lengths.cpu(), self.truncated.cpu())


def growing_cache(config: PreTrainedConfig, limit: int) -> Cache:
    """An empty KV cache for at most `limit` positions. Raises RolloutError unless all layers have full attention."""
    layers = DynamicCache(config=config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others:
        raise RolloutError(
            f"{config.model_type}: {', '.join(others)} in the model, and the embedded engine decodes layers with full "
            "attention only. For Qwen2 set use_sliding_window to false in config.json."
        )
    return Cache(layers=[GrowingLayer(limit) for _ in layers])
