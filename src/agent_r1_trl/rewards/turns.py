"""The policy's own text in a trajectory, without the observations.

Prompts, tool results and other observations are never searched for tags. Reasoning is either in a field of its own,
where the chat grammar puts it, or between the tags of the assistant's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agent_r1_trl.rewards.format import THINK_TAG, split_tags
from agent_r1_trl.rewards.words import words_of
from agent_r1_trl.tools.blocks import text_of_block
from agent_r1_trl.tools.calls import values_of
from agent_r1_trl.trajectory import Message, Trajectory

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class Said(NamedTuple):
    """One assistant message, read."""

    reasoning: str
    """The text of the reasoning; "" if there is none, or if it is not well formed."""
    visible: str
    """The text outside the reasoning."""
    is_well_formed: bool
    """Exactly one reasoning block, closed, before everything else; its words may still be none."""


def read_message(message: Message, *, tag: str = THINK_TAG, opened_by_template: bool = False) -> Said:
    """Separate the reasoning of an assistant message from the rest; the options are those of `thinking_format`.

    >>> read_message({"role": "assistant", "content": "<think>Why?</think>Because."}).reasoning
    'Why?'
    """
    content = text_of(message.get("content"))
    fields = [text_of(message.get(name)) for name in REASONING_FIELDS]
    own_field = next((text for text in fields if text), "")
    parts = split_tags(content, tag)
    tags = parts[1::2]
    if own_field:
        is_plain = not tags and len(split_tags(own_field, tag)) == 1
        return Said(own_field if is_plain else "", content, is_plain)
    if tags == [f"<{tag}>", f"</{tag}>"] and not parts[0].strip():
        return Said(parts[2], parts[4], True)
    if opened_by_template and tags == [f"</{tag}>"]:
        return Said(parts[0], parts[2], True)
    return Said("", "" if tags else content, False)


def need_trajectory(item: object, name: str) -> Trajectory:
    """The trajectory itself, for a reward that a list of messages is not enough for."""
    if not isinstance(item, Trajectory):
        raise ValueError(
            f"{name} reads the turns of a Trajectory, and was given a {type(item).__name__}. Use it with "
            "MultiTurnGRPOTrainer or MultiTurnPPOTrainer, which pass trajectory=, or pass trajectory=[...] yourself."
        )
    return item


def text_of(content: object) -> str:
    """The text of a message's content, which may be a list of parts (images have none)."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(text_of_block(part) or "" for part in content)
    return ""


def written_words(message: Message) -> list[str]:
    """All words that the policy wrote in a message: reasoning, text and the values of its calls."""
    texts = [text_of(message.get(name)) for name in (*REASONING_FIELDS, "content")]
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            texts += values_of(call.get("function", call).get("arguments"))
    return words_in(texts)


def words_in(texts: Iterable[str]) -> list[str]:
    """The words of several texts."""
    return [word for text in texts for word in words_of(text)]
