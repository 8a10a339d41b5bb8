"""SokobanEnv: push all boxes onto the targets. Levels are made by playing backwards from solved ones."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

from agent_r1_trl.features.games.base import GameEnv, pair_of
from agent_r1_trl.features.games.grid import MOVES, Place, draw_grid, explain_marks, moved, read_grid, symbols_for
from agent_r1_trl.settings import Clash, Count, Finite, Number

SYMBOLS = {
    "wall": "#",
    "floor": "_",
    "target": "O",
    "box": "X",
    "player": "P",
    "box_on_target": "V",
    "player_on_target": "S",
}
LETTERS = {
    "#": "wall",
    "-": "floor",
    ".": "target",
    "$": "box",
    "@": "player",
    "*": "box_on_target",
    "+": "player_on_target",
}
"""The usual letters of level files (XSB); floor may be "-", "_" or a space."""
MAX_STATES = 200_000
"""States that are looked at in one room."""
_MAX_ROOMS = 200


class State(NamedTuple):
    """Where the player and the boxes are."""

    player: Place
    boxes: frozenset[Place]


class SokobanEnv(GameEnv):
    """Push every box onto a target; boxes cannot be pulled, and only one at a time can be pushed.

    A level is a room in the usual letters of level files (`#` wall, `.` target, `$` box, `@` player, `*` box on
    target, `+` player on target, `-` floor). Generated levels can be solved within `max_actions`.

    Each action earns `step_reward`, a box that comes onto a target `box_reward`, a box that leaves one as much less,
    and the solved level `success_reward`: -0.1, 1 and 10, as in RAGEN. An action is effective if the player has moved.

    Args:
        room: (rows, columns) of a generated level, with the walls around it.
        num_boxes: boxes of a generated level.
        wall_share: probability that a place inside a generated room is a wall.
        min_moves: smallest number of moves that solve a generated level; the largest is `max_actions`.
        step_reward: reward of each action.
        box_reward: reward of a box that comes onto a target; one that leaves a target costs as much.
        symbols: texts of the drawing, by name: wall, floor, target, box, player, box_on_target, player_on_target.
        **settings: settings of `GameEnv` and `ToolEnv`.

    Raises:
        ValueError: a setting is out of range.
    """

    actions = tuple(MOVES)
    CLASHES = (
        Clash(
            "min_moves max_actions",
            lambda c: c.min_moves > c.max_actions,
            "a level must be solved within max_actions. Lower min_moves, or raise max_actions.",
        ),
    )
    success_reward = 10.0
    room: Annotated[tuple[int, int], pair_of(4, is_size=True)] = (6, 6)
    num_boxes: Count = 1
    wall_share: Annotated[float, Number(minimum=0, below=1)] = 0.1
    min_moves: Count = 3
    step_reward: Finite = -0.1
    box_reward: Finite = 1.0
    symbols: Annotated[Mapping[str, str], symbols_for(SYMBOLS)] = SYMBOLS

    def __init__(self, *, symbols: Mapping[str, str] | None = None, **settings: object) -> None:
        super().__init__(symbols={**type(self).symbols, **(symbols or {})}, **settings)

    def rules(self) -> str:
        """The aim and the marks."""
        return (
            "Push every box onto a target. You push a box by walking into it; it moves if the place behind it is "
            f"free. You cannot pull.\n{explain_marks(self.symbols)}"
        )

    def new_level(self, seed: int) -> str:
        """A room that can be solved in `min_moves` to `max_actions` moves and not in fewer."""
        draws = random.Random(seed)
        inside = [(i, j) for i in range(1, self.room[0] - 1) for j in range(1, self.room[1] - 1)]
        for _ in range(_MAX_ROOMS):
            free = [place for place in inside if draws.random() >= self.wall_share]
            if len(free) <= 2 * self.num_boxes:
                continue
            targets = frozenset(draws.sample(free, self.num_boxes))
            far = [
                state
                for state, moves in moves_to_solve(set(free), targets, self.max_actions).items()
                if moves >= self.min_moves
            ]
            if far:
                return write_level(self.room, set(free), targets, draws.choice(far))
        raise ValueError(
            f"{type(self).__name__}: no room={tuple(self.room)} with num_boxes={self.num_boxes}, "
            f"wall_share={self.wall_share} takes min_moves={self.min_moves} to max_actions={self.max_actions} moves. "
            "Enlarge the room, or lower num_boxes, wall_share or min_moves."
        )

    def load_level(self, level: str) -> None:
        """Begin a room in the usual letters."""
        self._size, self._free, self._targets, self.state = read_level(level, type(self).__name__)

    def act(self, action: str) -> dict[str, float]:
        """Move, and push what is in the way."""
        before = len(self.state.boxes & self._targets)
        after = next_state(self._free, self.state, action)
        self.is_effective = after is not None
        self.state = self.state if after is None else after
        gained = len(self.state.boxes & self._targets) - before
        parts = {"step": self.step_reward}
        if gained:
            parts["box_on_target" if gained > 0 else "box_off_target"] = gained * self.box_reward
        self.is_won = self.is_over = self._targets <= self.state.boxes
        return parts

    def solution(self) -> list[str] | None:
        """A shortest solution from here; None if there is none."""
        return solve(self._free, self._targets, self.state)

    def describe(self) -> str:
        """The room."""
        level = write_level(self._size, self._free, self._targets, self.state)
        return "".join(self.symbols[LETTERS[letter]] if letter in LETTERS else letter for letter in level)

    def render_svg(self) -> str:
        """The room as a picture, for readers of the record."""
        level = write_level(self._size, self._free, self._targets, self.state)
        return draw_grid([[LETTERS[letter] for letter in row] for row in level.splitlines()])

    def metrics(self) -> dict[str, float]:
        """The share of the targets that have a box."""
        return {"boxes_on_target": len(self.state.boxes & self._targets) / len(self._targets)}


def next_state(free: set[Place], state: State, action: str) -> State | None:
    """The result of an action, with `free` the places that are no wall; None if something is in the way."""
    player = moved(state.player, action)
    if player not in free:
        return None
    if player not in state.boxes:
        return State(player, state.boxes)
    box = moved(player, action)
    if box not in free or box in state.boxes:
        return None
    return State(player, state.boxes - {player} | {box})


def moves_to_solve(free: set[Place], targets: frozenset[Place], max_moves: int) -> dict[State, int]:
    """The states from which a room can be solved in at most `max_moves`, and the smallest number of moves each takes.

    Found by playing backwards from the solved states: the player steps back, and may pull the box in front along.
    Looks at no more than `MAX_STATES` states, the nearest first.
    """
    solved = (State(player, targets) for player in sorted(free - targets))
    found = dict.fromkeys(solved, 0)
    waiting = deque(found)
    while waiting and len(found) < MAX_STATES:
        state = waiting.popleft()
        if found[state] == max_moves:
            break
        for before in _states_before(free, state):
            if before not in found:
                found[before] = found[state] + 1
                waiting.append(before)
    return found


def solve(free: set[Place], targets: frozenset[Place], start: State) -> list[str] | None:
    """A shortest list of actions that brings a box onto every target.

    Returns:
        None if there is none, or none among the `MAX_STATES` states that were looked at.
    """
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting and len(came_from) < MAX_STATES:
        state = waiting.popleft()
        if targets <= state.boxes:
            actions: list[str] = []
            while (step := came_from[state]) is not None:
                state, action = step
                actions.insert(0, action)
            return actions
        for action in MOVES:
            after = next_state(free, state, action)
            if after is not None and after not in came_from:
                came_from[after] = (state, action)
                waiting.append(after)
    return None


def read_level(level: str, owner: str) -> tuple[tuple[int, int], set[Place], frozenset[Place], State]:
    """Size, free places, targets and state of a level; outside its lines there is wall.

    Raises:
        ValueError: it is no level: other letters, no player or two, too few boxes, or solved already.
    """
    level_lines = (line.rstrip() for line in level.replace("_", "-").splitlines())
    lines = [line for line in level_lines if line and not line.startswith(";")]  # comments of level files
    width = max(map(len, lines), default=0)
    rows = read_grid("\n".join(line.replace(" ", "-").ljust(width, "#") for line in lines), "".join(LETTERS), owner)
    at: dict[str, set[Place]] = {letter: set() for letter in LETTERS}
    for i, row in enumerate(rows):
        for j, letter in enumerate(row):
            at[letter].add((i, j))
    players = at["@"] | at["+"]
    boxes = frozenset(at["$"] | at["*"])
    targets = frozenset(at["."] | at["*"] | at["+"])
    if len(players) != 1 or not targets or len(boxes) < len(targets) or targets <= boxes:
        raise ValueError(
            f"{owner}: level={level!r:.300} must have one player (@ or +), a target (. or +) without a box, and at "
            "least as many boxes ($ or *) as targets."
        )
    free = {(i, j) for i, row in enumerate(rows) for j, letter in enumerate(row) if letter != "#"}
    return (len(rows), width), free, targets, State(players.pop(), boxes)


def write_level(size: tuple[int, int], free: set[Place], targets: frozenset[Place], state: State) -> str:
    """The inverse of `read_level`."""

    def letter(place: Place) -> str:
        if place not in free:
            return "#"
        if place in state.boxes:
            on_floor, on_target = "$", "*"
        elif place == state.player:
            on_floor, on_target = "@", "+"
        else:
            on_floor, on_target = "-", "."
        return on_target if place in targets else on_floor

    return "\n".join("".join(letter((i, j)) for j in range(size[1])) for i in range(size[0]))


def _states_before(free: set[Place], state: State) -> Iterator[State]:
    for action, (down, right) in MOVES.items():
        player = (state.player[0] - down, state.player[1] - right)
        if player not in free or player in state.boxes:
            continue
        yield State(player, state.boxes)
        box = moved(state.player, action)
        if box in state.boxes:
            yield State(player, state.boxes - {box} | {state.player})
