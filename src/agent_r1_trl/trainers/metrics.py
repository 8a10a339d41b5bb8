"""What a batch of trajectories logs. `docs/metrics.md` defines each name with its formula.

Averages are per trajectory, never per row or token, unless the name says otherwise.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from agent_r1_trl.trajectory import Author, StopReason, Trajectory


def gather_metrics(trajectories: Sequence[Trajectory], *, group_size: int) -> tuple[dict[str, float], int]:
    """Metrics of the trajectories of all ranks, and the number of prompt and sampled tokens in them.

    Args:
        trajectories: this rank's, in data order.
        group_size: trajectories of one prompt; they are consecutive.
    """
    records = gather_object([trajectory_record(trajectory) for trajectory in trajectories])
    lengths = gather_object([length_record(trajectory) for trajectory in trajectories])
    metrics = length_metrics(lengths) | rollout_metrics(records, num_generations=group_size)
    return metrics, sum(row["prompt"] + row["length"] for row in lengths)


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """The few numbers that metrics need from one trajectory: small enough to gather over ranks."""
    parts: dict[str, float] = defaultdict(float)
    for source in (trajectory.reward_parts, *(turn.reward_parts for turn in trajectory.turns)):
        for name, value in source.items():
            parts[name] += value
    authors = Counter(author.value for author in trajectory.authors)
    return {
        "reward": trajectory.total_reward,
        "process": trajectory.process_reward,
        "outcome": trajectory.outcome_reward,
        "parts": dict(parts),
        "turns": len(trajectory.env_turns),
        "summaries": [turn.is_truncated for turn in trajectory.turns if turn.is_summary],
        "rows": 1 + sum(segment.prompt_ids is not None for segment in trajectory.segments),
        "invalid_turns": sum(turn.is_invalid for turn in trajectory.turns),
        "calls": [
            (result.call.name, result.latency_s, result.queue_s, result.is_truncated)
            for result in trajectory.tool_results
        ],
        "known_tools": [result.call.name for result in trajectory.tool_results if not _is_unknown(result)],
        "errors": [result.error.value for result in trajectory.tool_results if result.error],
        "tokens": {author.value: authors.get(author.value, 0) for author in Author},
        "stop": trajectory.stop_reason.value,
        "failed": trajectory.stop_reason.is_infrastructure_failure,
        "in_baseline": trajectory.in_baseline,
        "too_small": trajectory.is_group_too_small,
        "replaced": bool(trajectory.failed_tries) and not trajectory.stop_reason.is_infrastructure_failure,
        "tries": 1 + len(trajectory.failed_tries),
        "truncated": trajectory.stop_reason.is_truncated,
        "generate_s": math.fsum(turn.generate_s for turn in trajectory.turns),
        "env_s": math.fsum(turn.env_s for turn in trajectory.turns),
        "duration_s": trajectory.duration_s,
        "info": trajectory.numbers,
    }


def _is_unknown(result: Any) -> bool:
    return result.error is not None and result.error.value in ("unknown_tool", "malformed")


def rollout_metrics(records: Sequence[dict[str, Any]], *, num_generations: int) -> dict[str, float]:
    """Metrics of N trajectories in data order; consecutive runs of `num_generations` are one group.

    Trajectories outside the baseline count in `stop/*` and `rollout/*`, not in rewards.
    """
    if not records:
        return {}
    metrics: dict[str, float] = {}
    metrics.update(_reward_metrics(records, num_generations))
    num = len(records)
    metrics["rollout/turns"] = _mean([record["turns"] for record in records])
    if any(record["rows"] > 1 for record in records):
        metrics["rollout/rows"] = _mean([record["rows"] for record in records])
    if summaries := [is_cut for record in records for is_cut in record["summaries"]]:
        metrics["rollout/summaries"] = len(summaries) / num
        metrics["rollout/summary_truncated"] = _mean(summaries)
    metrics["rollout/invalid_turns"] = _mean([record["invalid_turns"] for record in records])
    metrics["rollout/tool_calls"] = _mean([len(record["calls"]) for record in records])
    metrics["rollout/truncated_share"] = _mean([record["truncated"] for record in records])
    metrics["rollout/infrastructure_failure_share"] = _mean([record["failed"] for record in records])
    metrics["rollout/replaced_share"] = _mean([record["replaced"] for record in records])
    metrics["rollout/tries"] = _mean([record["tries"] for record in records])
    for reason in StopReason:
        metrics[f"stop/{reason.value}"] = sum(record["stop"] == reason.value for record in records) / num
    for author in Author:
        metrics[f"tokens/{author.value}"] = _mean([record["tokens"][author.value] for record in records])
    metrics.update(_tool_metrics(records))
    metrics["time/generate_s"] = _mean([record["generate_s"] for record in records])
    metrics["time/env_s"] = _mean([record["env_s"] for record in records])
    metrics["time/longest_trajectory_s"] = max(record["duration_s"] for record in records)
    for name in sorted({name for record in records for name in record["info"]}):
        metrics[f"env/{name}"] = _mean([record["info"][name] for record in records if name in record["info"]])
    return metrics


def length_record(trajectory: Trajectory) -> dict[str, Any]:
    """Lengths of one trajectory in sampled tokens, as TRL counts them."""
    is_clipped = trajectory.stop_reason.is_truncated or not trajectory.completion_ids
    return {"prompt": len(trajectory.prompt_ids), "length": trajectory.num_action_tokens, "is_clipped": is_clipped}


def length_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """TRL's `completions/*` of all trajectories."""
    lengths = [float(record["length"]) for record in records]
    ended = [float(record["length"]) for record in records if not record["is_clipped"]] or [0.0]
    metrics = {"completions/clipped_ratio": _mean([record["is_clipped"] for record in records])}
    for kind, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{kind}length"] = _mean(values)
        metrics[f"completions/min_{kind}length"] = min(values)
        metrics[f"completions/max_{kind}length"] = max(values)
    return metrics


