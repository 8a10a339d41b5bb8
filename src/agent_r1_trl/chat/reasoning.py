"""Conversations as a server shows them: rendered before every turn, without the reasoning that the template drops.

Which reasoning goes is the template's own decision (that of all earlier turns, of those before the last user message,
or before the last answer), as with `apply_chat_template` at inference. A turn costs the same, however long the
conversation is: where the rule allows it, only the end is rendered, and only text that changed is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.encoding import EncodedText, TextEncoder
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.messages import readable
from agent_r1_trl.chat.rendering import ChatTemplate, calling, num_common, tool_answer
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema

_CLOSERS = re.compile(r"</(?:\w+:)?think>|\[/THINK\]")
_MARK = "thought_b7e1c3d9"
_QUESTION: Message = {"role": "user", "content": "q"}
_ANSWER: Message = {"role": "assistant", "content": "said"}


@dataclass(frozen=True)
class ReasoningRule:
    """A chat template's treatment of the reasoning of earlier turns."""

    drops: bool
    """Some reasoning of an earlier turn is not shown."""
    tags: tuple[str, str] | None
    """The tags around reasoning in `content`, for a template that knows no `reasoning_content`; else None."""
    is_local: bool
    """The end of a conversation tells what becomes of it when it goes on."""


def find_rule(template: ChatTemplate) -> ReasoningRule:
    """The rule of a template, found by rendering conversations of a few turns."""
    reasoning = {"reasoning_content": _MARK}
    shown = [_MARK in text for text in _probes(template, reasoning)]
    tags = None
    closer = _CLOSERS.search(template.source)
    if not any(shown) and closer:
        opener = closer[0].replace("/", "", 1)
        around = (opener, closer[0])
        inside = {"content": with_reasoning(around, _MARK, "said")}
        shown_inside = [_MARK in text for text in _probes(template, inside)]
        if any(shown_inside):
            tags = around
            reasoning = inside
            shown = shown_inside
    return ReasoningRule(drops=not all(shown), tags=tags, is_local=_is_local(template, reasoning))


def _is_local(template: ChatTemplate, reasoning: Message) -> bool:
    """Whether a long conversation of all kinds of turns is the same text, rendered at once and by its ends."""
    call = [calling(), tool_answer("t")]
    call_with_reasoning = [calling(**reasoning), tool_answer("t")]
    answer = [_ANSWER, _QUESTION]
    answer_with_reasoning = [_ANSWER | reasoning, _QUESTION]
    turns = [
        *[call_with_reasoning] * 5,
        call,
        answer,
        answer_with_reasoning,
        answer_with_reasoning,
        call,
        call,
        *[call_with_reasoning] * 4,
        answer_with_reasoning,
        call,
        answer_with_reasoning,
        call_with_reasoning,
    ]
    whole = [_QUESTION]
    new = [_QUESTION]  # the prompt comes with the first turn
    conversation = RenderedConversation(template, template.probe_tools)
    try:
        for turn in turns:
            whole += turn
            conversation.add([*new, *turn], num_prompt=1)
            if conversation.text != template.probe(whole, generation_prompt=True):
                return False
            new = []
    except Exception:  # templates raise what they like
        return False
    return True


def with_reasoning(tags: tuple[str, str], reasoning: str, content: str) -> str:
    """A content with its reasoning in front, as models write it."""
    return f"{tags[0]}\n{reasoning}\n{tags[1]}\n\n{content}"


def _probes(template: ChatTemplate, reasoning: Message) -> Iterator[str]:
    """Conversations in which one turn, never the last, has the reasoning, as far as the template takes them."""
    answered = [_QUESTION, _ANSWER | reasoning, _QUESTION]
    called = [_QUESTION, calling(**reasoning), tool_answer("t")]
    for conversation in (answered, called, [*called, _ANSWER, _QUESTION]):
        text = template.attempt(conversation, generation_prompt=True)
        if text:
            yield text


def check_drops(rule: ReasoningRule, *, thinks: bool, kwargs: dict[str, Any]) -> None:
    """Refuse `strips_reasoning` where it would do nothing: the template knows no reasoning, or it keeps all of it."""
    if thinks and rule.drops:
        return
    reason = "knows no reasoning"
    if thinks:
        reason = "keeps the reasoning of earlier turns"
        if kwargs:
            reason += f" with chat_template_kwargs={kwargs}"
    raise ChatFormatError(
        f"context='strip_thinking' has no effect: the chat template {reason}, so a server shows them as they were "
        "sampled.",
        "Set context='keep' (of a ChatFormat, strips_reasoning=False).",
    )


