"""What `check_env` plays: good and bad assistant messages, and arguments that the tools' schemas allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Message

DEFAULT_EXAMPLE = {
    "prompt": [{"role": "user", "content": "What is the capital of Norway?"}],
    "question": "What is the capital of Norway?",
    "answer": "Oslo",
}
NONSENSE = "zxqv wrong answer zxqv"
_TEXTS = {"expression": "1 + 1", "query": "capital of Norway", "url": "https://example.org", "code": "print(1)"}


def answer_message(text: str | None) -> Message:
    """A final answer."""
    return {"role": "assistant", "content": text}


def call_message(*calls: tuple[Any, Any]) -> Message:
    """An assistant message with these (name, arguments) calls, as the rollout's parser makes it."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": f"check_{index}", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


def valid_messages(tools: Sequence[Tool]) -> list[Message]:
    """One valid call of each tool, all of them in one message, and a wrong answer."""
    calls = [sample_call(found) for found in tools]
    together = [call_message(*calls)] if len(calls) > 1 else []
    return [*(call_message(call) for call in calls), *together, answer_message(NONSENSE)]


def broken_calls(tools: Sequence[Tool]) -> dict[str, Message]:
    """Broken calls as real models write them, by what is wrong with them."""
    name = tools[0].name if tools else "search"
    cut_off = {**answer_message('<tool_call>{"name": "sea'), "malformed_tool_call": "the call ends in the middle"}
    return {
        "an unknown tool": call_message(("no_such_tool", {})),
        "arguments the tool does not have": call_message((name, {"no_such_argument": 1})),
        "arguments that are a list": call_message((name, [1, 2])),
        "arguments that are no JSON": call_message((name, '{"query": "un')),
        "a call that is a number": {**answer_message(""), "tool_calls": [5]},
        "a call without a name": {**answer_message(""), "tool_calls": [{"function": {}}]},
        "a call cut off half way": cut_off,
    }


def odd_messages(tools: Sequence[Tool]) -> dict[str, Message]:
    """Other unusual messages that `step` must survive, by what they are."""
    return {
        "a call without arguments": call_message((tools[0].name if tools else "search", None)),
        "an empty answer": answer_message(""),
        "an answer without content (None)": answer_message(None),
        "an answer of odd characters": answer_message("\u0000\u202e\U0001f600 e\u0301 <|im_end|> </answer> {{ x }}"),
    }


def sample_call(tool: Tool) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that the tool's schema allows."""
    return tool.name, _sample({"type": "object", **tool.schema["function"]["parameters"]})


def _sample(schema: Any, name: str = "") -> Any:
    """A value that a JSON schema allows; for free text, one that suits an argument of this name."""
    schema = schema if isinstance(schema, dict) else {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _sample(schema[key][0], name)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties: dict[str, Any] = schema.get("properties") or {}
        return {key: _sample(properties.get(key), key) for key in schema.get("required", properties)}
    if kind == "array":
        return [_sample(item) for item in schema.get("prefixItems") or [schema.get("items")]]
    least = max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
    values = {"integer": int(least), "number": float(least), "boolean": True, "null": None}
    return values.get(kind, _TEXTS.get(name, "test"))
