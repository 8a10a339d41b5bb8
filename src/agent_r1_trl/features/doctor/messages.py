"""Messages that check_env sends to an environment or an agent: valid and broken calls, odd texts, a wrong answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.tools import Tool
from agent_r1_trl.tools.json_schema import branches
from agent_r1_trl.trajectory import Message

NONSENSE = "zxqv wrong answer zxqv"
_TEXTS = {"expression": "1 + 1", "query": "capital of Norway", "url": "https://example.org", "code": "print(1)"}


def say_text(text: str | None) -> Message:
    """An answer without calls."""
    return {"role": "assistant", "content": text}


def call_tools(*calls: tuple[Any, Any]) -> Message:
    """An assistant message with these (name, arguments) calls, as the rollout's parser makes it."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [{"type": "function", "id": f"check_{i}", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def valid_messages(tools: Sequence[Tool]) -> list[Message]:
    """One valid call of each tool, all of them in one message, and a wrong answer."""
    calls = [sample_call(found) for found in tools]
    messages = [call_tools(call) for call in calls]
    if len(calls) > 1:
        messages.append(call_tools(*calls))
    return [*messages, say_text(NONSENSE)]


def broken_calls(tools: Sequence[Tool]) -> dict[str, Message]:
    """Broken calls as real models write them, by what is wrong with them."""
    name = tools[0].name if tools else "search"
    return {
        "an unknown tool": call_tools(("no_such_tool", {})),
        "arguments the tool does not have": call_tools((name, {"no_such_argument": 1})),
        "arguments that are a list": call_tools((name, [1, 2])),
        "arguments that are no JSON": call_tools((name, '{"query": "un')),
        "a call that is a number": {**say_text(""), "tool_calls": [5]},
        "a call without a name": {**say_text(""), "tool_calls": [{"function": {}}]},
        "a call cut off half way": {**say_text('<tool_call>{"name": "sea'), "malformed_tool_call": "it has no end"},
    }


def odd_messages(tools: Sequence[Tool]) -> dict[str, Message]:
    """Other unusual messages that `step` must survive, by what they are."""
    return {
        "a call without arguments": call_tools((tools[0].name if tools else "search", None)),
        "an empty answer": say_text(""),
        "an answer without content (None)": say_text(None),
        "an answer of odd characters": say_text("\u0000\u202e\U0001f600 e\u0301 <|im_end|> </answer> {{ x }}"),
    }


def sample_call(tool: Tool) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that the tool's schema allows."""
    parameters = tool.schema["function"]["parameters"]
    ways = branches(parameters)
    if len(ways) == 1 and ways[0].properties == parameters.get("properties", {}):
        return tool.name, _sample({"type": "object", **parameters})
    names = ways[0].required or list(ways[0].properties)
    return tool.name, {name: _sample(ways[0].properties.get(name), name) for name in names}


def _sample(schema: object, name: str = "") -> Any:
    """A value that a JSON schema allows; for free text, one that suits an argument of this name."""
    schema = schema if isinstance(schema, dict) else {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples", "anyOf", "oneOf"):
        if schema.get(key):
            return schema[key][0] if key in ("enum", "examples") else _sample(schema[key][0], name)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties: dict[str, Any] = schema.get("properties") or {}
        return {key: _sample(properties.get(key), key) for key in schema.get("required", properties)}
    if kind == "array":
        return [_sample(item) for item in schema.get("prefixItems") or [schema.get("items")]]
    number = _sample_number(schema)
    values = {"integer": int(number), "number": float(number), "boolean": True, "null": None}
    return values.get(kind, _TEXTS.get(name, "test"))


def _sample_number(schema: dict[str, Any]) -> float:
    """A number within the bounds of a schema, a whole one if there is one."""
    least = schema.get("minimum", -math.inf)
    most = schema.get("maximum", math.inf)
    above = schema.get("exclusiveMinimum", -math.inf)
    below = schema.get("exclusiveMaximum", math.inf)
    low, high = max(least, above), min(most, below)
    for number in (1, low, low + 1, high, high - 1, (low + high) / 2):
        if least <= number <= most and above < number < below:
            return number
    return 1