class RenderedConversation:
    """The text of a conversation that grows, generation prompt included.

    What a turn changes lies behind the last user message before it: reasoning up to there has been dropped already, or
    never will be. So the conversation's end is rendered with and without the new messages, behind the prompt alone; if
    the first text is how the conversation ends, the second is how it goes on. Otherwise, or where the template's rule
    is not local, all of it is rendered.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[Schema] | None, *, is_local: bool = True) -> None:
        self._template = template
        self.tools = tools
        self._is_local = is_local
        self.messages: list[Message] = []
        self.text = ""

    def add(self, new: Sequence[Message], num_prompt: int) -> int:
        """Add the prompt or a turn with what answered it; returns how many characters at the start are the old ones.

        Raises:
            Exception: the template refuses the conversation, which stays as it was.
        """
        spliced = None
        if self._is_local and self.messages:
            end = self._end(new, num_prompt)
            if end is not None:
                spliced = self._splice([*self.messages[:num_prompt], *self.messages[end:]], new)
        if spliced is None:
            text = self._render([*self.messages, *new])
            spliced = num_common(self.text, text), text
        self.messages += new
        num_kept, self.text = spliced
        return num_kept

    def _end(self, new: Sequence[Message], num_prompt: int) -> int | None:
        """Index of the turn from which on messages may change, or that shows that they do not; None for the first."""
        last = len(self.messages) - 1
        only_adds_a_call = bool(new[0].get("tool_calls")) and all(message["role"] == "tool" for message in new[1:])
        if not only_adds_a_call:  # reasoning may go up to the last user message
            last = self._find_last("user", last, num_prompt) or 0
        return self._find_last("assistant", last, num_prompt + 1)

    def _find_last(self, role: str, last: int, first: int) -> int | None:
        """Index of the last message of a role among those from `first` to `last`."""
        for index in range(last, first - 1, -1):
            if self.messages[index]["role"] == role:
                return index
        return None

    def _splice(self, end: list[Message], new: Sequence[Message]) -> tuple[int, str] | None:
        """Number of kept characters, and the text with `new`, rendered behind the end of the conversation alone."""
        try:
            before = self._render(end)
            after = self._render([*end, *new])
        except Exception:  # without its middle, a template may refuse a conversation
            return None
        num_prompt = num_common(self.text, before)
        num_kept = num_common(before, after)
        if num_kept < num_prompt or not self.text.endswith(before[num_prompt:]):
            return None
        length = len(self.text) - len(before) + num_kept
        return length, self.text[:length] + after[num_kept:]

    def _render(self, messages: Sequence[Message]) -> str:
        return self._template.render(messages, self.tools, generation_prompt=True)


class History:
    """One conversation, rendered before every turn."""

    def __init__(
        self, template: ChatTemplate, encoder: TextEncoder, rule: ReasoningRule, tools: Sequence[Schema] | None
    ) -> None:
        self._template = template
        self._encoder = encoder
        self._rule = rule
        hidden = encoder.hide(list(tools), special_only=True) if tools else None
        self.conversation = RenderedConversation(template, hidden, is_local=rule.is_local)
        self._num_seen = 0
        self._is_refused = False
        self._encoded = EncodedText()

    def encode(self, messages: Sequence[Message], num_prompt: int) -> tuple[int, list[int]] | None:
        """Ids of the conversation up to and including the generation prompt; None if the template refuses it.

        Control tokens that are spelled in observations become text, as in `ChatFormat.encode_observations`.

        Args:
            messages: the prompt, then turns and what answered them; those of the last call and one turn more.
            num_prompt: number of messages of the prompt.

        Returns:
            how many ids at the start are those of the last call, and the ids after them.
        """
        if self._is_refused:
            return None
        for shown in self._ways(messages, num_prompt):
            try:
                num_kept = self.conversation.add(shown, num_prompt)
            except Exception:  # templates raise what they like
                continue
            self._num_seen = len(messages)
            return self._encoder.encode_on(self.conversation.text, self._encoded, num_kept)
        self._is_refused = True
        return None

    def _ways(self, messages: Sequence[Message], num_prompt: int) -> Iterator[list[Message]]:
        """Ways to show the messages that are new, the most faithful first."""
        source = self._template.source
        prompt: list[Message] = []
        if not self._num_seen:
            prompt = self._encoder.hide_prompt(readable(messages[:num_prompt], source, where="prompt"))
        turn, *rest = messages[max(self._num_seen, num_prompt) :]
        observations = readable(rest, source, where="observations")
        told: list[Message] = self._encoder.hide([{"content": "", **observation} for observation in observations])
        yield [*prompt, self._said(turn), *told]
        # GPT-OSS's template refuses a call with reasoning and a text before it.
        without = self._said({**turn, "reasoning_content": None})
        yield [*prompt, without, *told]
        as_user = [{"role": "user", "content": message["content"]} for message in told]
        yield [*prompt, without, *as_user]

    def _said(self, turn: Message) -> Message:
        """A turn as a chat client keeps it."""
        message: Message = {"content": ""}
        for name in ("role", "content", "reasoning_content", "tool_calls"):
            if turn.get(name):
                message[name] = self._encoder.hide(turn[name], special_only=True)
        reasoning = message.pop("reasoning_content", None)
        if reasoning and self._rule.tags:
            message["content"] = with_reasoning(self._rule.tags, reasoning, message["content"])
        elif reasoning:
            message["reasoning_content"] = reasoning
        return message
