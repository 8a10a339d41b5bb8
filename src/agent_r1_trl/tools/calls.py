"""Reads the calls of an assistant message, whatever the model wrote in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from agent_r1_trl.trajectory import Message, ToolCall

ID_NAMES = ("id", "call_id", "tool_call_id")
"""Keys under which models and protocols write the id of a call."""
MAX_ID_CHARS = 128


def read_calls(message: Message, *, id_prefix: str = "call") -> list[ToolCall]:
    """The calls of a message, one per entry of `tool_calls`; never raises.

    An entry that is not a call (a number, a list, an object without a name) becomes a `ToolCall` with an empty name,
    which the executor answers with an explanation of how to call. A missing or repeated id becomes
    `{id_prefix}_{index}`.
    """
    entries = message.get("tool_calls")
    if entries is None or entries == "":
        return []
    calls = [read_call(entry) for entry in (entries if isinstance(entries, (list, tuple)) else [entries])]
    seen: set[str] = set()
    for index, call in enumerate(calls):
        if not call.id or call.id in seen:
            call.id = f"{id_prefix}_{index}"
        seen.add(call.id)
    return calls


def read_call(entry: object) -> ToolCall:
    """One call, from `{"type": "function", "function": {...}}`, `{"name", "arguments"}` or a `ToolCall`."""
    if isinstance(entry, ToolCall):
        return entry
    if not isinstance(entry, dict):
        return ToolCall(name="", arguments=entry)
    source = entry["function"] if isinstance(entry.get("function"), dict) else entry
    name = source["name"] if isinstance(source.get("name"), str) else ""
    arguments = read_arguments(source.get("arguments", source.get("parameters"))) if name else entry
    return ToolCall(name=name, arguments=arguments, id=written_id(entry, source))


def written_id(*owners: Mapping[str, Any]) -> str:
    """The id that a model wrote into a call or its function, as text that any JSON can hold; "" if it wrote none."""
    for owner in owners:
        for name in ID_NAMES:
            value = owner.get(name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if is_number or (isinstance(value, str) and value.strip()):
                text = str(value).strip()[:MAX_ID_CHARS]
                return text.encode("utf-8", errors="replace").decode("utf-8")
    return ""


def read_arguments(arguments: object) -> Any:
    """Arguments with a JSON string parsed; text that is not JSON is returned as it is, and nothing becomes `{}`."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if isinstance(parsed, str) else parsed


def values_of(arguments: object) -> list[str]:
    """The single values in the arguments of a call, as texts; names and keys recur in every call.

    >>> values_of({"query": "Oslo", "filters": {"years": [1990, 2000]}})
    ['Oslo', '1990', '2000']
    """
    found, waiting = [], [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(reversed(list(value.values())))
        elif isinstance(value, (list, tuple)):
            waiting.extend(reversed(value))
        elif value is not None:
            with contextlib.suppress(ValueError):  # a number too long to print
                found.append(str(value))
    return found
