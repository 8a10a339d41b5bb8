"""What a question's `evidence` asks a search to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.rewards import normalize_answer
from agent_r1_trl.tools import Passage


@dataclass(frozen=True)
class Evidence:
    """A passage that a correct line of reasoning needs; what is "" does not matter."""

    id: str = ""
    title: str = ""
    text: str = ""

    def is_found_in(self, passage: Passage, max_chars: int) -> bool:
        """Whether it is this passage, and what has to be read is within its first `max_chars` characters."""
        if self.id and self.id != passage.id:
            return False
        if self.title and normalize_answer(self.title) != normalize_answer(passage.title):
            return False
        return not self.text or _contains(f"{passage.title} {passage.text[:max_chars]}", self.text)


def read_evidence(value: Any, get: Callable[[str], Passage | None] | None) -> frozenset[Evidence]:
    """The items of a row's `evidence`.

    Args:
        value: None, an item or a list of items. An item is a mapping with `id`, `title` or `text`, or a string: the id
            of a passage or a text that a passage contains.
        get: finds a passage by its id. Without it (a retriever elsewhere), a string without a space is an id.

    Raises:
        ValueError: an item is neither, or it says nothing.
    """
    if value is None:
        return frozenset()
    items: Iterable[Any] = [value] if isinstance(value, str | Mapping) or not hasattr(value, "__iter__") else value
    return frozenset(_read_item(item, get) for item in items)


def _read_item(item: Any, get: Callable[[str], Passage | None] | None) -> Evidence:
    if isinstance(item, Mapping):
        parts = {name: str(item[name]).strip() for name in ("id", "title", "text") if item.get(name) is not None}
        if not any(parts.values()):
            raise ValueError(f"evidence: {item!r:.200} must have an 'id', a 'title' or a 'text'. Give it one of them.")
        return Evidence(**parts)
    named = str(item)
    is_id = get(named) is not None if get is not None else " " not in named.strip()
    return Evidence(id=named) if is_id else Evidence(text=named)


def _contains(text: str, part: str) -> bool:
    wanted = normalize_answer(part)
    return bool(wanted) and f" {wanted} " in f" {normalize_answer(text)} "
