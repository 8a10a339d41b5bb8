"""Assistant messages with tool calls, and finished trajectories."""

from agent_r1_trl.trajectory import Author, StopReason, Trajectory, Turn


def message(*calls, content="", **extra):
    """An assistant message with (tool name, arguments) pairs as its calls."""
    tool_calls = [
        {"type": "function", "id": f"id{index}", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": tool_calls} if calls else {}), **extra}


def finished(text="", stop_reason=StopReason.DONE) -> Trajectory:
    """A trajectory of one turn and one token that ended with this text."""
    return Trajectory(
        prompt_messages=[],
        prompt_ids=[0],
        completion_ids=[1],
        action_mask=[1],
        logprobs=[0.0],
        turn_ids=[0],
        authors=[Author.POLICY],
        turns=[Turn(start=0, end=1, message={"role": "assistant", "content": text})],
        stop_reason=stop_reason,
    )
