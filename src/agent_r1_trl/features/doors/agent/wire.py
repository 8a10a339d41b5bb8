"""OpenAI's chat completions as an agent speaks them: requests read, answers, pieces of a stream and errors written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.errors import APIError
from agent_r1_trl.rollout.hosted import read_answer
from agent_r1_trl.rollout.limits import MAX_CHARS_PER_TOKEN
from agent_r1_trl.trajectory import Message

NO_RETRY = {"x-should-retry": "false"}
"""Headers of a refusal: OpenAI's clients do not repeat the request."""
_to_text = json.JSONEncoder(ensure_ascii=False).encode
_ROLES = {"developer": "system", "function": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "min_p": (),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
}
"""Settings that are the run's own, or that nothing here can keep -> the values with which they change nothing."""


@dataclass(kw_only=True)
class Asked:
    """The content of one request."""

    given: list[Any]
    """The messages as they were sent."""
    messages: list[Message]
    """Contents are texts, arguments of calls are parsed, results stand in the order of their calls."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_streamed: bool = False
    has_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    wants_ids: bool = False
    overridden: tuple[str, ...] = ()
    """Settings that were given and do not count."""
    size: int = 0
    """Characters of messages and tools (`size_of`)."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)


def _are_tools(value: Any) -> bool:
    if not isinstance(value or [], list):
        return False
    functions = [item.get("function") if isinstance(item, dict) else None for item in value or ()]
    return all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in functions)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "messages": (_are_messages, "a list of messages such as [{'role': 'user', 'content': '...'}]"),
    "tools": (_are_tools, "a list of {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"),
    "functions": (lambda value: not value, "left out: give tools"),
    "n": (lambda value: value in (None, 1), "1: ask several times for several answers"),
    "max_tokens": (lambda value: value is None or _is_count(value), "a whole number from 1 on"),
    "max_completion_tokens": (lambda value: value is None or _is_count(value), "a whole number from 1 on"),
    "stop": (lambda value: all(isinstance(item, str) for item in _texts(value)), "a string, or a list of strings"),
    "stream_options": (lambda value: isinstance(value or {}, dict), "an object"),
}


def _texts(value: object) -> list[Any]:
    return [item for item in (value if isinstance(value, list) else [value]) if item not in (None, "")]


def size_of(body: object) -> int:
    """Characters of a request's messages and tools, counted before any other work.

    These are the characters of their JSON, and for each message, call and tool those of one token more: it has one at
    least, which the longest text of a token would not tell.
    """
    given = body if isinstance(body, dict) else {}
    size = 0
    for name in ("messages", "tools"):
        items = given.get(name)
        if isinstance(items, list):
            calls = [item.get("tool_calls") for item in items if isinstance(item, dict)]
            num = len(items) + sum(len(found) for found in calls if isinstance(found, list))
            size += len(_to_text(items)) + MAX_CHARS_PER_TOKEN * num
    return size


def read_request(body: object, last: Asked | None = None) -> Asked:
    """Read the JSON of a request; messages that it shares with the last one are not read again.

    Raises:
        APIError: a setting has a value that cannot be honoured; the message names it.
        ChatFormatError: a message holds an image.
    """
    given = body if isinstance(body, dict) else {}
    for name, (holds, rule) in _RULES.items():
        if not holds(given.get(name)):
            raise APIError(400, f"{name}={given.get(name)!r:.100}: must be {rule}.", param=name)
    sent, before = given["messages"], []
    if last is not None:  # the earlier objects, so that all calls of a trajectory hold them once
        num_known = _num_known(sent, last.given)
        sent, before = [*last.given[:num_known], *sent[num_known:]], last.messages[:num_known]
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if given.get(name) is not None]
    return Asked(
        given=sent,
        messages=read_messages(sent, before),
        tools=given.get("tools") or [],
        max_tokens=min(limits, default=None),
        stop=tuple(_texts(given.get("stop"))),
        is_streamed=bool(given.get("stream")),
        has_usage=bool((given.get("stream_options") or {}).get("include_usage")),
        wants_ids=bool(given.get("return_token_ids")),
        overridden=tuple(
            name for name, neutral in _NEUTRAL.items() if given.get(name) is not None and given[name] not in neutral
        ),
        size=size_of(given),
    )


