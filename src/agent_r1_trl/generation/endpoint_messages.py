"""Messages as environments have them, and as OpenAI's chat completions have them.

The differences: arguments of calls are text there, contents are text or null, and a turn with calls must be followed
by one message of role `tool` for each of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.tools.calls import read_arguments
from agent_r1_trl.trajectory import Message

CHARS_PER_TOKEN = 4
MAX_ID_CHARS = 64
"""Of a call; environments cut longer ones."""


class RoughCount:
    """Tokens of text where the model's tokenizer is not known: four characters each."""

    def count(self, text: str) -> int:
        """Number of tokens."""
        return math.ceil(len(text) / CHARS_PER_TOKEN)

    def truncate(self, text: str, max_tokens: int) -> str:
        """The beginning of a text."""
        return text[: max_tokens * CHARS_PER_TOKEN]


@dataclass(kw_only=True)
class Answer:
    """What a server answered, read."""

    message: Message
    """As environments read it; arguments that are no JSON stay text, which the tools answer with an explanation."""
    is_cut: bool
    """A limit of tokens ended it."""
    usage: dict[str, int] = field(default_factory=dict)
    """`prompt_tokens` and `completion_tokens`; empty if the server does not count."""


def read_answer(record: Mapping[str, Any], turn: int) -> Answer:
    """The first choice of an answer. What is missing or of another kind counts as not said.

    Args:
        record: the answer's JSON, with at least one choice.
        turn: number of the turn, for calls without an id.
    """
    choice = record["choices"][0]
    choice = choice if isinstance(choice, Mapping) else {}
    given = choice.get("message")
    given = given if isinstance(given, Mapping) else {}
    text = given.get("content") or given.get("refusal") or ""
    message: Message = {"role": "assistant", "content": text if isinstance(text, str) else as_text(text, "answer")}
    thoughts = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        message["reasoning_content"] = thoughts
    calls = given.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = _read_calls(calls, turn)
    counted = record.get("usage")
    usage = {}
    if isinstance(counted, Mapping) and all(_is_count(counted.get(name)) for name in _USAGE):
        usage = {name: int(counted[name]) for name in _USAGE}
    return Answer(message=message, is_cut=choice.get("finish_reason") == "length", usage=usage)


_USAGE = ("prompt_tokens", "completion_tokens")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_calls(calls: Sequence[Any], turn: int) -> list[dict[str, Any]]:
    """The calls, each with an id of its own."""
    read: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name, identifier = function.get("name"), call.get("id") if isinstance(call, Mapping) else None
        is_usable = isinstance(identifier, str) and 0 < len(identifier) <= MAX_ID_CHARS and identifier.isprintable()
        if not is_usable or any(identifier == item["id"] for item in read):
            identifier = f"call_{turn + 1}_{index}"
        arguments = read_arguments(function.get("arguments"))
        read.append(
            {
                "type": "function",
                "id": identifier,
                "function": {"name": name if isinstance(name, str) else "", "arguments": arguments},
            }
        )
    return read


def to_send(messages: Sequence[Message]) -> list[Message]:
    """A conversation as a request has it.

    A tool message that answers no call becomes the user's, and a call that the environment did not answer gets an
    empty answer: servers refuse both.
    """
    sent: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        role, identifier = str(message.get("role")), message.get("tool_call_id") or next(iter(waiting), None)
        content = as_text(message.get("content"), f"messages[{index}]")
        if role == "tool" and identifier in waiting:
            waiting.remove(str(identifier))
            sent.append({"role": role, "tool_call_id": identifier, "content": content})
            continue
        sent += [_no_answer(item) for item in waiting]
        waiting = []
        if role == "assistant" and message.get("tool_calls"):
            calls = [_call_to_send(call, f"call_{index}_{place}") for place, call in enumerate(message["tool_calls"])]
            waiting = [call["id"] for call in calls]
            sent.append({"role": role, "content": content or None, "tool_calls": calls})
        else:
            sent.append({"role": "user" if role in ("tool", "function") else role, "content": content})
    return sent + [_no_answer(item) for item in waiting]


def _no_answer(identifier: str) -> Message:
    return {"role": "tool", "tool_call_id": identifier, "content": ""}


def _call_to_send(call: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    """Arguments as text that is a JSON object, whatever they were: servers read them again."""
    function = call.get("function") or {}
    arguments = read_arguments(function.get("arguments"))
    arguments = arguments if isinstance(arguments, dict) else {"not_an_object": arguments}
    name = function.get("name") or "unknown"
    text = json.dumps(arguments, ensure_ascii=False, default=str)
    return {"id": str(call.get("id") or identifier), "type": "function", "function": {"name": name, "arguments": text}}


def tools_to_send(schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Schemas with the keys that OpenAI's protocol knows."""
    names = ("name", "description", "parameters", "strict")
    return [
        {
            "type": "function",
            "function": {name: value for name, value in schema["function"].items() if name in names},
        }
        for schema in schemas
    ]
