"""CAPO in verl (written against verl 0.9.1): the advantage estimator "capo".

    capo_verl.py, anywhere on the path:    from capo_megatron.adapters import CapoOptions, verl
                                           verl.register(CapoOptions(tau=0.6))

    VERL_USE_EXTERNAL_MODULES=capo_verl python -m verl.trainer.main_ppo algorithm.adv_estimator=capo \
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0 \
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean ...

verl imports the named module wherever verl itself is imported, thus also in the Ray actor that trains; pass the
variable on with `+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=capo_verl`.

**Why more than a registration.** verl's `compute_advantage(data, adv_estimator, ...)` hands a registered estimator only
`token_level_rewards`, `response_mask`, `config`, `index` (the uid) and `reward_baselines`: no log-probs, although they
lie in `data.batch` as `old_log_probs` and `ref_log_prob` by then. `register` therefore also wraps `compute_advantage`
where verl looks it up: for "capo" the wrapper hands them over, everything else goes through untouched.

`ref_log_prob` is there only if verl has a reason to load a reference model: `use_kl_loss=True`, with a coefficient of 0
(above). Rewards are `token_level_scores`, what the reward function gave. A KL penalty in the reward would have no
effect on these advantages and is refused. Advantages are computed in one process for the whole batch: no gather.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capo_megatron.adapters import CapoOptions, require_version, row_advantages
from capo_megatron.algorithms.equations import sequence_logprob_mean
from capo_megatron.errors import ConfigError, ShapeError

VERL = "0.9.1"
NAME = "capo"
# Modules that hold `compute_advantage` under that name, if they are imported.
_HOLDERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.utils",
    "verl.experimental.separation.ray_trainer",
)
_REFERENCE = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0"


def register(options: CapoOptions | None = None) -> None:
    """Make `algorithm.adv_estimator=capo` known to verl, with these options, in this process.

    Call it before a trainer is made. A second call replaces the options of the first. Raises MissingTrainerError
    without verl, and ConfigError for another version of it.
    """
    require_version("verl", VERL, f"pip install verl=={VERL}")
    estimator = Estimator(options or CapoOptions())
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    core.ADV_ESTIMATOR_REGISTRY.pop(NAME, None)
    core.register_adv_est(NAME)(estimator)
    importlib.import_module(_HOLDERS[0])
    for name in _HOLDERS:
        if name in sys.modules:
            holder: Any = sys.modules[name]
            theirs = holder.compute_advantage
            theirs = theirs.theirs if isinstance(theirs, HandingOver) else theirs
            holder.compute_advantage = HandingOver(theirs, estimator)


class Estimator:
    """An estimator of verl's registry; `old_log_probs` and `ref_log_prob` come from `HandingOver`."""

    def __init__(self, options: CapoOptions) -> None:
        self.options = options

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | None = None,
        config: Any = None,
        old_log_probs: Tensor | None = None,
        ref_log_prob: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """[B, T] advantages, twice: verl's "advantages" and "returns".

        `token_level_rewards`, `response_mask`, `old_log_probs`, `ref_log_prob` [B, T], of responses only; `index` [B]
        the uid of each row's prompt. Raises ConfigError if something that CAPO needs is missing.
        """
        if old_log_probs is None:
            raise ConfigError("algorithm.adv_estimator=capo: got no old_log_probs. Register it by `verl.register()`.")
        if index is None:
            raise ShapeError("non_tensor_batch['uid'] is missing: CAPO compares the responses to one prompt.")
        own, answered = sequence_logprob_mean(old_log_probs.float(), response_mask)
        reference = None
        if self.options.mask == "on":
            if ref_log_prob is None:
                raise ConfigError(f"the noise mask needs a reference model: set {_REFERENCE}, or mask='off'.")
            reference, _ = sequence_logprob_mean(ref_log_prob.float(), response_mask)
        uids = np.unique(np.asarray(index).astype(str), return_inverse=True)[1]
        group = torch.as_tensor(uids.reshape(-1), device=own.device)
        reward = token_level_rewards.float().sum(dim=1)
        every, _ = row_advantages(self.options, own, answered, reward, group, reference)
        advantages = every.unsqueeze(1) * response_mask
        return advantages, advantages.clone()


@dataclass(frozen=True)
class HandingOver:
    """verl's `compute_advantage` that, for "capo", runs `estimator` with the log-probs that lie in the batch."""

    theirs: Callable[..., Any]
    estimator: Estimator

    def __call__(self, data: Any, adv_estimator: Any, *rest: Any, **options: Any) -> Any:
        if adv_estimator != NAME:
            return self.theirs(data, adv_estimator, *rest, **options)
        config = options.get("config")
        if isinstance(config, Mapping) and config.get("use_kl_in_reward"):
            raise ConfigError(
                f"algorithm.use_kl_in_reward=True: CAPO's advantages do not see it. Turn it off; set {_REFERENCE}."
            )
        data.batch["advantages"], data.batch["returns"] = self.estimator(
            token_level_rewards=data.batch["token_level_scores"],
            response_mask=data.batch["response_mask"],
            index=data.non_tensor_batch.get("uid"),
            config=config,
            old_log_probs=_optional(data.batch, "old_log_probs"),
            ref_log_prob=_optional(data.batch, "ref_log_prob"),
        )
        return data


def _optional(batch: Any, name: str) -> Tensor | None:
    return batch[name] if name in batch.keys() else None  # noqa: SIM118 -- a TensorDict has no `in`
