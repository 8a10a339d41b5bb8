"""What a chat format must do right over whole conversations: append what the template renders, read what was said.

The doctor reports what these checks find.
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
    for call, read in zip(message.get("tool_calls") or (), chat.parse(reply).get("tool_calls", ()), strict=False):
        call["id"] = read["id"]
    return reply


def empty_reasoning(chat: ChatFormat) -> str:
    """The reasoning that the generation prompt opens and closes, so that the policy says none; "" if it does not."""
    return chat.closed_reasoning(chat.encode_prompt([_QUESTION]))


def possible_reasoning(chat: ChatFormat) -> tuple[str, ...]:
    """Reasoning that a turn of the policy may have, the empty one first."""
    return ("", "because") if chat.thinks and not empty_reasoning(chat) else ("",)


def first_difference(chat: ChatFormat, tools: Sequence[Schema] | None, reasoning: str) -> tuple[str, str]:
    """Where appended and rendered ids first differ ("" if nowhere), and in what.

    Returns:
        The difference, and `observation`, `tool` (before a tool message), `user` (before a user message), or
        `empty reasoning` where the template only leaves that of its generation prompt out of earlier turns.
    """
    name = tools[0]["function"]["name"] if tools else "look_up"
    conversation: list[Message] = [{"role": "user", "content": "first"}]
    ids = chat.encode_prompt(conversation, tools)
    empty = empty_reasoning(chat)
    difference, found = "", ""
    for number in range(3):
        message: Message = {"role": "assistant", "content": f"answer {number}"}
        observation: Message = {"role": "user", "content": f"next {number}"}
        if tools and number != 1:
            message = calling(name, {"query": "x"})
        if reasoning:
            message["reasoning_content"] = reasoning
        reply = speak(chat, message)
        if calls := message.get("tool_calls"):
            observation = tool_answer(f"result {number}", name) | {"tool_call_id": calls[0]["id"]}
        delta = chat.encode_observations(message, [observation], tools)[0]
        ids += reply + delta
        conversation += [message, observation]
        whole = chat.encode_conversation(conversation, tools, generation_prompt=True)
        appended = chat.canonical(ids)
        if appended == whole:
            continue
        if whole[-len(delta) :] != delta:
            mine, theirs = chat.encoder.to_text(delta), chat.encoder.to_text(whole[-len(delta) :])
            return f"a rollout appends {mine!r} where the template renders {theirs!r}", "observation"
        mine, theirs = (chat.encoder.to_text(side) for side in (appended, whole))
        only_empty = bool(empty) and mine.replace(empty, "") == theirs.replace(empty, "")
        if not difference or (found == "empty reasoning" and not only_empty):
            pairs = zip(appended, whole, strict=False)
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(appended), len(whole)))
            mine, theirs = (chat.encoder.to_text(side[max(0, place - 5) : place + 10]) for side in (appended, whole))
            difference = f"after turn {number} a rollout has {mine!r} where the template renders {theirs!r}"
            found = "empty reasoning" if only_empty else observation["role"]
    return difference, found


def differences(chat: ChatFormat, tools: Sequence[Schema] | None) -> dict[str, tuple[str, str]]:
    """By reasoning, the first difference of conversations whose turns contain it."""
    return {reasoning: first_difference(chat, tools, reasoning) for reasoning in possible_reasoning(chat)}


def broken_prefix(found: dict[str, tuple[str, str]]) -> str:
    """The first of `differences` that a rollout cannot live with; "" if there is none."""
    fatal = ("observation", "tool") if len(found) == 1 else ("observation",)
    return next((difference for difference, place in found.values() if difference and place in fatal), "")


def hidden_parts(chat: ChatFormat, tools: Sequence[Schema]) -> dict[str, list[str]]:
    """By tool, what the prompt does not show of its name and arguments; empty if it shows all."""
    text = chat.encoder.to_text(chat.encode_prompt([_QUESTION], tools))
    hidden = {}
    for function in (schema["function"] for schema in tools):
        parts = [function["name"], *function.get("parameters", {}).get("properties", {})]
        if missing := [part for part in parts if part not in text]:
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
    """What a reply that says `said.` is read as; None if it is read as that."""
    prompt = chat.encode_prompt([_QUESTION])
    for reasoning in possible_reasoning(chat):
        message = _SAID | ({"reasoning_content": reasoning} if reasoning else {})
        content = chat.parse(chat.encode_reply(message), prompt)["content"]
        if content != "said.":
            return content
    return None


def control_tokens(text: str) -> set[str]:
    """What looks like one in a text."""
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
