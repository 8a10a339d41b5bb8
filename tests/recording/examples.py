"""Trajectories made by hand for the tests of the recorder."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.trajectory import Author, StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn


def two_turns(**changes: Any) -> Trajectory:
    """A search that failed, then an answer: S0 (2) + G0 (1) + O0 (2) + G0' (1) + S1 (2)."""
    call = ToolCall(name="search", arguments={"query": "Höhe 🙂"}, id="call_0")
    turns = [
        Turn(
            start=0,
            end=2,
            message={"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search"}}]},
            observations=[{"role": "tool", "name": "search", "content": "too slow"}],
            tool_results=[ToolResult(call=call, content="too slow", error=ToolErrorKind.TIMEOUT, latency_s=0.25)],
            reward=-0.1,
            reward_parts={"tool_error": -0.1},
            is_invalid=True,
        ),
        Turn(start=6, end=8, message={"role": "assistant", "content": "Oslo"}, generate_s=0.5),
    ]
    policy = Author.POLICY
    template = Author.TEMPLATE
    environment = Author.ENVIRONMENT
    values: dict[str, Any] = {
        "prompt_messages": [{"role": "user", "content": "Hauptstadt?"}],
        "prompt_ids": [5, 6, 7],
        "completion_ids": [11, 12, 13, 14, 15, 16, 17, 18],
        "action_mask": [1, 1, 0, 0, 0, 0, 1, 1],
        "logprobs": [-0.1, -1 / 3, 0.0, 0.0, 0.0, 0.0, -1e-17, -12.345678901234567],
        "turn_ids": [0, 0, -1, -1, -1, -1, 1, 1],
        "authors": [policy, policy, template, environment, environment, template, policy, policy],
        "turns": turns,
        "stop_reason": StopReason.DONE,
        "outcome_reward": 1.1,
        "reward_parts": {"answer": 1.0, "format": 0.1},
        "example_id": "q/1",
        "generation": 3,
        "seed": 2**62 + 1,
        "info": {"em": 1.0, "gold": ["Oslo"], "nested": {"a": None}},
        "duration_s": 1.5,
        "advantages": [0.7, 0.7, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7],
    }
    return Trajectory(**{**values, **changes})


def empty(reason: StopReason = StopReason.PROMPT_TOO_LONG) -> Trajectory:
    """Nothing was sampled."""
    return Trajectory(
        prompt_messages=[],
        prompt_ids=[],
        completion_ids=[],
        action_mask=[],
        logprobs=[],
        turn_ids=[],
        authors=[],
        turns=[],
        stop_reason=reason,
        error="the prompt has 9000 tokens",
    )
