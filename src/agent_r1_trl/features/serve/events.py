"""What a conversation tells whoever watches it, while it happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_r1_trl.chat.format import ChatFormat

Kind = Literal["prompt", "text", "call", "observation"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has just happened."""

    kind: Kind
    """`prompt`: a message that the environment put before the first turn. `text`: a piece of what the model says.
    `call`: the model calls a tool. `observation`: what the environment answered."""
    text: str = ""
    name: str = ""
    """Name of the tool; for a prompt or another observation, the role of the message."""
    arguments: Any = None
    """Arguments of a call as the model gave them, a dict as a rule."""
    call_id: str = ""
    is_error: bool = False
    """Whether the call of an observation failed."""


Listener = Callable[[Event], None]


class TextStream:
    """Sampled ids as text, piece by piece; a character is told as soon as all its bytes are there.

    Args:
        chat: the model's chat format; tokens that end a turn are left out.
        tell: receives the pieces.
    """

    def __init__(self, chat: ChatFormat, tell: Callable[[str], None]) -> None:
        self._tokenizer, self._stops, self._tell = chat.tokenizer, frozenset(chat.stop_token_ids), tell
        self._ids: list[int] = []
        self._start = self._told = 0
        """Ids from `_start` on are decoded each time; those before `_told` have been told."""

    def take(self, token_id: int) -> None:
        """Take the next id."""
        self._ids.append(token_id)
        if token_id in self._stops:
            return
        known = self._decode(self._ids[self._start : self._told])
        text = self._decode(self._ids[self._start :])
        if text.endswith("\ufffd"):
            return  # the rest of the character is still to come
        self._start, self._told = self._told, len(self._ids)
        if len(text) > len(known):
            self._tell(text[len(known) :])

    def finish(self, token_ids: Sequence[int]) -> None:
        """Take what is missing of a turn that has ended: all of it, from a back end that does not tell single ids."""
        pieces: list[str] = []
        self._tell, tell = pieces.append, self._tell
        for token_id in token_ids[len(self._ids) :]:
            self.take(token_id)
        self._tell = tell
        pieces.append(self._decode(self._ids[self._told :]))  # bytes that make no character
        if text := "".join(pieces):
            tell(text)

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                [item for item in ids if item not in self._stops],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )


def from_any_thread(take: Callable[[int], None]) -> Callable[[int], None]:
    """A function for another thread that runs this one on the present event loop, while there is one."""
    loop = asyncio.get_running_loop()

    def call(token_id: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(take, token_id)

    return call