def read_messages(given: Sequence[Mapping[str, Any]], before: Sequence[Message] = ()) -> list[Message]:
    """Messages of a client as the rollout has them; the first ones, up to a turn of an assistant, may be read."""
    messages = list(before)
    calls: list[tuple[str, str]] = []  # ids and functions' names of the last turn
    results: list[Message] = []  # those that follow it
    for index, item in enumerate(given[len(messages) :], len(messages)):
        role, where = _ROLES.get(item["role"], item["role"]), f"messages[{index}]"
        if role == "tool":
            content = as_text(item.get("content"), where)
            known = str(item.get("tool_call_id") or "")
            name = str(item.get("name") or "unknown")
            results.append({"role": role, "content": content, "name": name, "tool_call_id": known})
            continue
        messages += _matched(results, calls)
        results = []
        if role == "assistant":
            message = read_answer(dict(item), index - 1, where)
            calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
        else:
            message = {"role": role, "content": as_text(item.get("content"), where)}
        messages.append(message)
    return messages + _matched(results, calls)


def _matched(results: list[Message], calls: Sequence[tuple[str, str]]) -> list[Message]:
    """Results of one turn's calls with the names of the functions, in the order of the calls.

    Where no id is a call's, or ids repeat, each of as many results as calls belongs to the call in its place.
    """
    places = {known: place for place, (known, _) in enumerate(calls)}
    names = [item["tool_call_id"] for item in results]
    tells = len(set(names)) == len(names) and any(name in places for name in names)
    is_in_order = not tells and len(results) == len(calls)
    if is_in_order:
        pairs = zip(results, calls, strict=True)
        return [item | {"name": name, "tool_call_id": known} for item, (known, name) in pairs]
    matched: list[Message] = []
    known_results: list[tuple[int, Message]] = []  # one of another turn separates them
    for item in results:
        place = places.get(item["tool_call_id"])
        if place is None:
            matched += [*_sorted(known_results), item]
            known_results = []
        else:
            known_results.append((place, item | {"name": calls[place][1]}))
    return matched + _sorted(known_results)


def _sorted(results: list[tuple[int, Message]]) -> list[Message]:
    """Results in the order of their calls' places."""
    return [item for _, item in sorted(results, key=lambda pair: pair[0])]


def _num_known(given: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> int:
    """How many messages are read as they were: those before the last turn of an assistant that both have."""
    num_known = 0
    for place, (item, before) in enumerate(zip(given, last, strict=False)):
        if not _is_same(item, before):
            break
        if item["role"] == "assistant":
            num_known = place
    return num_known


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are equal as JSON is: arguments of calls may be objects, in which `True == 1` to Python."""
    return one == other and ("tool_calls" not in one or repr(one["tool_calls"]) == repr(other["tool_calls"]))


# ---------------------------------------------------------------- answers


def completion(
    identity: str, model: str, message: Message, finish_reason: str, num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    """An answer; `message` as it was read from the sampled ids."""
    said: dict[str, Any] = {"role": "assistant", "content": message.get("content") or None}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [_as_sent(call) for call in calls]
    elif said["content"] is None:
        said["content"] = ""
    if message.get("reasoning_content"):
        said["reasoning_content"] = message["reasoning_content"]
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    choice = {"index": 0, "message": said, "finish_reason": finish_reason, "logprobs": None}
    head = {"id": identity, "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": [choice], "usage": usage}


def _as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return {"id": call.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def stream_lines(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[bytes]:
    """A finished answer as server-sent events: what is said, the calls one by one, the end, the usage."""
    (choice,) = answer["choices"]
    said = dict(choice["message"])
    calls = said.pop("tool_calls", [])
    deltas = [said, *({"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls))]
    extras = {name: value for name, value in answer.items() if name == "prompt_token_ids"}
    ids = {name: value for name, value in choice.items() if name == "token_ids"}
    head = {**{name: answer[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    pieces: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    pieces[0] |= extras
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], **ids}
    pieces.append({**head, "choices": [end]})
    if has_usage:
        pieces.append({**head, "choices": [], "usage": answer["usage"]})
    for piece in pieces:
        yield f"data: {json.dumps(piece)}\n\n".encode()
    yield b"data: [DONE]\n\n"
