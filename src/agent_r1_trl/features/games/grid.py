"""Grids as text: symbols for the reader, and the moves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent_r1_trl.settings import Rule

Place = tuple[int, int]
"""(row, column), counted from 0 at the top left."""

MOVES: dict[str, Place] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""The step of each action in row and column, in gymnasium's order of the actions."""


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
        are_texts = is_known and all(isinstance(text, str) and text for text in value.values())
        return are_texts and len(set(value.values())) == len(value)

    return Rule(f"different texts for {', '.join(names)}", takes)


_SHAPES = {
    "wall": "h1v1h-1z",
    "box": "m.1 .1h.8v.8h-.8z",
    "target": "m.4 .2h.2v.2h.2v.2h-.2v.2h-.2v-.2h-.2v-.2h.2z",
    "hole": "m.5 .1a.4 .4 0 1 1-.01 0z",
    "goal": "m.3 .1h.1l.45 .2-.45 .2v.4h-.1z",
    "player": "m.5 .2a.3 .3 0 1 1-.01 0z",
}
"""SVG paths in a place of 1 by 1, from its top left corner; in the order in which they are drawn."""
_COLOURS = {
    "wall": "#7d8790",
    "box": "#c79a5b",
    "target": "#d55e00",
    "hole": "#2b3a4a",
    "goal": "#1b8a4b",
    "player": "#006ac2",
}


def draw_grid(names: Sequence[Sequence[str]]) -> str:
    """An SVG picture of a grid: the name of what stands on each place, such as "box" or "player_on_target"."""
    lines = {mark: "" for mark in _SHAPES}
    for y, row in enumerate(names):
        for x, name in enumerate(row):
            for mark in re.split("_(?:on|in)_", name):
                if mark in lines:
                    lines[mark] += f"M{x} {y}{_SHAPES[mark]}"
    width, height = len(names[0]), len(names)
    edges = [f"M{x} 0v{height}" for x in range(width + 1)] + [f"M0 {y}h{width}" for y in range(height + 1)]
    ground = f'<path fill="#eaf0f6" d="M0 0h{width}v{height}H0z"/><path stroke="#c9d3dd" stroke-width=".03" d="'
    paths = "".join(f'<path fill="{_COLOURS[mark]}" d="{line}"/>' for mark, line in lines.items() if line)
    box = f'viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{ground}{"".join(edges)}"/>{paths}</svg>'


def explain_marks(symbols: Mapping[str, str]) -> str:
    """The legend of a grid for the model.

    >>> explain_marks({"player": "P", "player_on_goal": "V"})
    'Marks: P player, V player on goal.'
    """
    return "Marks: " + ", ".join(f"{mark} {name.replace('_', ' ')}" for name, mark in symbols.items()) + "."
