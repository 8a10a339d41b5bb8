"""Checks of a chat format over whole conversations: it appends what the template renders, and reads what was said.

The doctor reports their findings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.rendering import PROBE_TOOL, calling, tool_answer
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from agent_r1_trl.chat.format import ChatFormat

Schema = dict[str, Any]

_QUESTION: Message = {"role": "user", "content": "."}
_SAID: Message = {"role": "assistant", "content": "said."}
# `<|x|>`, the same with DeepSeek's wide bars, Gemma's `<|x>` and `<x|>`. Other markers (`<think>`, `[INST]`) are plain
# text for some models.
_CONTROL_TOKEN = re.compile(r"<([|\uff5c])[^\s<>|\uff5c]{1,64}\1>|<\|\w{1,64}>|<\w{1,64}\|>")


def speak(chat: ChatFormat, message: Message) -> list[int]:
    """The ids of a reply; its calls are changed to have the ids that are read from it."""
    reply = chat.encode_reply(message)
    calls = message.get("tool_calls") or ()
    read = chat.parse(reply).get("tool_calls", ())
    for call, as_read in zip(calls, read, strict=False):
        call["id"] = as_read["id"]
    return reply


def empty_reasoning(chat: ChatFormat) -> str:
    """The reasoning that the generation prompt opens and closes, so that the policy says none; "" if it does not."""
    return chat.closed_reasoning(chat.encode_prompt([_QUESTION]))


def possible_reasoning(chat: ChatFormat) -> tuple[str, ...]:
    """Reasoning that a turn of the policy may have, the empty one first."""
    if not chat.thinks or empty_reasoning(chat):
        return ("",)
    return ("", "because")


def first_difference(chat: ChatFormat, tools: Sequence[Schema] | None, reasoning: str) -> tuple[str, str]:
    """Where appended and rendered ids first differ ("" if nowhere), and in what.

    Returns:
        The difference, and `observation`, `tool` (before a tool message), `user` (before a user message), or
        `empty reasoning` where the template only leaves that of its generation prompt out of earlier turns.
    """
    conversation: list[Message] = [{"role": "user", "content": "first"}]
    ids = chat.encode_prompt(conversation, tools)
    empty = empty_reasoning(chat)
    to_text = chat.encoder.to_text
    difference, place = "", ""
    for number in range(3):
        message = _turn(number, tools, reasoning)
        reply = speak(chat, message)
        observation = _answer(number, message)
        delta = chat.encode_observations(message, [observation], tools)[0]
        ids += reply + delta
        conversation += [message, observation]
        appended = chat.canonical(ids)
        rendered = chat.encode_conversation(conversation, tools, generation_prompt=True)
        if appended == rendered:
            continue
        as_rendered = rendered[-len(delta) :]
        if delta != as_rendered:
            mine, theirs = to_text(delta), to_text(as_rendered)
            return f"a rollout appends {mine!r} where the template renders {theirs!r}", "observation"
        only_empty = bool(empty) and to_text(appended).replace(empty, "") == to_text(rendered).replace(empty, "")
        if not difference or (place == "empty reasoning" and not only_empty):
            around = _around_first_difference(appended, rendered)
            mine, theirs = to_text(appended[around]), to_text(rendered[around])
            difference = f"after turn {number} a rollout has {mine!r} where the template renders {theirs!r}"
            place = "empty reasoning" if only_empty else observation["role"]
    return difference, place


def _turn(number: int, tools: Sequence[Schema] | None, reasoning: str) -> Message:
    """A call, or an answer where there are no tools and in the second turn."""
    message: Message = {"role": "assistant", "content": f"answer {number}"}
    if tools and number != 1:
        message = calling(tools[0]["function"]["name"], {"query": "x"})
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _answer(number: int, turn: Message) -> Message:
    """The tool's answer to a call, or the next question."""
    calls = turn.get("tool_calls")
    if not calls:
        return {"role": "user", "content": f"next {number}"}
    answer = tool_answer(f"result {number}", calls[0]["function"]["name"])
    return answer | {"tool_call_id": calls[0]["id"]}


def _around_first_difference(first: Sequence[int], second: Sequence[int]) -> slice:
    """Some ids before and after the place where two lists of ids differ first."""
    place = min(len(first), len(second))
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            place = at
            break
    return slice(max(0, place - 5), place + 10)


def differences(chat: ChatFormat, tools: Sequence[Schema] | None) -> dict[str, tuple[str, str]]:
    """By reasoning, the first difference of conversations whose turns contain it."""
    return {reasoning: first_difference(chat, tools, reasoning) for reasoning in possible_reasoning(chat)}


def broken_prefix(found: dict[str, tuple[str, str]]) -> str:
    """The first of `differences` that a rollout cannot live with; "" if there is none."""
    fatal = ("observation", "tool") if len(found) == 1 else ("observation",)
    for difference, place in found.values():
        if difference and place in fatal:
            return difference
    return ""


def hidden_parts(chat: ChatFormat, tools: Sequence[Schema]) -> dict[str, list[str]]:
    """By tool, what the prompt does not show of its name and arguments; empty if it shows all."""
    text = chat.encoder.to_text(chat.encode_prompt([_QUESTION], tools))
    hidden = {}
    for schema in tools:
        function = schema["function"]
        arguments = function.get("parameters", {}).get("properties", {})
        missing = [part for part in (function["name"], *arguments) if part not in text]
        if missing:
            hidden[function["name"]] = missing
    return hidden


def is_sound(chat: ChatFormat) -> bool:
    """Whether the doctor would find no error in conversations with tools."""
    if not chat.supports_tools:
        return False
    tools = [PROBE_TOOL]
    return (
        not split_tokens(chat, tools)
        and not hidden_parts(chat, tools)
        and misread_content(chat) is None
        and not broken_prefix(differences(chat, tools))
    )


def misread_content(chat: ChatFormat) -> str | None:
    """The content that is read of a reply that says `said.`; None if it is right."""
    prompt = chat.encode_prompt([_QUESTION])
    for reasoning in possible_reasoning(chat):
        message = dict(_SAID)
        if reasoning:
            message["reasoning_content"] = reasoning
        content = chat.parse(chat.encode_reply(message), prompt)["content"]
        if content != "said.":
            return content
    return None


def control_tokens(text: str) -> set[str]:
    """The texts that look like control tokens."""
    return {match[0] for match in _CONTROL_TOKEN.finditer(text)}


def split_tokens(chat: ChatFormat, tools: Sequence[Schema] | None) -> list[str]:
    """The control tokens that the template writes and the tokenizer does not know."""
    conversation = [_QUESTION, _SAID, _QUESTION]
    if tools:
        name = tools[0]["function"]["name"]
        conversation += [calling(name, {"query": "x"}), tool_answer(".", name)]
    text = chat.encoder.to_text(chat.encode_conversation(conversation, tools, generation_prompt=True))
    written = dict.fromkeys(match[0] for match in _CONTROL_TOKEN.finditer(text))
    return [token for token in written if chat.tokenizer.backend_tokenizer.token_to_id(token) is None]
