"""What the policy wrote in a trajectory, apart from what it read.

Prompts, tool results and other observations are never searched for tags. A thought is either in a field of its own,
where the chat grammar puts it, or between the tags of the assistant's own text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.rewards.format import THINK_TAG, split_tags
from agent_r1_trl.rewards.words import words_of
from agent_r1_trl.trajectory import Message, Trajectory

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class Said:
    """One assistant message, read."""

    thought: str
    """What was thought; "" if nothing was, or if it is not well formed."""
    visible: str
    """The text outside the thought."""
    is_well_formed: bool
    """Exactly one thought, closed, before everything else; its words may still be none."""


def read_message(message: Message, *, tag: str = THINK_TAG, opened_by_template: bool = False) -> Said:
    """Separate the thought of an assistant message from the rest.

    Args:
        message: of the assistant.
        tag: of a thought in the text.
        opened_by_template: the chat template writes the opening tag, so the text begins inside the thought.

    >>> read_message({"role": "assistant", "content": "<think>Why?</think>Because."}).thought
    'Why?'
    """
    content = text_of(message.get("content"))
    own_field = next((text for name in THOUGHT_FIELDS if (text := text_of(message.get(name)))), "")
    parts = split_tags(content, tag)
    tags = parts[1::2]
    if own_field:
        is_plain = not tags and len(split_tags(own_field, tag)) == 1
        return Said(thought=own_field if is_plain else "", visible=content, is_well_formed=is_plain)
    if tags == [f"<{tag}>", f"</{tag}>"] and not parts[0].strip():
        return Said(thought=parts[2], visible=parts[4], is_well_formed=True)
    if opened_by_template and tags == [f"</{tag}>"]:
        return Said(thought=parts[0], visible=parts[2], is_well_formed=True)
    return Said(thought="", visible="" if tags else content, is_well_formed=False)


def assistant_messages(item: Any) -> list[Message]:
    """The policy's messages in a trajectory (without summaries), in a list of messages, or in one message's text."""
    if isinstance(item, Trajectory):
        return [turn.message for turn in item.env_turns]
    if isinstance(item, str):
        return [{"role": "assistant", "content": item}]
    return [message for message in item if message.get("role") == "assistant"]


def need_trajectory(item: Any, name: str) -> Trajectory:
    """The trajectory itself, for a reward that a list of messages is not enough for.

    Raises:
        ValueError: it is none; names the reward.
    """
    if not isinstance(item, Trajectory):
        raise ValueError(
            f"{name} reads the turns of a Trajectory, and was given a {type(item).__name__}. Use it with "
            "MultiTurnGRPOTrainer or MultiTurnPPOTrainer, which pass trajectory=, or pass trajectory=[...] yourself."
        )
    return item


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts (images have none)."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""


def call_texts(message: Message) -> list[str]:
    """The values in the arguments of a message's calls, as texts; names and keys recur in every call."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return [text for function in functions for text in values_of(function.get("arguments"))]


def values_of(arguments: Any) -> list[str]:
    """The single values in the arguments of a call, as texts.

    >>> values_of({"query": "Oslo", "filters": {"years": [1990, 2000]}})
    ['Oslo', '1990', '2000']
    """
    found, waiting = [], [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(reversed(list(value.values())))
        elif isinstance(value, (list, tuple)):
            waiting.extend(reversed(value))
        elif value is not None:
            found.append(str(value))
    return found


def written_words(message: Message) -> list[str]:
    """All words that the policy wrote in a message: thought, text and the values of its calls."""
    texts = [text_of(message.get(name)) for name in (*THOUGHT_FIELDS, "content")]
    return words_in(texts + call_texts(message))


def words_in(texts: Iterable[str]) -> list[str]:
    """The words of several texts."""
    return [word for text in texts for word in words_of(text)]
