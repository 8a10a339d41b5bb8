"""PackagedEnv: an environment of another package as a game whose levels are seeds."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Annotated, Any, NoReturn

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.features.games.base import GameEnv
from agent_r1_trl.objects import import_object
from agent_r1_trl.settings import Text
from agent_r1_trl.trajectory import Message, Trajectory

MAX_SEED = 2**32
"""NumPy's older generators take no larger seeds."""


class PackagedEnv(GameEnv):
    """An environment that somebody else has written, with rewards of its own.

    An episode is its seed, that of the group or the row's column `seed`: to the same actions all members of a group
    get the same answers. (Some environments deal only with the first action, so luck cannot be told from the task.)

    Args:
        task: what the model is told in the system message, before how to write actions.
        success_reward: outcome reward of a success, beside what the environment gives.
        failure_reward: outcome reward of an episode without success that no limit of the environment's own ended.
        **settings: settings of `GameEnv` and `ToolEnv`.
    """

    task: Annotated[str, Text(may_be_empty=True)] = ""
    max_actions = sys.maxsize
    max_actions_per_turn = 1
    show_actions_left = False
    success_reward = 0.0
    max_process_reward = 0.0  # calls of tools earn nothing
    id: str
    """Its name in its package."""
    is_truncated: bool = False
    """Set by `act` when a limit of the environment's own has ended the episode."""
    observation: str = ""
    """What the model reads; set by `start` and `act`."""
    own_reward: float = 0.0
    """Outcome reward by the environment itself; set by `act`."""

    @abstractmethod
    def start(self, seed: int) -> None:
        """Begin the episode of a seed below `MAX_SEED`."""

    def rules(self) -> str:
        """The task."""
        return self.task

    def new_level(self, seed: int) -> str:
        """The seed itself."""
        return str(seed % MAX_SEED)

    def load_level(self, level: str) -> None:
        """Begin an episode."""
        if not level.isdecimal():
            self.refuse(f"level={level!r:.80} of a row: it has no levels. Give the row a `seed` instead.")
        self.is_truncated, self.own_reward = False, 0.0
        self.start(int(level) % MAX_SEED)

    def describe(self) -> str:
        """What the environment said last."""
        return self.observation

    def split_actions(self, answer: str) -> list[str]:
        """The whole answer, if it can only be one action."""
        return super().split_actions(answer) if self.max_actions_per_turn > 1 else [answer]

    def example_actions(self) -> list[str]:
        """Two actions to show how they are written."""
        return super().example_actions() or ["..."] * 2

    def system_message(self, example: dict[str, Any]) -> str | None:
        """`system_prompt` ("" for none), by default the task and how to write actions."""
        return (super().system_message(example) or "").strip()

    async def step(self, message: Message) -> StepResult:
        """Play the actions of an assistant message."""
        result = await super().step(message)
        return result._replace(info={**result.info, "is_truncated": self.is_truncated})

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """The environment's own outcome, and `success_reward` or `failure_reward`."""
        reward, parts = super().outcome_reward(trajectory)
        if self.is_truncated and not self.is_won:
            reward, parts = 0.0, {}
        return reward + self.own_reward, {**parts, "own": self.own_reward}

    def refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        """Raise a ValueError that names the environment."""
        raise ValueError(f"{type(self).__name__}.id={self.id!r}: {what}") from cause


def function_of(given: Any, name: str) -> Any:
    """A function, or that of a path."""
    return import_object(given, name) if isinstance(given, str) else given
