"""Trajectories that are written down as messages, without tokens."""

from agent_r1_trl.trajectory import Author, StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn


def thinks(reasoning, text="<answer>yes</answer>", **fields):
    """An assistant message with an inline reasoning."""
    return {"role": "assistant", "content": f"<think>{reasoning}</think>{text}", **fields}


def searches(query="capital", /, name="search", reasoning="", **arguments):
    """A turn's message with one call, and reasoning in a field of its own if there is one."""
    function = {"name": name, "arguments": arguments or {"query": query}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def turn(message, observed=None, *, is_error=False, is_invalid=False, num_tokens=0):
    """One turn; each of its calls, if it has any, returned `observed`."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    results = [
        ToolResult(
            call=ToolCall(name=function["name"], arguments=function["arguments"]),
            content=observed or "",
            error=ToolErrorKind.EXCEPTION if is_error else None,
        )
        for function in functions
    ]
    observations = [] if observed is None else [{"role": "tool" if results else "user", "content": observed}]
    return Turn(
        start=0,
        end=num_tokens,
        message=message,
        observations=observations,
        tool_results=results,
        is_invalid=is_invalid,
    )


def rolled_out(*turns, prompt="What is the capital?", num_observation_tokens=0):
    """A trajectory of these turns (messages are turns without observation)."""
    turns = [item if isinstance(item, Turn) else turn(item) for item in turns]
    mask, turn_ids = [], []
    for index, item in enumerate(turns):
        length = item.end
        item.start, item.end = len(mask), len(mask) + length
        mask += [1] * length + [0] * num_observation_tokens
        turn_ids += [index] * length + [-1] * num_observation_tokens
    return Trajectory(
        prompt_messages=[{"role": "user", "content": prompt}],
        prompt_ids=[1],
        completion_ids=[1] * len(mask),
        action_mask=mask,
        logprobs=[0.0] * len(mask),
        turn_ids=turn_ids,
        authors=[Author.POLICY if item else Author.ENVIRONMENT for item in mask],
        turns=turns,
        stop_reason=StopReason.DONE,
    )
