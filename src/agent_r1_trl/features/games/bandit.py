"""BanditEnv: two arms with names that hint at their risk; which of them pays more on average?"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Annotated, Any

from agent_r1_trl.features.games.base import GameEnv
from agent_r1_trl.settings import Clash, Finite, Rule, Share
from agent_r1_trl.trajectory import Trajectory

SURE, RISKY = "sure", "risky"


def _are_pairs(arms: Any) -> bool:
    return all(_is_pair(item) for item in arms)


def _is_pair(item: object) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    if not all(isinstance(name, str) and re.fullmatch(r"\w([\w' -]*\w)?", name) for name in item):
        return False
    return item[0].casefold() != item[1].casefold()


PAIRS = Rule("a list of pairs of different names (of words), that of the sure arm first", _are_pairs, is_list=True)


class BanditEnv(GameEnv):
    """One arm pays a small sum every time, the other a large one now and then: RAGEN's two-armed bandit.

    The level says which arm stands first and which of the two is risky, for example `Dragon (risky), Phoenix (sure)`.
    The model sees the names only. Both arms of a pull are decided by one random number.

    The outcome is 0: pulls pay at once, as turn rewards. Info: `success`, the share of the `max_actions` pulls that
    went to the arm that pays more on average; a pull that was not made went to none.

    Args:
        arms: pairs of names, that of the sure arm first; every level takes one pair.
        sure_reward: what the sure arm pays.
        risky_reward: what the risky arm pays if it pays.
        risky_probability: probability that it does; otherwise it pays nothing.
        **settings: settings of `GameEnv`; `max_actions` is the number of pulls, 1 by default.

    Raises:
        ValueError: a setting is unknown or out of range, or both arms pay the same on average.

    Source: RAGEN (arXiv 2504.20073, section 3); the payments are those of its published environment.
    """

    actions = ("First", "Second")
    CLASHES = (
        Clash(
            "sure_reward risky_reward risky_probability",
            lambda c: c.risky_probability * c.risky_reward == c.sure_reward,
            "both arms pay the same on average, so none is better. Change one of the three.",
        ),
    )
    max_actions = 1
    max_actions_per_turn = 1
    arms: Annotated[Sequence[Sequence[str]], PAIRS] = (("Phoenix", "Dragon"),)
    sure_reward: Finite = 0.1
    risky_reward: Finite = 1.0
    risky_probability: Share = 0.25

    @property
    def better(self) -> str:
        """The kind of arm that pays more on average."""
        return RISKY if self.risky_probability * self.risky_reward > self.sure_reward else SURE

    def rules(self) -> str:
        """The game in words."""
        return (
            "You play a bandit with two arms. One of them pays a small sum every time. The other one pays a large sum "
            "on some pulls, and nothing on all others. The names of the arms hint at which is which. Pull the arm "
            "that you expect to pay more on average."
        )

    def new_level(self, seed: int) -> str:
        """A pair of names, in one of two orders."""
        rng = random.Random(seed)
        sure, risky = rng.choice(list(self.arms))
        shown = [f"{sure} ({SURE})", f"{risky} ({RISKY})"]
        rng.shuffle(shown)
        return ", ".join(shown)

    def load_level(self, level: str) -> None:
        """Begin a level."""
        parts = [part.rpartition(" (") for part in level.split(", ")]
        self.names = tuple(name.strip() for name, _, _ in parts)
        self.kinds = tuple(kind.rstrip(")") for _, _, kind in parts)
        if sorted(self.kinds) != [RISKY, SURE] or not _are_pairs([self.names]):
            raise ValueError(f"BanditEnv.reset: level={level!r:.200} must be like 'Dragon (risky), Phoenix (sure)'.")
        self._last = ""
        self.pulled: list[str] = []

    def describe(self) -> str:
        """The last pull's payment, and the arms."""
        return f"{self._last}Arms: {', '.join(self.names)}"

    def act(self, action: str) -> dict[str, float]:
        """Pull an arm."""
        place = self.actions.index(action)
        luck = self.random.random()  # drawn for the sure arm, too: the next pull meets the same chance after either
        kind = self.kinds[place]
        is_large = luck < self.risky_probability
        pay = self.sure_reward if kind == SURE else self.risky_reward if is_large else 0.0
        self.pulled.append(kind)
        self._last = f"{self.names[place]} paid {pay:g}.\n"
        return {"pay": pay}

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """0: what the pulls paid is in the turns."""
        super().outcome_reward(trajectory)
        trajectory.info["success"] = self.pulled.count(self.better) / self.max_actions
        return 0.0, {}
