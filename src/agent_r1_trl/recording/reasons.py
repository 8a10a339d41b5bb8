"""What the advantages of a recorded trajectory come from: the returns of its group, and the estimator."""

from __future__ import annotations

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
    """One line on the advantages of a trajectory that was trained on: the returns of its group, and the estimator.

    Args:
        record: a trajectory; "" for one that was not trained on.
        group: of its step, itself included.
    """
    item = record.trajectory
    if record.split != "train" or item.advantages is None:
        return ""
    how = record.estimator or "estimator not recorded"
    how += f", scale_rewards {record.scale}" if record.scale else ""
    how += "; replaced by another group, so not trained on" if item.is_replaced else ""
    mates = ", ".join(_member(mate) + " (this)" * (mate is item) for mate in group)
    return f"group of {len(group)}: {mates}; {how}" if len(group) > 1 else f"return {_member(item)}; {how}"


def _member(item: Trajectory) -> str:
    return f"{item.total_reward:+.3f}" if item.in_baseline else f"none ({item.stop_reason.value})"
