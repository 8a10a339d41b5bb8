"""Which ids a request goes on from: conversations of one trajectory, known by what their messages say.

Two messages are the same if they have one role, one text without the white space around it and, for an assistant, the
same calls in the same order: names and parsed arguments, 3.0 being 3. Nothing else counts. A conversation is its tools
and its messages. The rule decides only which ids are put together; rows are found by ids alone (`Draft`), so that an
error in it may cost a row, and never makes a wrong mask.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.trajectory import Author, Message

Schema = dict[str, Any]
_TO_TEXT = json.JSONEncoder(sort_keys=True, default=str).encode  # made once: every call reads all messages
EXCERPT_CHARS = 90
"""Characters of a message that show where it differs."""


@dataclass(kw_only=True, eq=False)
class HeldTurn:
    """A turn of the policy that an agent has heard."""

    before: HeldTurn | None
    """The turn that its conversation goes on from."""
    ids: list[int]
    """The messages between both, or the whole prompt."""
    sampled: list[int]
    message: Message
    is_stopped: bool
    """The model ended the turn itself."""
    is_gone_on: bool = False
    """A turn that was heard stands after it."""
    depth: int = field(init=False)
    """Number of turns up to it, itself included."""

    def __post_init__(self) -> None:
        self.depth = 1 if self.before is None else self.before.depth + 1

    @property
    def context(self) -> list[int]:
        """All ids up to the end of the turn."""
        turns: list[HeldTurn] = [self]
        while (before := turns[-1].before) is not None:
            turns.append(before)
        ids: list[int] = []
        for turn in reversed(turns):
            ids += turn.ids
            ids += turn.sampled
        return ids


@dataclass(kw_only=True)
class HeldContext:
    """The context of a turn."""

    messages: list[Message]
    tools: list[Schema]
    shown: str
    """The tools' identity."""
    said: list[str]
    """(M,) the messages' identities."""
    keys: list[str]
    """(M + 1,) identities of the conversation's beginnings: of none of its messages, of one, ..., of all."""
    ids: list[int] = field(default_factory=list)
    before: HeldTurn | None = None
    """The turn that is gone on from; None if everything was put together anew."""
    delta: list[int] = field(default_factory=list)
    """(N,) the ids after that turn."""
    authors: list[Author] = field(default_factory=list)
    """(N,)"""
    news: list[Message] = field(default_factory=list)
    """The messages after it."""
    own: dict[int, HeldTurn] = field(default_factory=dict)
    """Place among the messages -> the turn of the policy that stands there."""
    drift: str | None = None
    """Where a conversation first differs from the last one that it does not go on from: tools, or a role."""
    difference: str = ""
    """The difference there, in words."""

    @property
    def key(self) -> str:
        """The conversation's identity."""
        return self.keys[-1]


