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
        self._constant_header = ""
        self.no_tools: list[dict[str, Any]] | None = None
        """What to pass as tools where there are none; some templates cannot count None."""
        question: Message = {"role": "user", "content": "?"}
        self.probe_tools: list[dict[str, Any]] | None = [PROBE_TOOL] if plain else None
        """What to pass as tools where a rendering is only a probe: Hermes' template for tools needs some."""
        try:
            self.probe([question])
        except Exception:  # templates raise what they like
            self.no_tools, self.probe_tools = [], [PROBE_TOOL]
        self._constant_header = self._find_constant_header(question)

    def _find_constant_header(self, question: Message) -> str:
        """The generation prompt of a template that writes it after every conversation, as Command-R's does."""
        try:
            asked, begun = (self.probe([question], generation_prompt=prompted) for prompted in (False, True))
        except Exception:  # a template that cannot render a question is refused later, with a reason
            return ""
        eos, after = getattr(self.tokenizer, "eos_token", None), asked.rpartition("?")[2]
        return after[after.rindex(eos) + len(eos) :] if eos and eos in after and asked == begun else ""

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
        return text if generation_prompt else text.removesuffix(self._constant_header)

    def probe(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """`render` for a conversation that no model will see."""
        return self.render(messages, self.probe_tools, generation_prompt=generation_prompt)

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
        """GPT-OSS and LFM2.5 call a thought `thinking`."""
        if self._reads_thinking and message.get("reasoning_content") and "thinking" not in message:
            return {**message, "thinking": message["reasoning_content"]}
        return message


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        changed.append({**call, "function": function})
    return {**message, "tool_calls": changed}


# ---------------------------------------------------------------- what a template can do

_MARKS = ("name_a8f3e2b1", "key_b9d4f5c2", "value_d6e7a9f3", "content_c4f9a8e2")


def calling(name: str = "f", arguments: Any = None, **more: Any) -> Message:
    """An assistant message with one call."""
    function = {"name": name, "arguments": {"x": 1} if arguments is None else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": CALL_ID, "function": function}],
        **more,
    }


def tool_answer(content: str, name: str = "f") -> Message:
    """The answer to the call of `calling`."""
    return {"role": "tool", "name": name, "tool_call_id": CALL_ID, "content": content}


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the template shows a call's name and arguments and the tool's answer."""
    name, key, value, content = _MARKS
    turns = [{"role": "user", "content": "hi"}, calling(name, {key: value}), tool_answer(content, name)]
    try:
        text = template.probe(turns)
    except Exception:  # templates raise what they like
        return False
    return all(mark in text for mark in _MARKS)


def preserves_prefixes(template: ChatTemplate, **thought: str) -> bool:
    """Whether a turn with a call stays as it is when the tool's answer follows."""
    turns = [{"role": "user", "content": "hi"}, calling(_MARKS[0], {}, **thought)]
    try:
        alone = template.probe(turns)
        whole = template.probe([*turns, tool_answer("dummy", _MARKS[0])], generation_prompt=True)
    except Exception:  # templates raise what they like
        return False
    # Nemotron Nano's template does not show the calls of the last message at all; a rollout never renders it last.
    return whole.startswith(alone) or _MARKS[0] not in alone


def ends_turns(template: ChatTemplate) -> bool:
    """Whether anything follows what an assistant said (GLM's published template leaves its turns open)."""
    try:
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "said"}]
        return not template.probe(turns).endswith("said")
    except Exception:  # templates raise what they like
        return False


def keeps_thoughts(template: ChatTemplate) -> bool:
    """Whether a turn with a thought stays as it is when a user message follows."""
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "said", "reasoning_content": "thought"},
        {"role": "user", "content": "v"},
    ]
    try:
        return template.probe(turns).startswith(template.probe(turns[:2]))
    except Exception:  # templates raise what they like
        return False