def _reward_metrics(records: Sequence[dict[str, Any]], num_generations: int) -> dict[str, float]:
    counted = [record for record in records if record["in_baseline"]]
    metrics = {
        "reward/process": _mean([record["process"] for record in counted]),
        "reward/outcome": _mean([record["outcome"] for record in counted]),
    }
    for name in sorted({name for record in counted for name in record["parts"]}):
        metrics[f"reward_parts/{name}"] = _mean([record["parts"].get(name, 0.0) for record in counted])
    groups = [records[start : start + num_generations] for start in range(0, len(records), num_generations)]
    metrics["group/too_small_share"] = _mean([any(record["too_small"] for record in group) for group in groups])
    stds = []
    for group in groups:
        rewards = [record["reward"] for record in group if record["in_baseline"]]
        if len(rewards) > 1:
            stds.append((_std(rewards), max(abs(reward) for reward in rewards)))
    if stds:
        metrics["group/reward_std"] = _mean([std for std, _ in stds])
        metrics["group/zero_variance_share"] = _mean([std <= 1e-6 * largest for std, largest in stds])
    return metrics


def _tool_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    calls = [call for record in records for call in record["calls"]]
    errors = Counter(error for record in records for error in record["errors"])
    known = {name for record in records for name in record["known_tools"]}
    metrics = {"tools/failure_share": sum(errors.values()) / len(calls) if calls else 0.0}
    num_read = len(calls) - errors["malformed"]  # to TRL, what cannot be read is no call
    metrics["tools/call_frequency"] = num_read / len(records)
    metrics["tools/failure_frequency"] = (sum(errors.values()) - errors["malformed"]) / num_read if num_read else 0.0
    for kind, count in sorted(errors.items()):
        metrics[f"tools/failures/{kind}"] = count / len(records)
    for name in sorted(known):
        latencies = [latency for call, latency, _, _ in calls if call == name]
        metrics[f"tools/{name}/calls"] = len(latencies) / len(records)
        metrics[f"tools/{name}/latency_s"] = _mean(latencies)
        metrics[f"tools/{name}/latency_max_s"] = max(latencies)
        metrics[f"tools/{name}/queue_s"] = _mean([queue for call, _, queue, _ in calls if call == name])
        metrics[f"tools/{name}/truncated_share"] = _mean([cut for call, _, _, cut in calls if call == name])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else float("nan")


def _std(values: Sequence[float]) -> float:
    """Bessel-corrected standard deviation."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
