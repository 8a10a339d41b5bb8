"""Messages as environments and data sets write them, made into messages that every template shows: roles and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.tools.blocks import describe_bytes, name_of_media, text_of_blocks
from agent_r1_trl.tools.calls import read_arguments
from agent_r1_trl.tools.render import NoTextError, spell_out
from agent_r1_trl.trajectory import Message

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "ai": "assistant", "function": "tool"}
_MEDIA = (
    "image", "image_url", "image_file", "input_image", "video", "video_url", "audio", "input_audio", "file",
    "input_file",
)  # fmt: skip


def readable(messages: Sequence[Message], template: str, *, where: str) -> list[Message]:
    """The messages with contents as text; arguments of calls that are JSON text become dicts.

    Args:
        messages: from an environment or a data set.
        template: source of the chat template, which may know more roles than the usual ones.
        where: names the place in errors (`prompt`, `observations`).

    Raises:
        ChatFormatError: a role of the prompt that the template does not know, or content that is no text.
    """
    found = []
    for index, message in enumerate(messages):
        role = message.get("role")
        is_known = role in _ROLES or f"'{role}'" in template or f'"{role}"' in template
        if not is_known and where == "observations":
            # In the middle of a rollout the words count: they reach the model as a user's.
            role = "tool" if role == "function" else "user"
            message = {**message, "role": role}
        elif not is_known:
            raise ChatFormatError(
                f"{where}[{index}] has the role {role!r}, which the chat template does not know: the model would not "
                "see the message.",
                f"Use the role {_ALIASES.get(str(role), 'user')!r} (the roles are {', '.join(sorted(_ROLES))}).",
            )
        changed = dict(message)
        if message.get("content") is not None or (role != "assistant" and "content" in message):
            # Templates tell an absent content of a call from an empty one.
            changed["content"] = as_text(message.get("content"), f"{where}[{index}]")
        if message.get("tool_calls"):
            changed["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        found.append(changed)
    return found


def as_text(content: object, where: str) -> str:
    """The text of a message's content: a string, blocks of text, or data as JSON.

    Raises:
        ChatFormatError: there is an image or another object in it that is no text.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, (bytes, bytearray, memoryview)):
        try:
            return _spell_out(content)
        except NoTextError as error:
            raise _no_text(where, str(error)) from error
    if (text := text_of_blocks(content)) is not None:
        return text
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if isinstance(block, dict) and (block.get("type") in _MEDIA or name_of_media(block)):
            raise _no_text(where, f"a block of type {block['type']!r}")
    try:
        return json.dumps(content, ensure_ascii=False, default=_spell_out)
    except NoTextError as error:
        raise _no_text(where, str(error)) from error
    except (TypeError, ValueError, RecursionError):  # circular, or keys that are no strings
        return type(content).__name__


def _spell_out(value: object) -> str:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return spell_out(value)
    if named := describe_bytes(bytes(value)):
        raise NoTextError(f"bytes that are no text, {named}")
    return bytes(value).decode("utf-8", errors="replace")


def _no_text(where: str, what: str) -> ChatFormatError:
    return ChatFormatError(
        f"{where} holds {what}: rollouts are text only, and the model would not see it.",
        "Say in words what the model should know, as a string or as [{'type': 'text', 'text': ...}]. A model that "
        "sees images can be trained on prompts that hold some with trl.GRPOTrainer.",
    )


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = read_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
