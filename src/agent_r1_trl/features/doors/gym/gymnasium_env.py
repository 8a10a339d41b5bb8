"""GymnasiumEnv: any registered environment of Gymnasium whose actions a text can choose."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agent_r1_trl.features.doors.gym.base import PackagedEnv, function_of
from agent_r1_trl.features.games.base import ActionError, load_package, shown
from agent_r1_trl.settings import Finite

MAX_ACTIONS = 100
"""Number of actions without names that the prompt lists."""
MAX_NUMBERS = 64
"""Size of an observation that is written out in numbers."""
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnv(PackagedEnv):
    """An environment of Gymnasium: the reward of a step is the turn's, and `truncated` ends a trajectory as a limit.

    Actions are the numbers of a `Discrete` space, or their names; any text, if the space is `Text`; or what
    `parse_action` makes of a text. What is no action of the space makes an invalid turn. Observations are text, else
    the environment's drawing in text ("ansi"; what has a colour stands in brackets), else numbers.

    An episode is a success if the last `info` says so (`is_success` or `success`); else if its return has reached
    `success_return`, by default the registered `reward_threshold`; where there is none, if it terminated with a
    return above 0.

    Args:
        id: of a registered environment; "package:Name-v0" imports the package first.
        actions: names of the actions of a `Discrete` space, in their order.
        parse_action: `(text) -> action`, or its path; a ValueError tells the model what is wrong. A subclass may
            define it instead, and finds `env` and the last `info`.
        format_observation: `(observation) -> text`, or its path; a subclass may define it.
        make_kwargs: arguments of `gymnasium.make`.
        success_return: return from which an episode is a success.
        **settings: settings of `PackagedEnv`.

    Raises:
        ImportError: gymnasium is not installed.
        ValueError: there is no such environment, or text cannot choose its actions or show its observations.
    """

    parse_action: Callable[[str], Any] | None = None
    format_observation: Callable[[Any], str] | None = None
    success_return: Finite | None = None
    info: Mapping[str, Any]
    """What the environment said beside its last observation."""

    def __init__(
        self,
        id: str,
        *,
        actions: Sequence[str] = (),
        parse_action: Callable[[str], Any] | str | None = None,
        format_observation: Callable[[Any], str] | str | None = None,
        make_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.parse_action = function_of(parse_action, "parse_action") or self.parse_action
        self.format_observation = function_of(format_observation, "format_observation") or self.format_observation
        self.id = id
        self._gymnasium = load_package("gymnasium", type(self).__name__, "gym")
        self.env = self._make(dict(make_kwargs or {}))
        self.actions = self._resolve_actions(tuple(actions))
        space, is_drawn = self.env.observation_space, self.format_observation or self.env.render_mode == "ansi"
        if not is_drawn and (size := _size(space)) > MAX_NUMBERS:
            self.refuse(
                f"its observations, {space!s:.200}, have {size} numbers; at most {MAX_NUMBERS} are written out. Pass "
                "format_observation, a function that makes text of them."
            )
        super().__init__(**settings)

    def read_row(self, example: Mapping[str, Any]) -> str:
        """The seed; the column `options` is what `reset` of the environment gets."""
        self._options = example.get("options")
        return super().read_row(example)

    def start(self, seed: int) -> None:
        """Reset the environment."""
        self.episode_return = 0.0
        observation, self.info = self.env.reset(seed=seed, options=self._options)
        self.observation = self._text_of(observation)

    def read_action(self, text: str) -> Any:
        """The action of the space that a text stands for."""
        space: Any = self.env.action_space
        if self.actions:
            return int(space.start) + self.actions.index(super().read_action(text))
        try:
            action = text if self.parse_action is None else self.parse_action(text)
        except ValueError as error:
            raise ActionError(str(error)) from error
        if isinstance(action, int | float | list | tuple) and isinstance(space, self._gymnasium.spaces.Box):
            action = np.asarray(action, dtype=space.dtype)
        if not space.contains(action):
            raise ActionError(f"{shown(text)} is not an action (they are those of {space})")
        return action

    def act(self, action: Any) -> dict[str, float]:
        """Take a step of the environment."""
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.episode_return += float(reward)
        self.is_truncated = bool(truncated and not terminated)
        self.is_over = bool(terminated or truncated)
        self.is_won = self._is_success(bool(terminated))
        self.observation = self._text_of(observation)
        return {"step": float(reward)}

    def metrics(self) -> dict[str, float]:
        """The sum of the environment's rewards."""
        return {"episode_return": self.episode_return}

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    # ---------------------------------------------------------------- internal

    def _is_success(self, is_terminated: bool) -> bool:
        told = self.info.get("is_success", self.info.get("success"))
        if told is not None:
            return bool(told)
        least = self.env.spec.reward_threshold if self.success_return is None else self.success_return
        return self.episode_return >= least if least is not None else is_terminated and self.episode_return > 0

    def _make(self, kwargs: dict[str, Any]) -> Any:
        package, _, name = self.id.rpartition(":")
        try:
            if package:
                importlib.import_module(package)
            entry = self._gymnasium.spec(name).entry_point
            kind = self._gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
            if not self.format_observation and "ansi" in getattr(kind, "metadata", {}).get("render_modes", ()):
                kwargs = {"render_mode": "ansi", **kwargs}
            return self._gymnasium.make(name, **kwargs)
        except (self._gymnasium.error.Error, ModuleNotFoundError) as error:
            fix = "Name a registered environment, or 'package:Name-v0' if importing the package registers it."
            self.refuse(f"{error} {fix}", error)

    def _resolve_actions(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the actions; () if an action is any text."""
        space, spaces = self.env.action_space, self._gymnasium.spaces
        size = int(space.n) if isinstance(space, spaces.Discrete) else None
        if names and (self.parse_action or len(names) != size):
            self.refuse(
                f"actions={names} name its actions, {space}, and parse_action={self.parse_action}. Name all actions "
                "of a Discrete space, or set parse_action alone."
            )
        if names or self.parse_action or isinstance(space, spaces.Text):
            return names
        if size is None or size > MAX_ACTIONS:
            self.refuse(f"no text chooses one of its actions, {space}. Pass parse_action, which makes one of a text.")
        return tuple(str(int(space.start) + number) for number in range(size))

    def _text_of(self, observation: Any) -> str:
        if self.format_observation:
            return self.format_observation(observation)
        if self.env.render_mode == "ansi" and not isinstance(observation, str):
            return _COLOURED.sub(r"[\1]", str(self.env.render())).strip("\n")
        return _written(observation)


def _size(space: Any) -> int:
    """How many numbers an observation has."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return math.prod(space.shape or ())
    return sum(map(_size, parts.values() if isinstance(parts, Mapping) else parts))


def _written(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_written(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
