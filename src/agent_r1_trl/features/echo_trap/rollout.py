"""What one rollout says of the echo trap: statistics over its trajectories and over its prompt groups.

Only trajectories in the baseline count: an infrastructure failure is not the policy's silence.
"""

from __future__ import annotations

import hashlib
import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from agent_r1_trl.trajectory import Trajectory


def signal_record(trajectory: Trajectory) -> dict[str, Any]:
    """What the signals need from one trajectory, once it is scored: small enough to gather over ranks."""
    num_actions = trajectory.numbers.get("num_actions", 0)  # of a game, whose moves need not be tool calls
    return {
        "in_baseline": trajectory.in_baseline,
        "return": trajectory.total_reward - trajectory.reward_parts.get("truncation_penalty", 0.0),
        "has_call": bool(trajectory.tool_results) or num_actions > 0,
        "turns": [_digest(trajectory.completion_ids[turn.start : turn.end]) for turn in trajectory.env_turns],
        "length": trajectory.num_action_tokens,
        "log_prob": math.fsum(trajectory.logprobs),
        "success": trajectory.numbers.get("success"),
        "example_id": trajectory.example_id,
        "generation": trajectory.generation,
        "weight": 1.0,
    }


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(repr([*ids]).encode(), digest_size=8).hexdigest()


def group_keys(records: Sequence[dict[str, Any]]) -> list[Hashable]:
    """Which group each trajectory belongs to; an example that was sampled more than once has several groups."""
    seen: Counter[tuple[str, int]] = Counter()
    keys: list[Hashable] = []
    for record in records:
        member = (record["example_id"], record["generation"])
        keys.append((record["example_id"], seen[member]))
        seen[member] += 1
    return keys


def rollout_signals(records: Sequence[dict[str, Any]], groups: Sequence[Hashable]) -> dict[str, float]:
    """The signals of N trajectories of all ranks; `docs/echo-trap.md` has each formula.

    Each counts with its `weight`: what a curriculum draws more often counts less, so that the signals are those of a
    uniform draw.

    Args:
        records: of `signal_record`.
        groups: which group each belongs to, in any order.

    Returns:
        Keys of `judge`'s history. What these trajectories do not say is left out: `zero_std_share` where no group has
        two members, `success` where environments report none, `return_with_call` where nobody called.
    """
    kept = [(record, group) for record, group in zip(records, groups, strict=True) if record["in_baseline"]]
    if not kept:
        return {}
    returns = [record["return"] for record, _ in kept]
    weights = [record["weight"] for record, _ in kept]
    signals = {
        "reward": _mean(returns, weights),
        "reward_min": min(returns),
        "reward_max": max(returns),
        "inaction": _mean([not record["has_call"] for record, _ in kept], weights),
    }
    for name, key, some in (
        ("return_with_call", "return", [record for record, _ in kept if record["has_call"]]),
        ("return_without_call", "return", [record for record, _ in kept if not record["has_call"]]),
        ("success", "success", [record for record, _ in kept if record["success"] is not None]),
    ):
        if some:
            signals[name] = _mean([record[key] for record in some], [record["weight"] for record in some])
    members: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for record, group in kept:
        members[group].append(record)
    return signals | _group_signals([group for group in members.values() if len(group) > 1])


def _group_signals(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Signals of groups of at least two trajectories."""
    if not groups:
        return {}
    stds = [_spread([record["return"] for record in group]) for group in groups]
    weights = [group[0]["weight"] for group in groups]
    signals = {
        "reward_std": _mean(stds, weights),
        "zero_std_share": _mean([std == 0 for std in stds], weights),
    }
    num_turns = [sum(len(record["turns"]) for record in group) for group in groups]
    if any(num_turns):
        repeated = math.fsum(map(operator.mul, map(_num_repeated, groups), weights))
        signals["repetition"] = repeated / math.fsum(map(operator.mul, num_turns, weights))
    return signals


def entropy_factor(records: Sequence[dict[str, Any]], is_trained: Sequence[bool]) -> float:
    """What the entropy over the trained trajectories is multiplied by to get that over all of them.

    The mean negative log-prob of sampled tokens estimates their entropy, and is known for tokens that cost no forward
    pass. 1 where the sampler gave no log-probs, or nothing is trained on.
    """
    kept = [(record, trained) for record, trained in zip(records, is_trained, strict=True) if record["in_baseline"]]
    everything = _mean_log_prob([record for record, _ in kept])
    trained = _mean_log_prob([record for record, trained in kept if trained])
    factor = everything / trained if trained else math.nan
    return factor if math.isfinite(factor) and factor > 0 else 1.0


def _mean_log_prob(records: Sequence[dict[str, Any]]) -> float:
    return math.fsum(record["log_prob"] for record in records) / max(1, sum(record["length"] for record in records))


def _num_repeated(group: Sequence[dict[str, Any]]) -> int:
    """Number of turns that another trajectory of the group says as well, at whatever place."""
    num_speakers = Counter(turn for record in group for turn in {*record["turns"]})
    return sum(num_speakers[turn] > 1 for record in group for turn in record["turns"])


def _spread(returns: Sequence[float]) -> float:
    """Bessel-corrected standard deviation; 0 for what is no more than the noise of floats."""
    std = statistics.stdev(returns)
    return std if std > 1e-6 * max(abs(value) for value in returns) else 0.0


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)
