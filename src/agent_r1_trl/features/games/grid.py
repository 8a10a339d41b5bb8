"""Grids as text: symbols for the reader, coordinates, and the moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Place = tuple[int, int]
"""(row, column), counted from 0 at the top left."""

MOVES: dict[str, Place] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""What an action adds to row and column, in gymnasium's order of the actions."""

GRID_FORMATS = ("symbols", "coordinates")


def moved(place: Place, action: str) -> Place:
    """The place that an action leads to.

    >>> moved((2, 2), "Up")
    (1, 2)
    """
    down, right = MOVES[action]
    return place[0] + down, place[1] + right


def read_grid(level: str, letters: str, owner: str) -> list[str]:
    """The rows of a level.

    Args:
        level: rows of equal length, one per line.
        letters: the letters that a level may hold.
        owner: name of the environment, for the error.

    Raises:
        ValueError: the rows differ in length, or hold other letters.
    """
    rows = [row.strip() for row in level.splitlines() if row.strip()]
    if not rows or len({len(row) for row in rows}) > 1 or set("".join(rows)) - set(letters):
        raise ValueError(
            f"{owner}: level={level!r:.200} must be lines of equal length that hold only the letters {letters!r}."
        )
    return rows


def check_grid_settings(owner: str, grid_format: str, symbols: Mapping[str, str], known: Sequence[str]) -> None:
    """Check the settings `grid_format` and `symbols`.

    Raises:
        ValueError: one is out of range.
    """
    if grid_format not in GRID_FORMATS:
        raise ValueError(f"{owner}.grid_format={grid_format!r}: must be 'symbols' or 'coordinates'.")
    if set(symbols) - set(known) or len(set(symbols.values())) < len(symbols) or not all(symbols.values()):
        raise ValueError(f"{owner}.symbols={dict(symbols)!r}: must give different texts to {', '.join(known)}.")


def explain_marks(grid_format: str, symbols: Mapping[str, str]) -> str:
    """What the model must know to read a grid.

    >>> explain_marks("symbols", {"player": "P", "player_on_goal": "V"})
    'Marks: P player, V player on goal.'
    """
    if grid_format == "coordinates":
        return "Places are (row, column), counted from (0, 0) at the top left."
    return "Marks: " + ", ".join(f"{mark} {name.replace('_', ' ')}" for name, mark in symbols.items()) + "."


def list_places(places: Mapping[str, Sequence[Place]]) -> str:
    """Places by what stands there, one line each.

    >>> print(list_places({"player": [(0, 0)], "holes": [(1, 1), (2, 0)]}))
    player: (0, 0)
    holes: (1, 1) (2, 0)
    """
    return "\n".join(
        f"{name}: {' '.join(f'({row}, {column})' for row, column in found) or 'none'}"
        for name, found in places.items()
    )
