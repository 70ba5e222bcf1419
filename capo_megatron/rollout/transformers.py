"""The embedded rollout engine: a Hugging Face causal language model in the training process.

Needs nothing beyond what training needs and runs on a laptop. It holds its own copy of the weights, filled tensor by
tensor from the policy's, and decodes on one device; several ranks share the problems of a step between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from capo_megatron.errors import RolloutError
from capo_megatron.rollout.decoding import ATTENTION, Decoder, Responses, growing_cache
from capo_megatron.rollout.requests import (
    PromptAndResponse,
    Tokenizer,
    check_awake,
    check_complete,
    check_fits,
    check_params,
    check_ready,
    few,
)
from capo_megatron.rollout.sampling import row_seed, uniforms
from capo_megatron.rollout.sketch import Sketch, sketches
from capo_megatron.seams import SamplingParams
from capo_megatron.types import Problem, Sample

_SCORED_TOKENS = 16_384  # padded tokens of one forward pass of `logprobs`
_LOGITS_TOKENS = 1_024  # tokens of `logprobs` whose float32 logits exist at one time


class TransformersEngine:
    """`seams.RolloutEngine` on Hugging Face's model code, for decoders with full attention (Qwen2, Llama, ...)."""

    def __init__(
        self,
        model: str | Path | PreTrainedConfig,
        tokenizer: Tokenizer,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int = 256,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """An engine without weights: `load_weights` comes before anything else.

        `model` is a directory with a config.json, or a config. `batch_size` responses are decoded together. `share` is
        (index, count): this rank samples the index-th of count shares of a step's problems.
        Raises RolloutError for an architecture that cannot be decoded here.
        """
        self.version = -1
        self.share = share
        self._tokenizer, self._batch_size = tokenizer, batch_size
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._model = _empty_model(_config(model), dtype, self._device)
        self._asleep = False

    # --- weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight into the model, cast to its dtype, and call the result `version`.

        All or nothing: RolloutError names every tensor that is missing, unknown, or of another shape, and `generate`
        then refuses until a load succeeds. The iterator is always read to its end, since producing a tensor may be
        collective. A tied head may come under its own name, if it equals the embedding.
        """
        check_awake(self._asleep, "load_weights")
        self.version = -1
        targets = dict(self._model.named_parameters(remove_duplicate=False))
        filled: set[int] = set()
        wrong = []
        for name, tensor in hf:
            fault = _copy(name, tensor, targets.get(name), filled)
            if fault:
                wrong.append(fault)
        missing = [name for name, target in self._model.named_parameters() if id(target) not in filled]
        if missing:
            wrong.append(f"{len(missing)} missing: {few(missing)}")
        config = self._model.config
        check_complete(wrong, version, config.model_type, config.num_hidden_layers)
        self.version = version

    def forget(self) -> None:
        """Nothing outlives a call of `generate`."""

    def sleep(self) -> None:
        """Move the weights off the GPU until `wake`. On a CPU there is nothing to free."""
        self._asleep = True
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back."""
        self._model.to(self._device)
        self._asleep = False

    # --- sampling -----------------------------------------------------------------------------------------------------

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        """For each problem its `samples` responses, which end with one of `params.stop_ids` or are `truncated`.

        A response is a function of (weights, params, problem id and prompt, its index), up to rounding: see `sampling`.
        Its log-probs are those of the whole distribution at `params.temperature` (at 1 if that is 0), before top-k and
        top-p. The text leaves out the final stop token and special tokens. None of them can fail alone: they are rows
        of one computation.
        Raises RolloutError if the weights are not loaded, a prompt does not fit, or logits are not finite.
        """
        check_ready(self._asleep, self.version, "generate")
        check_params(params, samples)
        for problem in problems:
            check_fits(problem, params.max_tokens, self._model.config)
        # Longest first: neighbours need little padding, and what does not fit into memory fails at once.
        order = sorted(range(len(problems)), key=lambda place: -len(problems[place].prompt_ids))
        jobs = [(place, index) for place in order for index in range(samples)]
        found: list[list[Sample]] = [[] for _ in problems]
        for batch in _even_batches(jobs, self._batch_size):
            # A problem's samples are decoded in order, also when a batch ends between them.
            for (place, _), sample in zip(batch, self._decode(problems, batch, params), strict=True):
                found[place].append(sample)
        return found

    @torch.inference_mode()
    def _decode(
        self, problems: Sequence[Problem], jobs: Sequence[tuple[int, int]], params: SamplingParams
    ) -> Iterator[Sample]:
        places = list(dict.fromkeys(place for place, _ in jobs))
        prompts = [problems[place].prompt_ids for place in places]
        ids, mask = _left_padded(prompts, self._device)
        names = [problems[place].id for place, _ in jobs]
        seeds = [row_seed(params.seed, problems[place].id, index) for place, index in jobs]
        row_of = {place: row for row, place in enumerate(places)}
        decoder = Decoder([row_of[place] for place, _ in jobs], uniforms(seeds, params.max_tokens), params, names)
        try:
            responses = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=GenerationConfig(max_new_tokens=params.max_tokens, do_sample=False),
                past_key_values=growing_cache(self._model.config, ids.shape[1] + params.max_tokens),
                custom_generate=decoder,
            )
        except torch.OutOfMemoryError as error:
            raise RolloutError(
                f"rollout.batch_size: decoding {len(jobs)} responses of up to {params.max_tokens} tokens together does "
                f"not fit into GPU memory. Use a smaller rollout.batch_size or rollout.max_tokens. ({error})"
            ) from error
        return self._samples(responses, set(params.stop_ids))

    def _samples(self, responses: Responses, stop_ids: set[int]) -> Iterator[Sample]:
        columns = (responses.tokens.numpy(), responses.logprobs.numpy())
        truncated = responses.truncated.tolist()
        for row, length in enumerate(responses.lengths.tolist()):
            ids, logprobs = (tuple(column[row, :length].tolist()) for column in columns)
            shown = ids[:-1] if ids[-1] in stop_ids else ids
            yield Sample(ids, logprobs, self.decode(shown), truncated[row], self.version)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[PromptAndResponse], temperature: float) -> list[list[float]]:
        """Log-probs in nats of each response's tokens after its prompt, at `temperature` (at 1 if that is 0).

        One forward pass over the whole sequence, without KV cache: computed independently of what `generate` recorded.
        """
        check_ready(self._asleep, self.version, "logprobs")
        for prompt, _ in sequences:
            if not prompt:
                raise RolloutError("logprobs: a prompt is empty, so nothing predicts its response's first token.")
        found: list[list[float]] = [[] for _ in sequences]
        order = sorted(range(len(sequences)), key=lambda row: -sum(map(len, sequences[row])))
        while order:
            width = sum(map(len, sequences[order[0]]))
            count = max(1, min(self._batch_size, _SCORED_TOKENS // max(1, width)))
            rows, order = order[:count], order[count:]
            for row, scored in zip(
                rows, self._score([sequences[row] for row in rows], temperature or 1.0), strict=True
            ):
                found[row] = scored
        return found

    def _score(self, sequences: Sequence[PromptAndResponse], temperature: float) -> Iterator[list[float]]:
        width = max(sum(map(len, pair)) for pair in sequences)
        # Padded on the right: causal attention keeps padding out of everything before it.
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        predicts = torch.zeros(len(sequences), width, dtype=torch.bool)
        for row, (prompt, response) in enumerate(sequences):
            ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            predicts[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        targets = ids.roll(-1, dims=1)[predicts].to(self._device)
        hidden = self._model.base_model(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        hidden = hidden[predicts.to(self._device)]
        head = self._model.get_output_embeddings()
        scored = []
        for part, wanted in zip(hidden.split(_LOGITS_TOKENS), targets.split(_LOGITS_TOKENS), strict=True):
            logits = head(part).float() / temperature
            scored.append(logits.gather(1, wanted.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1))
        parts = torch.cat(scored).split([len(response) for _, response in sequences])
        return (part.tolist() for part in parts)

    def sketches(self) -> dict[str, Sketch]:
        """What the model holds of every weight."""
        return sketches(self._model.named_parameters())


def _config(model: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    if not (Path(model) / "config.json").is_file():
        raise RolloutError(f"{model}: no config.json there. Give the directory of a Hugging Face model.")
    return AutoConfig.from_pretrained(model, local_files_only=True)


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:  # see decoding.Decoder
    """The model with uninitialised weights; its buffers (rotary frequencies) are right."""
    growing_cache(config, limit=1)  # raises for layers that cannot be decoded here
    with device, _NoRandomNumbers():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    # Whatever config.json says of sampling (penalties, end-of-sequence ids) is not in SamplingParams and must not act.
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves tensors uninitialised that would be filled with random numbers, on this thread only.

    Initialising billions of weights that are about to be overwritten takes minutes, and would advance the random state.
    transformers' `no_init_weights` patches the whole process and does not survive two threads that build models.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.__name__.endswith(("normal_", "uniform_")):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def _copy(name: str, tensor: Tensor, target: Tensor | None, filled: set[int]) -> str | None:
    """Copy `tensor` into `target` and note it; what is wrong with it, if something is."""
    if target is None:
        return f"{name} is no weight of this model"
    if tensor.shape != target.shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
    if id(target) in filled:
        same = torch.equal(target, tensor.to(target.device, target.dtype))
        return None if same else f"{name} came twice, or is tied to a weight that it does not equal"
    target.copy_(tensor)
    filled.add(id(target))
    return None


def _even_batches(jobs: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    """`jobs` in as few batches of at most `size` as possible, equally large: a small last batch wastes the device."""
    count = -(-len(jobs) // size)
    bounds = [len(jobs) * index // count for index in range(count + 1)] if count else []
    for start, end in pairwise(bounds):
        yield jobs[start:end]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """([P, L] int64 ids, [P, L] int64 attention mask), so that every prompt ends in the last column."""
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
