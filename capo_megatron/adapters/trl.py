"""CAPO in TRL (tested with TRL 1.16.0): `CapoTrainer` and `CapoTrainerConfig` instead of GRPOTrainer and GRPOConfig.

    trainer = CapoTrainer(
        model=..., reward_funcs=accuracy, train_dataset=..., args=CapoTrainerConfig("out", capo_tau=0.6)
    )
    trainer.train()

Everything but the advantages stays TRL's: generation, vLLM, PEFT, distribution, the losses (`loss_type`, `epsilon`,
`importance_sampling_level`, ...) and the KL penalty (`beta`). The loss that belongs to CAPO's derivation is
`loss_type="grpo"`, which is the default here (TRL's own is "dapo", a mean over tokens).

**What is overridden.** TRL computes advantages at the end of `_generate_and_score_completions` from the rewards of
`_calculate_rewards`, which are those of all processes in the order of the prompts, `num_generations` adjacent rows per
prompt. Both are extended: the second remembers the rewards, the first replaces the advantages, after a gather of the
mean log-probs over all processes. The log-probs of the policy that sampled are TRL's `old_per_token_logps`, or are
scored once more where TRL leaves them out because it steps once per generation. TRL makes and scores a reference model
only for `beta` other than 0; the noise mask needs one anyway, hence `_reference_for_the_mask`.

**Who is correct.** The reward is larger than `capo_correct_above`. With several reward functions `capo_correct_reward`
must name the one that says so, since a sum of, say, format and accuracy does not. A response for which it returned None
is left out, as is one that `mask_truncated_completions` masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from capo_megatron.adapters import CapoOptions, MissingTrainerError, require_version, row_advantages
from capo_megatron.algorithms.equations import Norm, Surrogate, sequence_logprob_mean
from capo_megatron.errors import ConfigError, TrainingError

TRL = "1.16.0"
INSTALL = f"pip install trl=={TRL}"

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise MissingTrainerError(f"capo_megatron.adapters.trl needs TRL ({error}): {INSTALL}") from error

_TINY = 1e-30  # a KL coefficient that TRL takes for "there is a KL penalty"


@dataclass
class CapoTrainerConfig(GRPOConfig):
    """GRPOConfig with CAPO's options, see `CapoOptions`. `loss_type` defaults to "grpo", the mean over responses.

    Raises ConfigError on values out of range and on options of GRPO's advantages (`scale_rewards`,
    `multi_objective_aggregation`), which CAPO does not use: it has pairs instead of a baseline and a deviation.
    """

    loss_type: str = field(default="grpo", metadata={"help": "TRL's; CAPO's derivation belongs to 'grpo'."})
    capo_tau: float = field(default=0.6, metadata={"help": "Temperature of the pairwise surrogate."})
    capo_surrogate: Surrogate = field(default="logistic", metadata={"help": "linear: every pair weighs 1."})
    capo_norm: Norm = field(default="sum", metadata={"help": "What a sum over pairs is divided by."})
    capo_inv_tau: bool = field(default=True, metadata={"help": "Keep the factor 1/tau of the exact derivative."})
    capo_mask: str = field(default="on", metadata={"help": "Noise mask by reference perplexity: on or off."})
    capo_mask_scope: str = field(default="output", metadata={"help": "pairs: masked responses leave the pairs."})
    capo_ref_high: float = field(default=2.5, metadata={"help": "Largest reference perplexity if correct."})
    capo_ref_low: float = field(default=1.05, metadata={"help": "Smallest reference perplexity if wrong."})
    capo_correct_above: float = field(default=0.5, metadata={"help": "A larger reward means correct."})
    capo_correct_reward: str | None = field(default=None, metadata={"help": "Reward function that says correct."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.capo()
        for name, unused in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
            if vars(self)[name] != unused:
                raise ConfigError(f"{name}={vars(self)[name]!r}: CAPO has no use for it. Leave it out.")
        if self.sync_ref_model and self.capo_mask == "on":
            raise ConfigError("sync_ref_model=True: the noise mask needs a frozen reference. Or set capo_mask='off'.")

    def capo(self) -> CapoOptions:
        """The options without their prefix."""
        return CapoOptions(**{spec.name: vars(self)[f"capo_{spec.name}"] for spec in fields(CapoOptions)})


class CapoTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with CAPO's advantages; takes the same arguments, and `args` must be a CapoTrainerConfig.

    Logs, beside TRL's metrics, `capo/kept` (share of responses that the noise mask keeps), `capo/correct` and
    `capo/advantage_abs_mean`. TRL's `frac_reward_zero_std` still tells how many groups train nothing. Raises
    ConfigError if the arguments do not fit, or another version of TRL is installed.
    """

    _tag_names = ("trl", "capo")  # these three are for TRL's model card
    _name = "CAPO"
    _paper = {  # noqa: RUF012 -- as in TRL's classes
        "title": "Calibration-Aware Policy Optimization",
        "id": "2604.12632",
        "citation": "@misc{capo, title = {Calibration-Aware Policy Optimization}, eprint = {arXiv:2604.12632}}",
    }

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: CapoTrainerConfig | None = None, *rest: Any, **named: Any
    ) -> None:
        require_version("trl", TRL, INSTALL)
        if not isinstance(args, CapoTrainerConfig):
            raise ConfigError(f"args: got {type(args).__name__}, expected a CapoTrainerConfig.")
        self._options = args.capo()
        self._all_rewards: Tensor | None = None
        beta = args.beta
        args.beta = beta or self._reference_beta
        try:
            super().__init__(model, reward_funcs, args, *rest, **named)
        finally:
            args.beta = beta
        self.beta = beta
        self._verdict = self._verdict_column(args.capo_correct_reward)

    @property
    def _reference_beta(self) -> float:
        return _TINY if self._options.mask == "on" else 0.0

    def _verdict_column(self, name: str | None) -> int:
        known = list(self.reward_func_names)
        if name is None and len(known) == 1:
            return 0
        if known.count(name) != 1:
            raise ConfigError(
                f"capo_correct_reward={name!r}: must name the one reward function that says whether a response is "
                f"correct. There are {', '.join(known)}."
            )
        return known.index(name)

    @contextmanager
    def _reference_for_the_mask(self) -> Iterator[None]:
        """Within, TRL scores the reference model, whatever `beta` is."""
        beta = self.beta
        self.beta = beta or self._reference_beta
        try:
            yield
        finally:
            self.beta = beta

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._all_rewards = super()._calculate_rewards(*args, **kwargs)
        return self._all_rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._reference_for_the_mask():
            output = super()._generate_and_score_completions(inputs)
        every, keep = self._capo_advantages(output)
        rows = len(output["advantages"])
        first = self.accelerator.process_index * rows
        output["advantages"] = every[first : first + rows]
        if self.beta == 0.0:
            output.pop("ref_per_token_logps", None)
        self._log_capo(every, keep)
        return output

    def _capo_advantages(self, output: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Advantages of the rows of all processes, and which of them the noise mask keeps."""
        if self._all_rewards is None:
            raise TrainingError("TRL computed advantages without its _calculate_rewards; CAPO has no rewards.")
        mask = output["completion_mask"]
        mask = mask * output["tool_mask"] if "tool_mask" in output else mask
        own, answered = sequence_logprob_mean(self._sampling_logprobs(output).float(), mask)
        columns = [own, answered.to(own.dtype)]
        if self._options.mask == "on":
            columns.append(sequence_logprob_mean(output["ref_per_token_logps"].float(), mask)[0])
        gathered = self.accelerator.gather(torch.stack(columns, dim=1))
        reward = self._all_rewards[:, self._verdict]
        valid = (gathered[:, 1] > 0.5) & ~reward.isnan()
        group = torch.arange(len(reward), device=reward.device) // self._group_size
        reference = gathered[:, 2] if self._options.mask == "on" else None
        return row_advantages(self._options, gathered[:, 0], valid, reward.nan_to_num(nan=0.0), group, reference)

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @torch.no_grad()
    def _sampling_logprobs(self, output: dict[str, Any]) -> Tensor:
        """[rows, T] log-probs of the policy that sampled, by the trainer's forward pass."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        per_device = "train" if self.model.training else "eval"
        multimodal = inspect.signature(self._get_per_token_logps_and_entropies).parameters.keys() & output.keys()
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            output["completion_ids"].size(1),
            batch_size=vars(self.args)[f"per_device_{per_device}_batch_size"],
            **{name: output[name] for name in multimodal},
        )
        return logprobs

    def _log_capo(self, every: Tensor, keep: Tensor) -> None:
        assert self._all_rewards is not None
        correct = (self._all_rewards[:, self._verdict] > self._options.correct_above).float().mean()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["capo/kept"].append(keep.float().mean().item())
        metrics["capo/correct"].append(correct.item())
        metrics["capo/advantage_abs_mean"].append(every.abs().mean().item())
        logged = self._logs["advantages"]  # TRL has appended its own
        for _ in range(min(len(every), len(logged))):
            logged.pop()
        logged.extend(every.tolist())
