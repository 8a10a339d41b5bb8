"""What `check_env` plays: example arguments for tools, assistant messages good and bad, and made-up trajectories.

Not part of the data flow: a linter's material.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Author, Message, StopReason, Trajectory, Turn

DEFAULT_EXAMPLE = {
    "prompt": [{"role": "user", "content": "What is the capital of Norway?"}],
    "question": "What is the capital of Norway?",
    "answer": "Oslo",
}
SAMPLE_TEXTS = {"expression": "1 + 1", "query": "capital of Norway", "url": "https://example.org", "code": "print(1)"}
NONSENSE = "zxqv wrong answer zxqv"


def sample_value(schema: Any) -> Any:
    """A value that a JSON schema allows, plain rather than clever."""
    if not isinstance(schema, dict):
        return "test"
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if "const" in schema or "default" in schema:
        return schema.get("const", schema.get("default"))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return sample_value(schema[key][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        value = max(1, low + 1) if isinstance(low, (int, float)) else 1
        return int(value) if kind == "integer" else float(value)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind == "array":
        items = schema.get("prefixItems")
        return [sample_value(item) for item in items] if items else [sample_value(schema.get("items", {}))]
    if kind == "object":
        properties: dict[str, Any] = schema.get("properties") or {}
        names = schema.get("required", list(properties))
        return {name: _sample_argument(name, properties.get(name)) for name in names}
    return "test"


def _sample_argument(name: str, schema: Any) -> Any:
    """What an argument of this name usually holds, where its schema leaves that open."""
    is_free_text = isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
    return SAMPLE_TEXTS[name] if is_free_text and name in SAMPLE_TEXTS else sample_value(schema)


def sample_call(tool: Tool) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call the tool's schema allows."""
    return tool.name, sample_value({"type": "object", **tool.schema["function"]["parameters"]})


def call_message(*calls: tuple[Any, Any], content: str = "") -> Message:
    """An assistant message with these calls, as the rollout's parser makes it."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"type": "function", "id": f"check_{index}", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


def answer_message(text: str | None) -> Message:
    """A final answer."""
    return {"role": "assistant", "content": text}


def bad_messages(tools: Sequence[Tool]) -> dict[str, Message]:
    """Assistant messages that real models write, by what is wrong with them."""
    name = tools[0].name if tools else "search"
    return {
        "an unknown tool": call_message(("no_such_tool", {})),
        "arguments the tool does not have": call_message((name, {"no_such_argument": 1})),
        "no arguments": call_message((name, None)),
        "arguments that are a list": call_message((name, [1, 2])),
        "arguments that are no JSON": call_message((name, '{"query": "un')),
        "a call that is a number": {"role": "assistant", "content": "", "tool_calls": [5]},
        "a call without a name": {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
        "a call cut off half way": {
            "role": "assistant",
            "content": '<tool_call>{"name": "sea',
            "malformed_tool_call": "the call ends in the middle",
        },
    }


ODD_ANSWERS: dict[str, str | None] = {
    "empty": "",
    "missing (None)": None,
    "long": "word " * 5000,
    "unicode": "\u0000\u202e\U0001f600 \u00e9\u0301 <|im_end|> </answer> {{ x }}",
}


def make_trajectory(
    prompt: list[Message], played: Sequence[tuple[Message, list[Message], float]], stop_reason: StopReason
) -> Trajectory:
    """A trajectory of these (assistant message, observations, reward) turns: one token per turn, one per answer."""
    turns: list[Turn] = []
    ids: list[int] = []
    mask: list[int] = []
    for index, (message, observations, reward) in enumerate(played):
        start = len(ids)
        ids.append(index)
        mask.append(1)
        if observations:
            ids.append(0)
            mask.append(0)
        turns.append(Turn(start=start, end=start + 1, message=message, observations=observations, reward=reward))
    turn_of = iter(range(len(turns)))
    return Trajectory(
        prompt_messages=prompt,
        prompt_ids=[0],
        completion_ids=ids,
        action_mask=mask,
        logprobs=[0.0] * len(ids),
        turn_ids=[next(turn_of) if bit else -1 for bit in mask],
        authors=[Author.POLICY if bit else Author.ENVIRONMENT for bit in mask],
        turns=turns,
        stop_reason=stop_reason,
    )
