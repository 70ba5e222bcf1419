"""The shared maths, one function per named equation. Plain tensors in, plain tensors out: usable from any trainer.

Every function keeps the floating dtype it is given (half precisions are computed in float32 and rounded back, integer
rewards become torch's default dtype), works on any device, and checks what it is handed. Symbols: R reward, `olp` and
`lp` log-probs of a token under the sampling and the current policy, m response mask, n_i response length, G group size.

    pairwise    CAPO's advantages and noise mask
    group       advantages, filters and weights from group statistics: GRPO, Dr.GRPO, DAPO, CoDaPO
    rewards     shaped rewards: DAPO's length penalty, CDE's bonus, DCPO's confidence
    credit      which tokens deserve more or less: SimKO, SCAPO
    losses      ratios, clipped surrogates, KL: PPO, GSPO, SimKO; corrections for the engine's log-probs
    sequences   means over responses and the weights of a reduction

Advantages, weights and masks are constants: they never carry a gradient. Errors: `ShapeError` for a tensor of the wrong
type, shape, device or content (non-finite values are named by row), `ConfigError` for an option out of range.
"""

from capo_megatron.algorithms.equations.credit import scapo_credit, simko_selected
from capo_megatron.algorithms.equations.group import (
    Singleton,
    codapo_select,
    codapo_weight,
    dapo_keep_group,
    grpo_advantage,
)
from capo_megatron.algorithms.equations.losses import (
    KL_LIMIT,
    LOG_RATIO_LIMIT,
    SEQUENCE_LOG_RATIO_LIMIT,
    ImportanceLevel,
    KlKind,
    clipped_ratio_loss,
    clipped_surrogate,
    gspo_surrogate,
    importance_ratio,
    importance_weight,
    kl_penalty,
    simko_ratio,
    within_importance_bound,
)
from capo_megatron.algorithms.equations.pairwise import (
    PAIRS_AT_ONCE,
    Norm,
    Surrogate,
    capo_advantage,
    capo_noise_mask,
)
from capo_megatron.algorithms.equations.rewards import (
    CONFIDENCE_TAG,
    Distance,
    cde_shaped_reward,
    dapo_overlong_penalty,
    dcpo_confidence_reward,
    dcpo_targets,
    parse_confidence,
)
from capo_megatron.algorithms.equations.sequences import ReductionMode, reduction_weights, sequence_logprob_mean

__all__ = [
    "CONFIDENCE_TAG",
    "KL_LIMIT",
    "LOG_RATIO_LIMIT",
    "PAIRS_AT_ONCE",
    "SEQUENCE_LOG_RATIO_LIMIT",
    "Distance",
    "ImportanceLevel",
    "KlKind",
    "Norm",
    "ReductionMode",
    "Singleton",
    "Surrogate",
    "capo_advantage",
    "capo_noise_mask",
    "cde_shaped_reward",
    "clipped_ratio_loss",
    "clipped_surrogate",
    "codapo_select",
    "codapo_weight",
    "dapo_keep_group",
    "dapo_overlong_penalty",
    "dcpo_confidence_reward",
    "dcpo_targets",
    "grpo_advantage",
    "gspo_surrogate",
    "importance_ratio",
    "importance_weight",
    "kl_penalty",
    "parse_confidence",
    "reduction_weights",
    "scapo_credit",
    "sequence_logprob_mean",
    "simko_ratio",
    "simko_selected",
    "within_importance_bound",
]
