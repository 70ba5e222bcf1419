"""Rewards: who says whether a response is right, without ever hanging the run.

functions   what the trainer calls: one RewardFunction per `reward.kind`
pool        grading processes: started, timed, killed and replaced
worker      what runs inside such a process; imports neither torch nor this package's parent side
scorers     the three things a worker can do: math-verify, reasoning-gym, a user's function
maths       when two mathematical answers count as the same, and the stated policy behind it
text        the answer in a response: the last \\boxed{...}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capo_megatron.config import RewardConfig
    from capo_megatron.seams import RewardFunction


def build_reward(config: RewardConfig) -> RewardFunction:
    """The reward function that `config.kind` names, its grading processes started and ready.

    Raises ConfigError for an unknown kind or an impossible limit, RewardError if the grading processes cannot start or
    a user's function cannot be loaded.
    """
    # Grading processes import this package, and must not pay for torch: hence not at the top of the file.
    from capo_megatron.rewards.functions import build

    return build(config)
