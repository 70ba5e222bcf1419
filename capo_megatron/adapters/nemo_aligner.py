"""CAPO in NeMo-Aligner 0.7.0, over its REINFORCE classes. Legacy, contract-tested, never run end to end.

That project is unmaintained since May 2025; NeMo-RL, its successor, has an adapter of its own. Parts:

    CapoTrainer        ReinforceTrainer             advantages of CAPO or GRPO, over all data-parallel ranks
    CapoActor          MegatronGPTReinforceActor... the clipped loss, and prompt ids in what it samples
    CapoRolloutBatch   ReinforceRolloutBatch        rows dealt over the ranks

The three classes are made, and nemo_aligner, nemo and tensorrt_llm imported, when they are first asked for; each is a
mixin of this file in front of the class in the middle column. The maths is in `nemo_aligner_step.py`, prompts and
rewards are in `nemo_aligner_prompts.py`, the entry script is in `examples/nemo_aligner`.

**Shapes.** n rows of this data-parallel rank, N of all, S padded length, T = S - 1 targets. Column t of a `[n, T]`
tensor speaks of predicting token t + 1, as NeMo-Aligner has it.

**What differs from the stock classes**, whose loss also works for one row per micro-batch only, and not without KL:

- Rows are split over the data-parallel ranks; the stock batch gives all rows to every rank.
- Groups are the responses to one prompt id, wherever their rows went, of any size; not rows whose padded prompts are
  equal. Responses that were cut off count like all others. Rows without a verdict are in no statistic and no loss.
- The log-probs of the sampling policy stay in the training data, and the ratio to them is clipped.
- The loss of an optimizer step is `sum(weights * token_loss)` over its rows on all ranks, with weights made before the
  split; NeMo's means over micro-batches and ranks are undone by a factor in them.
- The data sampler advances by prompts. The stock trainer adds the number of responses, which skips prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from capo_megatron.adapters.nemo_aligner_step import (
    Rows,
    StepOptions,
    advantages,
    clipped_loss,
    response_mask,
    step_metrics,
    token_weights,
)
from capo_megatron.algorithms.equations import sequence_logprob_mean
from capo_megatron.errors import ConfigError, ShapeError

NEMO_ALIGNER = "0.7.0"
LAST_STAGE_KEYS = ("response_tokens", "advantages", "prev_logprobs", "weights")  # what the loss reads


class SplitRows:
    """In front of ReinforceRolloutBatch: `chunk` deals out rows instead of copying them all."""

    data: dict[str, Tensor]

    def chunk(self, rank: int, split_size: int, seed: int) -> Any:
        """Every `split_size`-th row of a seeded permutation, from the rank-th on; sizes differ by one at most.

        Dealt in turns, the rows that make an optimizer step are the same for any number of ranks.
        """
        sizes = {key: len(value) for key, value in self.data.items()}
        if len(set(sizes.values())) != 1:
            raise ShapeError(f"rollout batch: rows per key {sizes}; all must have the same number.")
        if not 0 <= rank < split_size:
            raise ShapeError(f"rollout batch: rank {rank} of {split_size}; ranks count from 0.")
        order = torch.randperm(next(iter(sizes.values())), generator=torch.Generator().manual_seed(seed))
        rows = order[rank::split_size]
        part = type(self)()
        part.data.update({key: value[rows.to(value.device)] for key, value in self.data.items()})
        return part


class CapoTraining:
    """In front of ReinforceTrainer, whose constructor it takes over with one more keyword, `capo`."""

    cfg: Any
    model: Any
    rm: Any
    timer: Any
    step: int
    trtllm_reshard: bool
    batch_iterator_cls: Callable[..., Any]
    collate_fn: Callable[..., Any]
    capo: StepOptions
    compute_rollout_metrics: Callable[[Any], dict[str, Any]]

    def __init__(self, *args: Any, capo: StepOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capo = StepOptions() if capo is None else capo
        cfg = self.cfg
        if cfg.initial_policy_kl_penalty != 0:
            name = "trainer.reinforce.initial_policy_kl_penalty"
            raise ConfigError(f"{name}={cfg.initial_policy_kl_penalty}: there is no KL term here; set it to 0.")
        prompts, samples = self.model.cfg.reinforce.num_rollout_samples, cfg.num_rollouts_per_prompt
        if prompts * samples % cfg.model_gbs:
            raise ConfigError(
                f"model.global_batch_size={cfg.model_gbs}: does not divide the {prompts} * {samples} responses of a "
                "rollout (model.reinforce.num_rollout_samples * trainer.reinforce.num_rollouts_per_prompt). Make it so."
            )

    def generate_reinforce_data(
        self, rollout_batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Training data of this rank's rows and metrics of all. Collective over the data-parallel group.

        Data: response_tokens [n, S], advantages [n, 1], prev_logprobs and weights [n, T].
        """
        logprobs = rollout_batch["logprobs"].float()
        mask = response_mask(logprobs, rollout_batch["prompt_lengths"], rollout_batch["response_lengths"])
        parts, rank = self._gather(self._rows(rollout_batch, logprobs, mask).pack())
        everyone = Rows.unpack(torch.cat(parts))
        advantage, keep = advantages(self.capo, everyone)
        weights = token_weights(self.capo, everyone)
        first = sum(len(part) for part in parts[:rank])
        mine = slice(first, first + len(mask))
        undo_means = self.cfg.model_gbs / self.cfg.model_mbs  # micro-batches of a step times data-parallel ranks
        column = (weights[mine] * undo_means).unsqueeze(1).to(logprobs.device)
        data = {
            "response_tokens": rollout_batch["response_tokens"],
            "advantages": advantage[mine].unsqueeze(1).to(logprobs.device),
            "prev_logprobs": torch.where(mask, logprobs, 0.0),
            "weights": mask * column,
        }
        return data, step_metrics(self.capo, everyone, advantage, keep)

    def _rows(self, batch: Mapping[str, Tensor], logprobs: Tensor, mask: Tensor) -> Rows:
        mean, answered = sequence_logprob_mean(torch.where(mask, logprobs, 0.0), mask)
        reference = torch.zeros_like(mean)
        if self.capo.needs_reference:
            reference = sequence_logprob_mean(torch.where(mask, batch["init_logprobs"].float(), 0.0), mask)[0]
        per_step = self.cfg.model_gbs // self._ranks()
        return Rows(
            group=batch["prompt_ids"].to(mean.device),
            mini_batch=torch.arange(len(mask), device=mean.device) // per_step,
            tokens=mask.sum(1),
            valid=answered & batch["gradable"].to(mean.device).bool(),
            reward=batch["rewards"].to(mean.device).float(),
            logprob_mean=mean,
            ref_logprob_mean=reference,
        )

    def _gather(self, packed: Tensor) -> tuple[list[Tensor], int]:
        """The packed rows of all data-parallel ranks, in their order, and which of them are this rank's."""
        from nemo_aligner.utils import parallel_state

        parts: list[Any] = [None] * self._ranks()
        torch.distributed.all_gather_object(parts, packed, group=parallel_state.get_data_parallel_group())
        return parts, parallel_state.get_data_parallel_rank()

    def _ranks(self) -> int:
        from nemo_aligner.utils import parallel_state

        return parallel_state.get_data_parallel_world_size()

    def _run_inference(
        self, dataloader_builder: Callable[..., Any], consumed_samples: int, is_validation: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Samples, grades and, for training, scores: this rank's share of the rows, and metrics of all. Collective."""
        from nemo_aligner.utils.utils import cpu_dict

        with self._generating():
            rollouts, futures = self._sample(dataloader_builder, consumed_samples, is_validation)
            everyone = self._stack(rollouts)
        mine = self._share(everyone)
        if not is_validation:
            with self.timer("logprobs"):
                mine["logprobs"] = self.model.get_inference_log_probs(mine["response_tokens"])
        if not is_validation and self.capo.needs_reference:
            with self.timer("init_logprobs"):
                mine["init_logprobs"] = self.model.get_init_policy_logprobs(mine["response_tokens"])
        with self._generating(), self.timer("critic_wait"):
            grades = self._stack([_graded(future.result()) for future in futures])
        mine.update(self._share(grades))
        everyone.update(grades)
        metrics = self.compute_rollout_metrics(everyone)
        if not is_validation:  # the trainer adds this to the number of prompts that the data sampler has given
            metrics["rollout_size"] //= self.cfg.num_rollouts_per_prompt
        return mine, cpu_dict(metrics)

    def _generating(self) -> AbstractContextManager[Any]:
        from nemo_aligner.utils.parallel_state import trt_llm_reshard_region

        return trt_llm_reshard_region() if self.trtllm_reshard else nullcontext()

    def _sample(self, builder: Callable[..., Any], consumed: int, is_validation: bool) -> tuple[list[Any], list[Any]]:
        from nemo_aligner.algorithms.reinforce import compute_num_rollout_microbatches

        loader = builder(consumed_samples=consumed)
        with self.timer("batch_iterator_init"):
            count = compute_num_rollout_microbatches(loader)
            batches = self.batch_iterator_cls(iter(loader.batch_sampler), count, loader.dataset, self.collate_fn)
        rollouts, futures = [], []
        with self.timer("generate"):
            for batch in batches:
                for _ in range(1 if is_validation else self.cfg.num_rollouts_per_prompt):
                    rollouts.append(self.model.infer(batch))
                    futures.append(self.rm.infer_rm(rollouts[-1]))
        return rollouts, futures

    def _stack(self, batches: Sequence[Mapping[str, Tensor]]) -> Any:
        """The rows of these batches on all ranks, padded alike."""
        length = self.cfg.rollout_batch_seq_length
        kind = _made("CapoRolloutBatch")
        local = kind.from_rollout_batches(batches, eos_id=self.model.tokenizer.eos_id, rollout_batch_seq_length=length)
        return local.gather_and_balance_globally()

    def _share(self, batch: Any) -> Any:
        """This rank's rows. The same permutation for everything of a step, or rewards would meet other responses."""
        from nemo_aligner.utils import parallel_state

        return batch.chunk(rank=parallel_state.get_data_parallel_rank(), split_size=self._ranks(), seed=self.step)


def _graded(result: Tensor) -> dict[str, Tensor]:
    """Rewards [n, 1] in which NaN says "no verdict", as rewards and flags [n] that can be summed over ranks."""
    rewards = result.squeeze(1).float()
    return {"rewards": rewards.nan_to_num(0.0), "gradable": (~rewards.isnan()).float()}


class CapoActing:
    """In front of MegatronGPTReinforceActorModel. `model.capo` has clip_low, clip_high and dual_clip."""

    cfg: Any
    parameters: Callable[[], Iterable[Tensor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._signs: list[Tensor] = []
        sampling = self.cfg.reinforce.sampling_params
        unchanged = {"use_greedy": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        for name, only in unchanged.items():
            if sampling.get(name, only) != only:
                raise ConfigError(
                    f"model.reinforce.sampling_params.{name}={sampling[name]}: NeMo-Aligner scores the unchanged "
                    f"distribution, so the ratios would be wrong; set it to {only}."
                )

    def infer(self, inference_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One response to each prompt, with the prompt's id."""
        rollout = super().infer(inference_batch)  # type: ignore[misc]
        device = rollout["response_tokens"].device
        return {**rollout, "prompt_ids": inference_batch["prompt_ids"].to(device)}

    def get_actor_forward_output_and_loss_func(self) -> Callable[..., Any]:
        """The forward step that Megatron's schedules call. Each pipeline stage moves only what it reads."""
        from nemo.collections.nlp.modules.common.megatron.utils import average_losses_across_data_parallel_group
        from nemo_aligner.utils import parallel_state
        from nemo_aligner.utils.distributed import from_parallel_logits_to_logprobs

        clip = self.cfg.capo

        def forward(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data_iterator)
            first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
            keys = stage_keys(first, last)
            device = next(iter(model.parameters())).device
            here: dict[str, Any] = {key: value.to(device) if key in keys else None for key, value in batch.items()}
            logits = model(here["response_tokens"], here["position_ids"], here["attention_mask"], labels=None)

            def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                logprobs = from_parallel_logits_to_logprobs(
                    vocab_parallel_logits=logits, target=here["response_tokens"], higher_stability=True
                )
                loss, signs = clipped_loss(logprobs, here, clip.clip_low, clip.clip_high, clip.dual_clip)
                averages = average_losses_across_data_parallel_group([loss, *signs.unbind()])
                self._signs.append(averages[1:])
                return loss, {"loss": averages[:1]}

            return logits, loss_of

        return forward

    def get_loss_and_metrics(self, batch: dict[str, Tensor], forward_only: bool) -> tuple[float, dict[str, float]]:
        """The loss of an optimizer step and its metrics: loss, clip_share and approx_kl, the same on every rank."""
        from nemo.collections.nlp.parts.utils_funcs import get_last_rank

        self._signs.clear()
        loss, metrics = super().get_loss_and_metrics(batch=batch, forward_only=forward_only)  # type: ignore[misc]
        device = next(iter(self.parameters())).device
        signs = torch.stack(self._signs).mean(0) if self._signs else torch.zeros(2, device=device)
        torch.distributed.broadcast(signs, get_last_rank())
        clip_share, approx_kl = signs.tolist()
        return loss, {**metrics, "clip_share": clip_share, "approx_kl": approx_kl}


def stage_keys(first: bool, last: bool) -> set[str]:
    """Which entries of a micro-batch a pipeline stage reads."""
    keys = {"attention_mask"}
    if first:
        keys |= {"response_tokens", "position_ids"}
    if last:
        keys |= set(LAST_STAGE_KEYS)
    return keys


# --- the classes, made on demand --------------------------------------------------------------------------------------


def _made(name: str) -> Any:
    """CapoTrainer, CapoActor or CapoRolloutBatch. Kept in this module, where NeMo's checkpoints look classes up."""
    if name not in globals():
        from nemo_aligner.algorithms.reinforce import ReinforceRolloutBatch, ReinforceTrainer
        from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import MegatronGPTReinforceActorModel

        bases = {
            "CapoTrainer": (CapoTraining, ReinforceTrainer),
            "CapoActor": (CapoActing, MegatronGPTReinforceActorModel),
            "CapoRolloutBatch": (SplitRows, ReinforceRolloutBatch),
        }
        for made, parents in bases.items():
            globals()[made] = type(parents[1])(made, parents, {"__module__": __name__})
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name in ("CapoTrainer", "CapoActor", "CapoRolloutBatch"):
        return _made(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
