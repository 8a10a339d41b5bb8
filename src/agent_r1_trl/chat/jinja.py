"""Renders messages with one chat template, and knows what particular templates demand of whoever renders them.

Not covered: ids (`encoding.py`), which template it is (`templates.py`), the text between turns (`rendering.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.trajectory import Message

CALL_ID = "c00000000"
"""An id of 9 letters and digits: Mistral's templates take no other."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "e"}}},
    },
}
"""Shown to templates that cannot be rendered without tools."""


class ChatTemplate:
    """One chat template of one tokenizer.

    Args:
        tokenizer: renders; it is not changed.
        source: the template.
        kwargs: passed to the template in every rendering.
        plain: the template of conversations without tools, if the tokenizer has another one for those.
    """

    def __init__(
        self, tokenizer: Any, source: str, kwargs: dict[str, Any] | None = None, *, plain: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.plain = plain
        self.kwargs = dict(kwargs or {})
        self._reads_thinking = re.search(r"\.thinking\b|[\"']thinking[\"']", source) is not None
        # The generation prompt of a template that writes it after every conversation, asked or not.
        self._unasked = ""
        self.no_tools: list[dict[str, Any]] | None = None
        """What to pass as tools where there are none; some templates cannot count None."""
        self.probe_tools: list[dict[str, Any]] | None = [PROBE_TOOL] if plain else None
        """What to pass as tools where a rendering is only a probe: Hermes' template for tools needs some."""
        question: Message = {"role": "user", "content": "?"}
        if not self.attempt([question]):
            self.no_tools, self.probe_tools = [], [PROBE_TOOL]
        eos, begun = getattr(tokenizer, "eos_token", None), self.attempt([question], generation_prompt=True)
        if eos and eos in begun.rpartition("?")[2] and begun == self.attempt([question]):
            self._unasked = begun.rpartition(eos)[2]

    def render(self, messages: Sequence[Message], tools: Any, *, generation_prompt: bool) -> str:
        """Text of a conversation; whatever the template raises propagates."""
        messages = [self._readable(message) for message in messages]
        try:
            text = self._apply(messages, tools, generation_prompt)
        except TypeError:
            # DeepSeek's templates concatenate the arguments of a call, which must then be text.
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == messages:
                raise
            text = self._apply(as_text, tools, generation_prompt)
        return text if generation_prompt else text.removesuffix(self._unasked)

    def probe(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """`render` for a conversation that no model will see."""
        return self.render(messages, self.probe_tools, generation_prompt=generation_prompt)

    def attempt(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """`probe`, or "" if the template refuses the conversation."""
        try:
            return self.probe(messages, generation_prompt=generation_prompt)
        except Exception:  # templates raise what they like
            return ""

    def _apply(self, messages: Sequence[Message], tools: Any, generation_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else self.no_tools,
                chat_template=self.source if tools or not self.plain else self.plain,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs,
            )
        )

    def _readable(self, message: Message) -> Message:
        """GPT-OSS and LFM2.5 call reasoning `thinking`."""
        if self._reads_thinking and message.get("reasoning_content") and "thinking" not in message:
            return {**message, "thinking": message["reasoning_content"]}
        return message


def _with_text_arguments(message: Message) -> Message:
    changed = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        changed.append({**call, "function": function})
    return {**message, "tool_calls": changed} if changed else message


# ---------------------------------------------------------------- what a template can do

_MARKS = ("name_a8f3e2b1", "key_b9d4f5c2", "value_d6e7a9f3", "content_c4f9a8e2")
_HI: Message = {"role": "user", "content": "hi"}


def calling(name: str = "f", arguments: Any = None, **more: Any) -> Message:
    """An assistant message with one call."""
    function = {"name": name, "arguments": {"x": 1} if arguments is None else arguments}
    calls = [{"type": "function", "id": CALL_ID, "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def tool_answer(content: str, name: str = "f") -> Message:
    """The answer to the call of `calling`."""
    return {"role": "tool", "name": name, "tool_call_id": CALL_ID, "content": content}


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the template shows a call's name and arguments and the tool's answer."""
    name, key, value, content = _MARKS
    text = template.attempt([_HI, calling(name, {key: value}), tool_answer(content, name)])
    return all(mark in text for mark in _MARKS)


def preserves_prefixes(template: ChatTemplate, **reasoning: str) -> bool:
    """Whether a turn with a call stays as it is when the tool's answer follows."""
    turns = [_HI, calling(_MARKS[0], {}, **reasoning)]
    alone = template.attempt(turns)
    whole = template.attempt([*turns, tool_answer("dummy", _MARKS[0])], generation_prompt=True)
    # Nemotron Nano's template does not show the calls of the last message at all; a rollout never renders it last.
    return bool(alone and whole) and (whole.startswith(alone) or _MARKS[0] not in alone)


def ends_turns(template: ChatTemplate) -> bool:
    """Whether anything follows what an assistant said (GLM's published template leaves its turns open)."""
    text = template.attempt([_HI, {"role": "assistant", "content": "said"}])
    return bool(text) and not text.endswith("said")


def keeps_reasoning(template: ChatTemplate) -> bool:
    """Whether a turn with reasoning stays as it is when a user message follows."""
    turns = [_HI, {"role": "assistant", "content": "said", "reasoning_content": "thought"}]
    alone, whole = template.attempt(turns), template.attempt([*turns, _HI])
    return bool(alone and whole) and whole.startswith(alone)
