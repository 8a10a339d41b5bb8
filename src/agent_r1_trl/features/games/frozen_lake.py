"""FrozenLakeEnv: over the ice to the goal, round the holes; the ice may be slippery. On gymnasium's FrozenLake."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Annotated

from agent_r1_trl.features.games.base import GameEnv, load_package
from agent_r1_trl.features.games.grid import MOVES, Place, draw_grid, explain_marks, moved, read_grid, symbols_for
from agent_r1_trl.settings import Clash, Flag, PositiveShare, Whole

SYMBOLS = {"player": "P", "ice": "_", "hole": "O", "goal": "G", "player_in_hole": "X", "player_on_goal": "V"}
_MODULE = "gymnasium.envs.toy_text.frozen_lake"
_MAX_DRAWS = 2_000


class FrozenLakeEnv(GameEnv):
    """Walk from the top left to the goal at the bottom right of a frozen lake without falling into a hole.

    A level is gymnasium's map as lines of text (S start, F ice, H hole, G goal). Generated levels can be solved within
    `max_actions`, if the ice does not slip.

    Reaching the goal earns `success_reward`, everything else nothing, as in RAGEN. An action is effective if the
    player has moved.

    Args:
        size: rows and columns of a generated level.
        ice_share: probability that a place of a generated level is ice; the others are holes.
        is_slippery: whether the player may slide to one of the sides instead.
        success_rate: on slippery ice, the probability of moving as intended; both sides share the rest.
        symbols: texts of the drawing, by name: player, ice, hole, goal, player_in_hole, player_on_goal.
        **settings: settings of `GameEnv` and `ToolEnv`.

    Raises:
        ImportError: gymnasium is not installed.
        ValueError: a setting is out of range.
    """

    actions = tuple(MOVES)
    CLASHES = (
        Clash(
            "max_actions size",
            lambda c: c.max_actions < 2 * (c.size - 1),
            "the goal is 2 * (size - 1) moves away or more. Raise max_actions, or lower size.",
        ),
    )
    size: Annotated[int, Whole(2)] = 4
    ice_share: PositiveShare = 0.8
    is_slippery: Flag = True
    success_rate: PositiveShare = 1 / 3
    symbols: Annotated[Mapping[str, str], symbols_for(SYMBOLS)] = SYMBOLS

    def __init__(self, *, symbols: Mapping[str, str] | None = None, **settings: object) -> None:
        self._gymnasium = load_package(_MODULE, type(self).__name__)
        super().__init__(symbols={**type(self).symbols, **(symbols or {})}, **settings)

    def rules(self) -> str:
        """The aim, the marks and what the ice does."""
        slip = (
            " The ice is slippery: you may slide to the left or to the right of where you want to go."
            if self.is_slippery
            else ""
        )
        marks = explain_marks(self.symbols)
        return f"Walk over a frozen lake to the goal without falling into a hole.{slip}\n{marks}"

    def new_level(self, seed: int) -> str:
        """A map whose goal can be reached within `max_actions`; ice and holes are drawn until there is one."""
        draws, places = random.Random(seed), self.size**2
        for _ in range(_MAX_DRAWS):
            letters = ["F" if draws.random() < self.ice_share else "H" for _ in range(places)]
            letters[0], letters[-1] = "S", "G"
            rows = ["".join(letters[start : start + self.size]) for start in range(0, places, self.size)]
            path = shortest_path(rows, (0, 0))
            if path is not None and len(path) <= self.max_actions:
                return "\n".join(rows)
        raise ValueError(
            f"{type(self).__name__}: no lake of size={self.size} with ice_share={self.ice_share} can be crossed in "
            f"max_actions={self.max_actions}. Raise ice_share or max_actions."
        )

    def load_level(self, level: str) -> None:
        """Begin a map in gymnasium's letters."""
        self._rows = read_grid(level, "SFHG", type(self).__name__)
        if level.count("S") != 1 or "G" not in level:
            raise ValueError(f"{type(self).__name__}: level={level!r:.200} must have one start S, and a goal G.")
        self._lake = self._gymnasium.FrozenLakeEnv(
            desc=self._rows, is_slippery=self.is_slippery, success_rate=self.success_rate
        )
        self._lake.reset(seed=self.random.getrandbits(32))

    @property
    def place(self) -> Place:
        """Where the player is."""
        row, column = divmod(int(self._lake.s), len(self._rows[0]))
        return row, column

    def act(self, action: str) -> dict[str, float]:
        """Move. What counts is earned at the end: see `outcome_reward`."""
        before = self.place
        self._lake.step(list(MOVES).index(action))
        letter = self._rows[self.place[0]][self.place[1]]
        self.is_effective = self.place != before
        self.is_won, self.is_over = letter == "G", letter in "GH"
        return {}

    def solution(self) -> list[str] | None:
        """A shortest way to the goal from here, if the ice does not slip; None if there is none."""
        return shortest_path(self._rows, self.place)

    def describe(self) -> str:
        """The lake with the player on it."""
        return "\n".join("".join(map(self.symbols.__getitem__, row)) for row in self._names())

    def render_svg(self) -> str:
        """The lake as a picture, for readers of the record."""
        return draw_grid(self._names())

    def _names(self) -> list[list[str]]:
        marks = dict(zip("SFHG", ("ice", "ice", "hole", "goal"), strict=True))
        grid = [[marks[letter] for letter in row] for row in self._rows]
        under = self._rows[self.place[0]][self.place[1]]
        grid[self.place[0]][self.place[1]] = {"H": "player_in_hole", "G": "player_on_goal"}.get(under, "player")
        return grid

    def metrics(self) -> dict[str, float]:
        """Whether the player fell into a hole."""
        return {"fell": float(self._rows[self.place[0]][self.place[1]] == "H")}


def shortest_path(rows: list[str], start: Place) -> list[str] | None:
    """Actions from a place to the nearest goal of a map, round the holes; None if there is no way.

    >>> shortest_path(["SF", "HG"], (0, 0))
    ['Right', 'Down']
    """
    paths: dict[Place, list[str]] = {start: []}
    waiting = deque([start])
    while waiting:
        place = waiting.popleft()
        letter = rows[place[0]][place[1]]
        if letter == "G":
            return paths[place]
        if letter == "H":
            continue
        for action in MOVES:
            row, column = after = moved(place, action)
            if 0 <= row < len(rows) and 0 <= column < len(rows[0]) and after not in paths:
                paths[after] = [*paths[place], action]
                waiting.append(after)
    return None
