"""Conversations as a server shows them: rendered anew before every turn, without the thoughts that the template drops.

Which thoughts go is the template's own decision: the whole conversation is rendered with it, as `apply_chat_template`
does at inference. So the ids of a context are those of inference, whatever the rule is (all earlier turns, those
before the last user message, those before the last answer).

The cost of a turn: rendering is text work, a few milliseconds for a long conversation. Encoding is the slow part, and
only text that changed is encoded.

Not covered: how a turn is cut into thought, content and calls (`parsing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.chat.encoding import TextEncoder
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.jinja import ChatTemplate, calling, tool_answer
from agent_r1_trl.chat.messages import readable
from agent_r1_trl.trajectory import Message

_CLOSERS = re.compile(r"</(?:\w+:)?think>|\[/THINK\]")
_MARK = "thought_b7e1c3d9"


@dataclass(frozen=True)
class ThoughtRule:
    """What a chat template does with the thoughts of earlier turns."""

    drops: bool
    """Some thought of an earlier turn is not shown."""
    tags: tuple[str, str] | None
    """What stands around a thought in `content`, for a template that knows no `reasoning_content`; else None."""


def find_rule(template: ChatTemplate) -> ThoughtRule:
    """The rule of a template, found by rendering conversations of a few turns."""
    shown = [_MARK in text for text in _probes(template, {"reasoning_content": _MARK})]
    closer = _CLOSERS.search(template.source)
    if not any(shown) and closer:
        tags = (closer[0].replace("/", "", 1), closer[0])
        inside = [_MARK in text for text in _probes(template, {"content": with_thought(tags, _MARK, "said")})]
        if any(inside):
            return ThoughtRule(drops=not all(inside), tags=tags)
    return ThoughtRule(drops=not all(shown), tags=None)


def with_thought(tags: tuple[str, str], thought: str, content: str) -> str:
    """A content with its thought in front, as models write it."""
    return f"{tags[0]}\n{thought}\n{tags[1]}\n\n{content}"


def _probes(template: ChatTemplate, thought: Message) -> Iterator[str]:
    """Conversations in which one turn, never the last, has the thought."""
    question: Message = {"role": "user", "content": "q"}
    answer: Message = {"role": "assistant", "content": "said"}
    for conversation in (
        [question, answer | thought, question],
        [question, calling(**thought), tool_answer("t")],
        [question, calling(**thought), tool_answer("t"), answer, question],
    ):
        try:
            yield template.probe(conversation, generation_prompt=True)
        except Exception:  # a template without tools, or one that wants other roles
            continue


def check_drops(rule: ThoughtRule, *, thinks: bool, kwargs: dict[str, Any]) -> None:
    """Refuse `thinking='strip'` where it would do nothing.

    Raises:
        ChatFormatError: the template knows no thoughts, or it keeps them all.
    """
    if thinks and rule.drops:
        return
    reason = "knows no thoughts"
    if thinks:
        reason = "keeps the thoughts of earlier turns" + (f" with chat_template_kwargs={kwargs}" if kwargs else "")
    raise ChatFormatError(
        f"thinking='strip' has no effect: the chat template {reason}, so a server shows them as they were sampled.",
        "Use thinking='keep' (and context_policy='keep', if you set it).",
    )


class History:
    """One conversation, rendered before every turn.

    Args:
        template: renders.
        encoder: of the template's tokenizer.
        rule: of the template.
        tools: schemas.
    """

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, rule: ThoughtRule, tools: Any) -> None:
        self._template, self._encoder, self._rule = template, encoder, rule
        self._tools = encoder.hide(list(tools), special_only=True) if tools else None
        self._shown: list[Message] = []
        """The messages so far as the template gets them."""
        self._num_seen = 0
        self._is_refused = False
        self._pieces: dict[str, list[int]] = {}
        """Ids of the pieces of the last rendering."""

    def encode(self, messages: Sequence[Message], num_prompt: int) -> list[int] | None:
        """Ids of the conversation up to and including the generation prompt; None if the template refuses it.

        Control tokens that are spelled in observations become text, as in `ChatFormat.encode_observations`.

        Args:
            messages: the prompt, then turns and what answered them; those of the last call and one turn more.
            num_prompt: number of messages of the prompt.
        """
        if self._is_refused:
            return None
        for shown in self._ways(messages, num_prompt):
            try:
                text = self._template.render([*self._shown, *shown], self._tools, generation_prompt=True)
            except Exception:  # templates raise what they like
                continue
            self._shown += shown
            self._num_seen = len(messages)
            ids, self._pieces = self._encoder.encode_pieces(text, self._pieces)
            return ids
        self._is_refused = True
        return None

    def _ways(self, messages: Sequence[Message], num_prompt: int) -> Iterator[list[Message]]:
        """Ways to show the messages that are new, the most faithful first."""
        prompt: list[Message] = []
        if not self._num_seen:
            prompt = [
                message if message.get("role") == "assistant" else self._encoder.hide(message, special_only=True)
                for message in readable(messages[:num_prompt], self._template.source, where="prompt")
            ]
        turn, *rest = messages[max(self._num_seen, num_prompt) :]
        plain = readable(rest, self._template.source, where="observations")
        told: list[Message] = self._encoder.hide([{"content": "", **observation} for observation in plain])
        yield [*prompt, self._said(turn), *told]
        # GPT-OSS's template refuses a call with a thought and a text before it.
        without = self._said({**turn, "reasoning_content": None})
        yield [*prompt, without, *told]
        yield [*prompt, without, *({"role": "user", "content": message["content"]} for message in told)]

    def _said(self, turn: Message) -> Message:
        """A turn as a chat client keeps it."""
        names = ("role", "content", "reasoning_content", "tool_calls")
        kept = {name: self._encoder.hide(turn[name], special_only=True) for name in names if turn.get(name)}
        message = {"content": "", **kept}
        thought = message.pop("reasoning_content", None)
        if thought and self._rule.tags:
            message["content"] = with_thought(self._rule.tags, thought, message["content"])
        elif thought:
            message["reasoning_content"] = thought
        return message
