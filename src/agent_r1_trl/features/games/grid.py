"""Grids as text: symbols for the reader, and the moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agent_r1_trl.settings import Rule

Place = tuple[int, int]
"""(row, column), counted from 0 at the top left."""

MOVES: dict[str, Place] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""What an action adds to row and column, in gymnasium's order of the actions."""


def moved(place: Place, action: str) -> Place:
    """The place that an action leads to.

    >>> moved((2, 2), "Up")
    (1, 2)
    """
    down, right = MOVES[action]
    return place[0] + down, place[1] + right


def read_grid(level: str, letters: str, owner: str) -> list[str]:
    """The rows of a level; errors name its `owner`.

    Raises:
        ValueError: the rows differ in length, or hold other letters.
    """
    rows = [row.strip() for row in level.splitlines() if row.strip()]
    if not rows or len({len(row) for row in rows}) > 1 or set("".join(rows)) - set(letters):
        raise ValueError(
            f"{owner}: level={level!r:.200} must be lines of equal length that hold only the letters {letters!r}."
        )
    return rows


def symbols_for(names: Iterable[str]) -> Rule:
    """Different texts for some or all of the marks of a drawing."""

    def takes(value: Any) -> bool:
        is_known = isinstance(value, Mapping) and set(value) <= set(names)
        return is_known and len(set(value.values())) == len(value) and all(value.values())

    return Rule(f"different texts for {', '.join(names)}", takes)


def explain_marks(symbols: Mapping[str, str]) -> str:
    """What the model must know to read a grid.

    >>> explain_marks({"player": "P", "player_on_goal": "V"})
    'Marks: P player, V player on goal.'
    """
    return "Marks: " + ", ".join(f"{mark} {name.replace('_', ' ')}" for name, mark in symbols.items()) + "."
