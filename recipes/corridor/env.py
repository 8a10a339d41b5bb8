"""CorridorEnv: thirty rooms, each with three doors, of which one is lit."""

from __future__ import annotations

import random

from agent_r1_trl.features.games import GameEnv

LIT, DARK = "lit", "dark"


class CorridorEnv(GameEnv):
    """A corridor of rooms. In each of them one door is lit and leads on; behind a dark one the game is lost.

    Which door is lit is drawn anew for every room, so nothing can be known before the room has been read, and what
    stood in earlier rooms is of no use. That makes the game long, and easy to forget: it tests what becomes of the
    context, not memory.

    A level is the lit doors in their order, such as `Left Right Right`.

    Each room that is passed earns its share of 1, and the last one `success_reward` besides. Info: `success`, and
    `rooms`, how many were passed.

    Args:
        **settings: settings of `GameEnv`; `max_actions` is the number of rooms, 30 by default.

    Raises:
        ValueError: a setting is out of range.
    """

    actions = ("Left", "Ahead", "Right")
    noun = "door"
    max_actions = 30
    max_actions_per_turn = 1
    show_actions_left = False

    def rules(self) -> str:
        """The game in words."""
        return (
            f"You walk through {self.max_actions} rooms with three doors each. The door that is lit leads to the next "
            "room. Behind the other two the game is lost."
        )

    def new_level(self, seed: int) -> str:
        """The lit door of each room."""
        return " ".join(random.Random(seed).choices(self.actions, k=self.max_actions))

    def load_level(self, level: str) -> None:
        """Begin a level.

        Raises:
            ValueError: the text is no level of this game.
        """
        self._lit = level.split()
        if len(self._lit) != self.max_actions or not set(self._lit) <= set(self.actions):
            raise ValueError(
                f"CorridorEnv.reset: level={level!r:.200} must name the lit doors ({', '.join(self.actions)}) of "
                f"max_actions={self.max_actions} rooms."
            )
        self.rooms = 0

    @property
    def lit_door(self) -> str:
        """The action that leads on."""
        return self._lit[self.rooms]

    def describe(self) -> str:
        """The doors of the present room."""
        if self.is_over:
            return "You are out." if self.is_won else "It is dark here."
        doors = (f"{name} {LIT if name == self.lit_door else DARK}" for name in self.actions)
        return f"Room {self.rooms + 1}: {' '.join(doors)}"

    def act(self, action: str) -> dict[str, float]:
        """Open a door."""
        if action != self.lit_door:
            self.is_over = True
            return {}
        self.rooms += 1
        self.is_won = self.is_over = self.rooms == len(self._lit)
        return {"room": 1 / len(self._lit)}

    def metrics(self) -> dict[str, float]:
        """How many rooms were passed."""
        return {"rooms": float(self.rooms)}
