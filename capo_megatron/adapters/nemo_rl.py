"""CAPO in NeMo-RL: an advantage estimator, a loss, and `install`, which makes NeMo-RL know the estimator by name.

Written against NVIDIA-NeMo/RL at commit 7ea279abfbeb (2026-08-22, package version 0.6.0). In the script that starts
training (a copy of its examples/run_grpo.py), before `setup`:

    from capo_megatron.adapters import nemo_rl
    nemo_rl.install()                                             # grpo.adv_estimator.name: capo
    ...
    loss_fn = nemo_rl.CapoLoss(config.loss_fn)                    # optional, after `setup`: instead of NeMo-RL's

    grpo:
      adv_estimator: {name: capo, tau: 0.6, ref_high: 2.5, ref_low: 1.05}     # any of CapoOptions
    loss_fn: {reference_policy_kl_penalty: 1.0e-9, force_on_policy_ratio: false, token_level_loss: false}

**What NeMo-RL hands over.** `grpo_train`, `grpo_train_sync` and `async_grpo_train` call `compute_advantage` with
`logprobs_policy` (its `prev_logprobs`: the policy that sampled, by the trainer) and `logprobs_reference`, both [B, S],
column t about token t, as `mask` is. NeMo-RL has **zeros instead of log-probs** where a setting makes it skip a forward
pass, and zeros look like perfect certainty. So both settings are refused here: `force_on_policy_ratio` (no policy
log-probs) and, with the noise mask on, `reference_policy_kl_penalty: 0` (no reference model). A penalty of 1e-9 loads
the reference and changes nothing. Zeros are refused as well, in case another setting does the same.

Advantages are computed on the driver from the whole step: no gather is needed. The loss travels to NeMo-RL's workers,
which therefore need this package in their environment. NeMo-RL's own ClippedPGLossFn works with the estimator too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from capo_megatron.adapters import CapoOptions, MissingTrainerError, row_advantages
from capo_megatron.algorithms.equations import (
    clipped_surrogate,
    importance_ratio,
    kl_penalty,
    reduction_weights,
    sequence_logprob_mean,
)
from capo_megatron.errors import ConfigError, ShapeError

COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"

# Fields of NeMo-RL's AdvEstimatorConfig that belong to its own estimators.
_THEIRS = {"name", "normalize_rewards", "use_leave_one_out_baseline", "reward_weights", "minus_baseline"}
# Where the trainers look `_create_advantage_estimator` up.
_TRAINERS = ("nemo_rl.algorithms.grpo", "nemo_rl.algorithms.grpo_sync")
# What is read of NeMo-RL's ClippedPGLossConfig, with its defaults.
_LOSS: dict[str, Any] = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "token_level_loss": True,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
}
# Its settings that `CapoLoss` has no term for, and their neutral values, which are the defaults.
_WITHOUT: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "sequence_level_importance_ratios": False,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}


class CapoAdvantageEstimator:
    """CAPO after the contract of NeMo-RL's advantage estimators.

    `estimator_config` is `grpo.adv_estimator`: any of `CapoOptions` beside `name`. `loss_config` is `loss_fn`. Both are
    NeMo-RL's pydantic models or mappings. `last_metrics` holds what the last call saw; async_grpo_train logs it.
    Raises ConfigError on unknown options and on settings that make NeMo-RL skip what CAPO needs.
    """

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        given = {name: value for name, value in _mapping(estimator_config).items() if name not in _THEIRS}
        self.options = CapoOptions.of(given, "grpo.adv_estimator")
        self.last_metrics: dict[str, float] = {}
        loss = {**_LOSS, **_WITHOUT, **_mapping(loss_config)}
        if loss["force_on_policy_ratio"]:
            raise ConfigError(
                "loss_fn.force_on_policy_ratio=True: NeMo-RL then skips the policy's log-probs, from which CAPO's "
                "advantages come. Set it to false."
            )
        if self.options.mask == "on" and not loss["reference_policy_kl_penalty"] > 0:
            raise ConfigError(
                f"loss_fn.reference_policy_kl_penalty={loss['reference_policy_kl_penalty']}: NeMo-RL then loads no "
                "reference model, which CAPO's noise mask needs. Set it to 1.0e-9, or grpo.adv_estimator.mask to off."
            )

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """[B, S] advantages, the same on all tokens of a response, 0.0 off the mask.

        `prompt_ids` [B, P] padded token ids, equal for the responses to one prompt (or [B] ids); `rewards` [B];
        `mask` [B, S] tokens of responses that train; `logprobs_policy`, `logprobs_reference` [B, S] in nats. The other
        keywords are those of NeMo-RL's other estimators. Raises ShapeError if log-probs are missing or all zero.
        """
        own, answered = _means("logprobs_policy", logprobs_policy, mask)
        reference = None
        if self.options.mask == "on":
            reference, _ = _means("logprobs_reference", logprobs_reference, mask)
        group = torch.unique(prompt_ids, dim=0, return_inverse=True)[1].to(own.device)
        every, keep = row_advantages(self.options, own, answered, rewards.to(own.device), group, reference)
        self.last_metrics = {
            "capo/kept": keep.float().mean().item(),
            "capo/correct": (rewards > self.options.correct_above).float().mean().item(),
            "capo/advantage_abs_mean": every.abs().mean().item(),
        }
        return every.unsqueeze(1) * mask.bool()


class CapoLoss:
    """PPO's clipped loss after NeMo-RL's LossFunction Protocol, averaged over responses or tokens.

    `loss_config` is `loss_fn` (ClippedPGLossConfig or a mapping). Read are `ratio_clip_min`, `ratio_clip_max`,
    `ratio_clip_c` (dual clip), `token_level_loss` (false: the mean over responses, which fits CAPO's derivation),
    `reference_policy_kl_penalty` and `reference_policy_kl_type`. Settings that it has no term for raise ConfigError.
    `use_fused_linear_logprobs` as given to NeMo-RL's own loss: take it from the one that `setup` returns.
    """

    def __init__(self, loss_config: Any, use_fused_linear_logprobs: bool = False) -> None:
        config = {**_LOSS, **_WITHOUT, **_mapping(loss_config)}
        for name, neutral in _WITHOUT.items():
            if config[name] != neutral:
                raise ConfigError(
                    f"loss_fn.{name}={config[name]!r}: CapoLoss has no such term. Leave it at {neutral!r}, or keep "
                    "NeMo-RL's ClippedPGLossFn, which works with CAPO's advantages."
                )
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.reference_policy_kl_penalty = float(config["reference_policy_kl_penalty"])
        self._kl_kind = config["reference_policy_kl_type"]
        self._clip = (config["ratio_clip_min"], config["ratio_clip_max"], config["ratio_clip_c"])
        self._per_token = bool(config["token_level_loss"])

    @property
    def loss_type(self) -> Any:
        """NeMo-RL's LossType: which count of the whole batch normalises the gradient."""
        kinds = _import("nemo_rl.algorithms.loss.interfaces").LossType
        return kinds.TOKEN_LEVEL if self._per_token else kinds.SEQUENCE_LEVEL

    @property
    def input_type(self) -> Any:
        """NeMo-RL's LossInputType: `__call__` gets `next_token_logprobs`."""
        return _import("nemo_rl.algorithms.loss.interfaces").LossInputType.LOGPROB

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """By which count each metric was divided, for trainers that put micro-batches together."""
        kinds = _import("nemo_rl.algorithms.loss.interfaces").MetricNormalizer
        gradient = kinds.TOKENS if self._per_token else kinds.SEQUENCES
        tokens = dict.fromkeys(("probs_ratio", "token_mult_prob_error"), kinds.TOKENS)
        return {"loss": gradient, "kl_penalty": gradient, "num_valid_samples": kinds.NONE, **tokens}

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The share of these rows in the loss of the whole batch, and metrics.

        `next_token_logprobs` [b, S-1]; `data` has `token_mask`, `advantages`, `prev_logprobs`, `generation_logprobs`,
        `reference_policy_logprobs` [b, S] and `sample_mask` [b]; the counts are those of the whole batch.
        """
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        keep = mask.bool()
        now, old = _inside(next_token_logprobs, keep), _inside(data["prev_logprobs"][:, 1:], keep)
        loss = clipped_surrogate(now, old, data["advantages"][:, 1:], *self._clip)
        weights = self._weights(keep, global_valid_seqs, global_valid_toks) * data["sample_mask"].unsqueeze(1)
        penalty = now.new_zeros(())
        if self.reference_policy_kl_penalty:
            unfiltered = _inside(data.get("curr_logprobs_unfiltered", next_token_logprobs), keep)
            reference = _inside(data["reference_policy_logprobs"][:, 1:], keep)
            penalty = (kl_penalty(unfiltered, reference, self._kl_kind) * weights).sum()
        total = (loss * weights).sum() + self.reference_policy_kl_penalty * penalty
        with torch.no_grad():
            per_token = keep.float() / global_valid_toks.clamp(min=1)
            drift = (_inside(data["generation_logprobs"][:, 1:], keep) - old).abs().exp()
            metrics = {
                "loss": total.item(),
                "kl_penalty": penalty.item(),
                "probs_ratio": (importance_ratio(now, old) * per_token).sum().item(),
                "token_mult_prob_error": (drift * per_token).sum().item(),
                "num_valid_samples": data["sample_mask"].sum().item(),
            }
        return total, metrics

    def _weights(self, keep: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        if self._per_token:
            return keep.float() / tokens.clamp(min=1)
        own = reduction_weights(keep, "seq-mean-token-mean")  # over these rows; the rest are elsewhere
        return own * keep.any(dim=1).sum() / rows.clamp(min=1)


def install() -> None:
    """Make `grpo.adv_estimator.name: capo` mean CapoAdvantageEstimator in NeMo-RL, which has no registry for it.

    Every other name goes to NeMo-RL as before. Call it before training starts, in the driver process; calling it twice
    changes nothing. Raises MissingTrainerError without NeMo-RL.
    """
    for name in _TRAINERS:
        trainer = _import(name)
        create = trainer._create_advantage_estimator
        if not isinstance(create, _Create):
            trainer._create_advantage_estimator = _Create(create)


class _Create:
    """NeMo-RL's `_create_advantage_estimator`, which also knows CAPO."""

    def __init__(self, theirs: Callable[[Any], Any]) -> None:
        self._theirs = theirs

    def __call__(self, master_config: Any) -> Any:
        chosen = master_config.grpo.adv_estimator
        if _mapping(chosen)["name"] != "capo":
            return self._theirs(master_config)
        return CapoAdvantageEstimator(chosen, master_config.loss_fn)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingTrainerError(
            f"{name} cannot be imported ({error}). The adapter is for github.com/NVIDIA-NeMo/RL at {COMMIT[:12]}."
        ) from error


def _mapping(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else config.model_dump()


def _means(name: str, logprobs: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    if logprobs is None:
        raise ShapeError(f"{name}: not handed over. CAPO needs it, see capo_megatron/adapters/nemo_rl.py.")
    inside = mask.bool()
    if inside.any() and not logprobs[inside].any():
        raise ShapeError(f"{name}: all zero. NeMo-RL has skipped this forward pass; turn it on again.")
    return sequence_logprob_mean(logprobs.float(), inside.to(logprobs.device))


def _inside(value: Tensor, keep: Tensor) -> Tensor:
    """`value` with 0.0 off the mask, where it may hold anything."""
    return torch.where(keep, value.float(), 0.0)
