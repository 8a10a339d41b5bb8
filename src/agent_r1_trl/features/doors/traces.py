"""Trajectories as OpenEnv's `TrainingTrace`, which its harnesses hand to trainers (openenv.core.harness.training)."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.trajectory import Row, Trajectory


def training_trace(trajectory: Trajectory) -> dict[str, Any]:
    """The calls of a trajectory, one by one: `TrainingTrace.model_validate(training_trace(trajectory))`.

    Every call has the ids that it was sampled after, those that were sampled, their log-probs, and a mask over both:
    1 on what was sampled. Rewards are no part of the format; a turn's own is in its metadata.

    Raises:
        ValueError: the trajectory is a hosted model's, and has no ids.
    """
    if trajectory.is_hosted:
        raise ValueError("trajectory: a hosted model's has no token ids to train on. Pass one that was sampled here.")
    found: dict[int, tuple[Row, int]] = {}  # turn -> its row, and its place there
    for row in trajectory.rows:
        for place, turn in enumerate(row.turn_ids):
            if turn >= 0:
                found.setdefault(turn, (row, place))
    turns = [_call(trajectory, index, *found[index]) for index in sorted(found)]
    return {"schema_version": 1, "turns": turns}


def _call(trajectory: Trajectory, index: int, row: Row, start: int) -> dict[str, Any]:
    turn = trajectory.turns[index]
    end = start + turn.end - turn.start
    prompt_ids = [*row.prompt_ids, *row.completion_ids[:start]]
    sampled = row.completion_ids[start:end]
    finish = "length" if turn.is_truncated else "tool_calls" if turn.message.get("tool_calls") else "stop"
    return {
        "node_id": f"{trajectory.example_id}-{trajectory.generation}-{index}",
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": sampled,
        "per_token_logps": [float(logprob) for logprob in row.logprobs[start:end]],
        "loss_mask": [0] * len(prompt_ids) + row.action_mask[start:end],
        "response": {"choices": [{"index": 0, "message": dict(turn.message), "finish_reason": finish}]},
        "metadata": {"turn": index, "reward": turn.reward, "example_id": trajectory.example_id},
    }
