"""Checks of the training arguments where a trajectory may have several training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_r1_trl.rollout.context_policies import find_policy, has_row_per_turn

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

LOSS_UNITS = ("token", "turn", "trajectory")
WHOLE_ROWS = {
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "loss_mask": True,
    "advantage_mask": True,
}
"""Options that look at a row as a whole, or at observations that another row holds: the only value accepted."""


def check_rows(config: MultiTurnConfig) -> None:
    """Where a trajectory may have several rows, nothing may be computed over a row as if it were all there is."""
    policy = find_policy(config)
    if config.context_policy == "keep":
        return
    asked = f"with context_policy={config.context_policy!r}"
    for name, accepted in WHOLE_ROWS.items():
        is_of_turns = name == "importance_sampling_level" and has_row_per_turn(policy)  # then a ratio is a turn's
        if getattr(config, name) != accepted and not is_of_turns:
            raise ValueError(
                f"{name}={getattr(config, name)!r} {asked}: it is computed over whole rows, and a row may hold only "
                f"some of a trajectory's turns. Set {name}={accepted!r}, or context_policy='keep'."
            )
    if config.loss_type == "vespo":
        raise ValueError(
            f"loss_type='vespo' {asked}: it weighs whole rows, and a row may hold only some of a trajectory's turns. "
            "Set another loss_type, or context_policy='keep'."
        )