class Held:
    """The conversations of one trajectory's agent."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._by_key: dict[str, HeldTurn] = {}
        self._by_text: dict[str, HeldTurn] = {}
        self._last: tuple[str, list[str]] | None = None
        """Tools and messages of the last conversation."""
        self._newest: HeldContext | None = None
        """The context of the last request."""

    def context(self, messages: list[Message], tools: list[Schema]) -> HeldContext:
        """The ids of a conversation: those that are held, and what is newly encoded.

        Raises:
            ChatFormatError: the chat template refuses the messages.
        """
        self._newest = context = self._identified(messages, tools)
        said, keys = context.said, context.keys
        known = (place for place in range(len(messages), 0, -1) if keys[place] in self._by_key)
        start = next(known, 0)
        context.before = self._by_key.get(keys[start])
        context.own = own = {
            place: self._by_text[text]
            for place, text in enumerate(said)
            if messages[place]["role"] == "assistant" and text in self._by_text
        }
        if context.before is not None:
            later = {place: turn for place, turn in own.items() if place >= start}
            try:
                context.delta, context.authors = self._put_together(context.before, messages, start, later, tools)
                context.ids = context.before.context + context.delta
                context.news = messages[start:]
            except ChatFormatError:  # what follows the turn cannot be shown there
                context.before = None
        if context.before is None:
            context.ids, _ = self._put_together(None, messages, 0, own, tools)
        is_linear = context.before is not None and not context.before.is_gone_on
        if not is_linear or any(item["role"] == "assistant" for item in context.news):
            context.drift, context.difference = self._difference(context.shown, said)
        return context

    def _identified(self, messages: list[Message], tools: list[Schema]) -> HeldContext:
        """A context without ids; messages that are the last request's own, as they were read, keep their identity."""
        last, num_same = self._newest, 0
        shown = last.shown if last is not None and last.tools == tools else _TO_TEXT(_plain(tools))
        said, keys = [], [_extended("", shown)]
        if last is not None and last.shown == shown:
            num_same = sum(map(operator.is_, messages, last.messages))  # none stands after one that is another
            said, keys = last.said[:num_same], last.keys[: num_same + 1]
        for message in messages[num_same:]:
            said.append(identity(message))
            keys.append(_extended(keys[-1], said[-1]))
        return HeldContext(messages=messages, tools=tools, shown=shown, said=said, keys=keys)

    def add(self, context: HeldContext, sampled: Sequence[int], message: Message, *, is_stopped: bool) -> HeldTurn:
        """An agent has heard a turn that was sampled after a context."""
        ids = context.ids if context.before is None else context.delta
        turn = HeldTurn(before=context.before, ids=ids, sampled=list(sampled), message=message, is_stopped=is_stopped)
        if context.before is not None:
            context.before.is_gone_on = True
        text = identity(message)
        self._by_key[_extended(context.key, text)] = turn
        self._by_text[text] = turn
        self._last = context.shown, [*context.said, text]
        return turn

    def _put_together(
        self,
        current: HeldTurn | None,
        messages: list[Message],
        start: int,
        own: dict[int, HeldTurn],
        tools: Sequence[Schema] | None,
    ) -> tuple[list[int], list[Author]]:
        """Ids and authors after a turn, (N,); turns of the policy in the messages keep the ids that were sampled."""
        ids: list[int] = []
        authors: list[Author] = []
        for place, turn in [*own.items(), (len(messages), None)]:
            new, written_by = self._encoded(current, messages[start:place], tools)
            ids, authors = ids + new, authors + written_by
            if turn is not None:
                ids, authors = ids + turn.sampled, authors + [Author.ENVIRONMENT] * len(turn.sampled)
            current, start = turn, place + 1
        return ids, authors

    def _encoded(
        self, turn: HeldTurn | None, messages: list[Message], tools: Sequence[Schema] | None
    ) -> tuple[list[int], list[Author]]:
        if turn is None:
            hide = self._chat.encoder.hide  # what looks like a special token in them is text, whoever said it
            safe = [hide(item, special_only=True) if item["role"] == "assistant" else item for item in messages]
            ids = self._chat.encode_prompt(safe, tools or None)
            return ids, [Author.ENVIRONMENT] * len(ids)
        closing = self._chat.encode_turn_end(turn.sampled, stopped=turn.is_stopped)
        rest, authors = self._chat.encode_observations(turn.message, messages, tools or None)
        return [*closing, *rest], [*[Author.TEMPLATE] * len(closing), *authors]

    def _difference(self, tools: str, said: list[str]) -> tuple[str | None, str]:
        if self._last is None:
            return None, ""
        known_tools, known = self._last
        if known_tools != tools:
            return "tools", f"tools {_change(known_tools, tools)}"
        for place, (old, new) in enumerate(itertools.zip_longest(known, said, fillvalue="")):
            if old != new:
                role = json.loads(old or new)[0]
                return role, f"{role} message {place}: {_change(_words(old), _words(new))}"
        return None, ""


def _words(text: str) -> str:
    """A message's identity for a reader; "" for no message."""
    if not text:
        return ""
    role, content, calls = json.loads(text)
    return f"{role}: {content}{json.dumps(calls, ensure_ascii=False) if calls else ''}"


def _change(old: str, new: str) -> str:
    """The surroundings of the first difference."""
    num_same = 0
    while num_same < min(len(old), len(new)) and old[num_same] == new[num_same]:
        num_same += 1
    start = max(0, num_same - EXCERPT_CHARS // 3)
    excerpt = slice(start, start + EXCERPT_CHARS)
    before = repr(old[excerpt]) if old else "nothing"
    after = repr(new[excerpt]) if new else "nothing"
    return f"{before} became {after}"


def identity(message: Message) -> str:
    """The part of a message that identifies it, as text.

    >>> identity({"role": "developer", "content": " Be brief. ", "name": "x"})
    '["system", "Be brief.", []]'
    """
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    told = [[call.get("name"), _plain(call.get("arguments"))] for call in calls]
    role = "system" if message["role"] == "developer" else message["role"]
    return _TO_TEXT([role, str(message.get("content") or "").strip(), told])


def _plain(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _extended(key: str, text: str) -> str:
    return hashlib.blake2b(f"{key} {text}".encode(), digest_size=16).hexdigest()
