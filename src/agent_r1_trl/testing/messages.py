"""Assistant messages, as a test writes them down."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.trajectory import Message


def say(text: str = "5") -> Message:
    """An assistant message without a tool call.

    Examples:
        >>> say("Oslo")
        {'role': 'assistant', 'content': 'Oslo'}
    """
    return {"role": "assistant", "content": text}


def call(name: str = "add", /, **arguments: object) -> Message:
    """An assistant message that calls one tool. Without anything: the toy `add`, with 2 and 3.

    Examples:
        >>> call("search", query="Oslo")["tool_calls"]
        [{'type': 'function', 'function': {'name': 'search', 'arguments': {'query': 'Oslo'}}}]
    """
    return calls((name, {"a": 2, "b": 3} if name == "add" and not arguments else arguments))


def calls(*pairs: tuple[str, Any]) -> Message:
    """An assistant message that calls several tools: pairs of a name and its arguments.

    Arguments that a model gets wrong can be written down as well: a list, a text, names that no tool has.
    """
    functions = [{"name": name, "arguments": arguments} for name, arguments in pairs]
    return say("") | {"tool_calls": [{"type": "function", "function": function} for function in functions]}
