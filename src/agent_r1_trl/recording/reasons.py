"""Why a recorded trajectory has the advantage that it has: its group, their returns, and how they became a number.

A formula is shown only where it gives the recorded advantage, so weights or a KL term in the rewards are never hidden.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from agent_r1_trl.recording.store import Record
from agent_r1_trl.trajectory import Trajectory

_FORMULAS = ("grpo", "dr_grpo", "rloo")
"""Estimators with one number per trajectory that follows from the returns of its group."""


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


def explain_advantage(record: Record, group: Sequence[Trajectory], batch: Sequence[Trajectory]) -> str:
    """Two lines: the advantage and where it comes from; the returns of the group and the estimator.

    Args:
        record: a trajectory that was trained on; "" for any other.
        group: of its step, itself included.
        batch: all trajectories of its step.
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
    cause = _cause(record, values, group, batch)
    returns = f"group of {len(group)}: {mates}" if len(group) > 1 else f"return {item.total_reward:+.3f}"
    return f"{shown}{cause}\n{returns}; {how}"


def _cause(record: Record, values: Sequence[float], group: Sequence[Trajectory], batch: Sequence[Trajectory]) -> str:
    """What follows the advantage: " = ...", ": ...", or nothing where one line cannot say it."""
    item = record.trajectory
    if item.is_replaced:
        return ": not trained on; its group taught nothing, and another was played in its place"
    if not values:
        return ": nothing was sampled"
    if not item.in_baseline:
        why = "too few of its group are left" if item.is_group_too_small else "nothing scored it"
        return (
            f": {item.stop_reason.value if item.stop_reason.is_infrastructure_failure else why}, so it does not count"
        )
    if record.estimator not in _FORMULAS:
        return ""
    returns = [mate.total_reward for mate in group if mate.in_baseline]
    is_zero = not any(values)
    if len(returns) < 2:
        return ": no other trajectory of its group counts" if is_zero else ""
    mean, std = statistics.fmean(returns), statistics.stdev(returns)
    if std <= 1e-6 * max(map(abs, returns)):
        return ": the returns of its group are equal" if is_zero else ""
    if is_zero and item.stop_reason.is_truncated and not _is_close(item.total_reward, mean):
        return f": cut by {item.stop_reason.value}, and such trajectories are not trained on"
    above = item.total_reward - mean
    text = f"return {item.total_reward:+.3f} - mean {mean:+.3f}"
    if record.estimator == "rloo":
        rest = (math.fsum(returns) - item.total_reward) / (len(returns) - 1)
        value, text = item.total_reward - rest, f"return {item.total_reward:+.3f} - mean of the others {rest:+.3f}"
    elif record.scale == "group":
        value, text = above / (std + 1e-4), f"({text}) / (std {std:.3f} + 1e-4)"
    elif record.scale == "batch":
        std = statistics.stdev(mate.total_reward for mate in batch if mate.in_baseline and not mate.is_replaced)
        value, text = above / (std + 1e-4), f"({text}) / (batch std {std:.3f} + 1e-4)"
    else:
        value = above
    return f" = {text}" if all(_is_close(value, other) for other in values) else ""


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)


def _member(item: Trajectory) -> str:
    return f"{item.total_reward:+.3f}" if item.in_baseline else f"none ({item.stop_reason.value})"
