"""Places what reward functions return on turns and outcomes, and says which trajectories count where.

A trajectory is *in the baseline* if its reward counts in the statistics of its group or batch, and *in the loss* if
its action tokens enter the loss (`agent_r1_trl.trajectory` defines both).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.rollouts import PlayedBatch
from agent_r1_trl.trajectory import Trajectory


def environment_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
    """TRL reward function that carries the environment's return; None for an infrastructure failure."""
    return [None if item.stop_reason.is_infrastructure_failure else item.total_reward for item in trajectory]


class Rewards:
    """Places rewards on the trajectories of a batch, in the two moments at which they are known.

    Args:
        args: of the trainer.
        turn_reward_funcs: functions that return one number per turn.

    Raises:
        ValueError: if `turn_reward_weights` does not hold one weight per function.
    """

    def __init__(self, args: MultiTurnConfig, turn_reward_funcs: Sequence[Callable]) -> None:
        self.turn_reward_funcs = list(turn_reward_funcs)
        self.turn_reward_weights = check_weights(args.turn_reward_weights, self.turn_reward_funcs)
        self.truncated_trajectories = args.truncated_trajectories
        self.truncation_penalty = args.truncation_penalty

    def place_on_turns(self, trajectories: Sequence[Trajectory], rows: Sequence[dict[str, Any]]) -> None:
        """Before TRL calls its reward functions: the penalty for truncation, and the user's rewards for turns."""
        if self.truncated_trajectories == "penalise":
            penalise_truncated(trajectories, self.truncation_penalty)
        add_turn_rewards(trajectories, rows, self.turn_reward_funcs, self.turn_reward_weights)

    def place_on_outcomes(
        self,
        trajectories: Sequence[Trajectory],
        values: torch.Tensor,
        *,
        functions: Sequence[Callable],
        names: Sequence[str],
        weights: Sequence[float],
    ) -> None:
        """After TRL has called its reward functions: their weighted values become part of the outcomes.

        Args:
            trajectories: B of them.
            values: (B, F) what each function returned, NaN for rows that it did not score.
            functions: F of them; `environment_reward` is what the trajectories hold already.
            names: of the functions, for the metrics.
            weights: of the functions.
        """
        for column, (function, name, weight) in enumerate(zip(functions, names, weights, strict=True)):
            if function is environment_reward:
                continue
            for trajectory, value in zip(trajectories, values[:, column].tolist(), strict=True):
                if value == value:  # not NaN: the function scored this row
                    trajectory.outcome_reward += weight * value
                    trajectory.reward_parts[name] = trajectory.reward_parts.get(name, 0.0) + weight * value

    def in_loss(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory's action tokens enter the loss, if some reward function scores it."""
        if trajectory.stop_reason.is_infrastructure_failure:
            return False
        return not (trajectory.stop_reason.is_truncated and self.truncated_trajectories == "mask")

    def settle(
        self, played: PlayedBatch, *, functions: Sequence[Callable], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        """After TRL has called its reward functions: place their values, and say which rows count where.

        Args:
            played: with its `reward_values`; gets `in_baseline` and `in_loss`.
            functions: as for `place_on_outcomes`, like `names` and `weights`.
            names: of the functions.
            weights: of the functions.
        """
        trajectories, values = played.trajectories, played.reward_values
        self.place_on_outcomes(trajectories, values, functions=functions, names=names, weights=weights)
        played.in_baseline = in_baseline(trajectories, values)
        trained = [self.in_loss(item) and bool(item.completion_ids) for item in trajectories]
        played.in_loss = played.in_baseline & torch.tensor(trained, device=values.device)


def in_baseline(trajectories: Sequence[Trajectory], values: torch.Tensor) -> torch.Tensor:
    """(B,) bool: whether the trajectory's reward counts in baselines: the policy is answerable and somebody scored it.

    Args:
        trajectories: B of them.
        values: (B, F) what each reward function returned, NaN for rows that it did not score.
    """
    failed = torch.tensor([t.stop_reason.is_infrastructure_failure for t in trajectories], device=values.device)
    return ~(values.isnan().all(dim=1) | failed)


def penalise_truncated(trajectories: Sequence[Trajectory], penalty: float) -> None:
    """Add `penalty` to the outcome of every trajectory that a limit ended."""
    for trajectory in trajectories:
        if trajectory.stop_reason.is_truncated:
            trajectory.outcome_reward += penalty
            trajectory.reward_parts["truncation_penalty"] = penalty


def check_weights(weights: Sequence[float] | None, functions: Sequence[Callable]) -> list[float]:
    """One weight per function; 1 each where none are given.

    Raises:
        ValueError: if there are more or fewer weights than functions.
    """
    if weights is None:
        return [1.0] * len(functions)
    if len(weights) != len(functions):
        raise ValueError(
            f"turn_reward_weights={list(weights)} has {len(weights)} entries for {len(functions)} turn_reward_funcs. "
            "Give one weight per function, or remove turn_reward_weights."
        )
    return [float(weight) for weight in weights]


def add_turn_rewards(
    trajectories: Sequence[Trajectory],
    rows: Sequence[dict[str, Any]],
    functions: Sequence[Callable],
    weights: Sequence[float],
) -> None:
    """Call each function once for the whole batch and add its weighted values to the turns.

    A function receives `trajectory` (list of `Trajectory`) and the data set's columns as lists, as TRL's reward
    functions do, and returns per trajectory a list with one number per turn; None, for a turn or a whole trajectory,
    means no reward.

    Raises:
        ValueError: the shape does not fit, or a value is not finite; names the function and the trajectory.
    """
    names = sorted({name for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names if name != "trajectory"}
    for function, weight in zip(functions, weights, strict=True):
        name = getattr(function, "__name__", type(function).__name__)
        values = function(trajectory=list(trajectories), **columns)
        if len(values) != len(trajectories):
            raise ValueError(
                f"turn_reward_funcs: {name} returned {len(values)} lists for {len(trajectories)} trajectories. Return "
                "one list per trajectory."
            )
        for trajectory, per_turn in zip(trajectories, values, strict=True):
            _add(trajectory, per_turn, weight=weight, name=name)


def _add(trajectory: Trajectory, per_turn: Sequence[float | None] | None, *, weight: float, name: str) -> None:
    if per_turn is None or trajectory.stop_reason.is_infrastructure_failure:
        return
    if len(per_turn) != len(trajectory.turns):
        raise ValueError(
            f"turn_reward_funcs: {name} returned {len(per_turn)} values for {trajectory!r}. Return one value per turn "
            "(`trajectory.turns`), None for no reward."
        )
    for turn, value in zip(trajectory.turns, per_turn, strict=True):
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(
                f"turn_reward_funcs: {name} returned {value} for {trajectory!r}. Return finite numbers, or None for "
                "no reward."
            )
        turn.reward += weight * value
        turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + weight * value
