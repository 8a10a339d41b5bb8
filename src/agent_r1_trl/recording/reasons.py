"""Why a recorded trajectory has the advantage that it has: the returns of its group, and the estimator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from agent_r1_trl.recording.store import Record
from agent_r1_trl.trajectory import Trajectory


def groups_of(records: Sequence[Record]) -> list[list[Trajectory]]:
    """For each record the trajectories of its group, by generation.

    An example that was drawn twice in a step has two groups: the second trajectory of a generation opens another one.
    """
    seen: Counter[tuple] = Counter()
    groups: dict[tuple, list[Trajectory]] = {}
    keys = []
    for record in records:
        item = record.trajectory
        place = (record.split, record.step, item.example_id, item.is_replaced)
        keys.append((*place, seen[(*place, item.generation)]))
        seen[(*place, item.generation)] += 1
        groups.setdefault(keys[-1], []).append(item)
    return [sorted(groups[key], key=lambda item: item.generation) for key in keys]


def explain_advantage(record: Record, group: Sequence[Trajectory]) -> str:
    """Two lines: the advantage and where it comes from; the returns of the group and the estimator.

    Args:
        record: a trajectory that was trained on; "" for any other.
        group: of its step, itself included.
    """
    item = record.trajectory
    if record.split != "train" or item.advantages is None:
        return ""
    values = [value for value, mask in zip(item.advantages, item.action_mask, strict=True) if mask]
    first = values[0] if values else 0.0
    if all(_is_close(value, first) for value in values):
        shown = "advantage 0" if first == 0 else f"advantage {first:+.3f}"
    else:
        shown = f"advantages {min(values):+.3f} to {max(values):+.3f}"
    how = record.estimator or "estimator not recorded"
    how += f", scale_rewards {record.scale}" if record.scale else ""
    mates = ", ".join(_member(mate) + " (this)" * (mate is item) for mate in group)
    cause = _cause(item, values, group)
    returns = f"group of {len(group)}: {mates}" if len(group) > 1 else f"return {item.total_reward:+.3f}"
    return f"{shown}{cause}\n{returns}; {how}"


def _cause(item: Trajectory, values: Sequence[float], group: Sequence[Trajectory]) -> str:
    """What follows an advantage of 0."""
    returns = [mate.total_reward for mate in group if mate.in_baseline]
    if item.is_replaced:
        return ": not trained on; its group taught nothing, and another took its place"
    if not values:
        return ": nothing was sampled"
    if item.stop_reason.is_infrastructure_failure:
        return f": {item.stop_reason.value}, so it does not count"
    if not item.in_baseline:
        why = "too few of its group are left" if item.is_group_too_small else "nothing scored it"
        return f": {why}, so it does not count"
    is_equal = len(group) > 1 and all(_is_close(value, returns[0]) for value in returns)
    return ": the returns of its group are equal" if is_equal and not any(values) else ""


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)


def _member(item: Trajectory) -> str:
    return f"{item.total_reward:+.3f}" if item.in_baseline else f"none ({item.stop_reason.value})"
