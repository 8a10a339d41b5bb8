"""Rewards of whole trajectories, and which trajectories count: in the baselines, in the loss.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> [rewards on tokens] -> [filter]
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_r1_trl.trajectory import Trajectory


def environment_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
    """TRL reward function that carries the environment's return; None for a lost trajectory."""
    return [None if item.stop_reason.is_infrastructure_failure else item.total_reward for item in trajectory]


def penalise_truncated(trajectories: Sequence[Trajectory], penalty: float) -> None:
    """Add `penalty` to the outcome of every trajectory that a limit ended."""
    for trajectory in trajectories:
        if trajectory.stop_reason.is_truncated:
            trajectory.outcome_reward += penalty
            trajectory.reward_parts["truncation_penalty"] = penalty


def add_outcome_rewards(
    trajectories: Sequence[Trajectory],
    rewards: torch.Tensor,
    functions: Sequence[Callable],
    names: Sequence[str],
    weights: Sequence[float],
) -> None:
    """Add the weighted values of the user's reward functions to the outcomes.

    Args:
        trajectories: B of them.
        rewards: (B, F) what each function returned, NaN for rows that it did not score.
        functions: F of them; `environment_reward` is what the trajectories hold already.
        names: of the functions, for the metrics.
        weights: of the functions.
    """
    for column, (function, name, weight) in enumerate(zip(functions, names, weights, strict=True)):
        if function is environment_reward:
            continue
        for trajectory, value in zip(trajectories, rewards[:, column].tolist(), strict=True):
            if value == value:  # not NaN: the function scored this row
                trajectory.outcome_reward += weight * value
                trajectory.reward_parts[name] = trajectory.reward_parts.get(name, 0.0) + weight * value


def lost_rows(trajectories: Sequence[Trajectory], rewards: torch.Tensor) -> torch.Tensor:
    """(B,) bool: trajectories that leave every baseline (not the policy's fault, or nobody scored them).

    Args:
        trajectories: B of them.
        rewards: (B, F) what each reward function returned, NaN for rows that it did not score.
    """
    failed = torch.tensor([t.stop_reason.is_infrastructure_failure for t in trajectories], device=rewards.device)
    return rewards.isnan().all(dim=1) | failed


def is_trained_on(trajectory: Trajectory, truncated_trajectories: str) -> bool:
    """Whether a trajectory's action tokens enter the loss.

    Args:
        trajectory: a finished one.
        truncated_trajectories: the policy for those that a limit ended (`mask` keeps them out).
    """
    if trajectory.stop_reason.is_infrastructure_failure:
        return False
    return not (trajectory.stop_reason.is_truncated and truncated_trajectories == "mask")
