"""Turn rewards from the user's functions, and how their weight moves over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.trajectory import Trajectory


def check_weights(weights: Sequence[float] | None, functions: Sequence[Callable]) -> list[float]:
    """One factor per function.

    Raises:
        ValueError: if there are more or fewer.
    """
    if weights is None:
        return [1.0] * len(functions)
    if len(weights) != len(functions):
        raise ValueError(
            f"turn_reward_weights={list(weights)} has {len(weights)} entries for {len(functions)} turn_reward_funcs: "
            "give one weight per function, or remove turn_reward_weights."
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
    is no reward.

    Raises:
        ValueError: if the shape does not fit, naming the function and the trajectory.
    """
    names = sorted({name for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names if name not in ("trajectory",)}
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


def schedule_factor(schedule: str, progress: float) -> float:
    """1 at the start of a run; with `linear` and `cosine` 0 at its end.

    Args:
        schedule: `constant`, `linear` or `cosine`.
        progress: share of the run that is over.

    >>> schedule_factor("linear", 0.25), schedule_factor("constant", 0.25)
    (0.75, 1.0)
    """
    progress = min(1.0, max(0.0, progress))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
