"""Environments of other packages as games whose levels are seeds: any of Gymnasium, and games of TextArena."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import random
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import numpy as np

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.features.doors.draws import drawing_from, give_own_draws
from agent_r1_trl.features.games.base import ActionError, GameEnv, load_package, shown
from agent_r1_trl.objects import did_you_mean, import_object
from agent_r1_trl.settings import Count, Finite, OneOf, Text
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
    """The observation for the model; set by `start` and `act`."""
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
        """The environment's last observation."""
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


def function_of(given: object, name: str) -> Any:
    """A function, or that of a path."""
    return import_object(given, name) if isinstance(given, str) else given


# -------------------------------------------------------------------- Gymnasium

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
    """The `info` beside the environment's last observation."""

    def __init__(
        self,
        id: str,
        *,
        actions: Sequence[str] = (),
        parse_action: Callable[[str], Any] | str | None = None,
        format_observation: Callable[[Any], str] | str | None = None,
        make_kwargs: Mapping[str, Any] | None = None,
        **settings: object,
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
        given, is_action = action, False
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # what no array holds
            if isinstance(given, int | float | list | tuple) and isinstance(space, self._gymnasium.spaces.Box):
                action = np.asarray(given, dtype=space.dtype)
            is_cut = action is not given and space.dtype.kind != "f" and not np.array_equal(action, given)  # 1.5 to 1
            is_action = not is_cut and space.contains(action)
        if not is_action:
            raise ActionError(f"{shown(text)} is not an action (they are those of {space})")
        return action

    def act(self, action: object) -> dict[str, float]:
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

    def _text_of(self, observation: object) -> str:
        if self.format_observation:
            return self.format_observation(observation)
        if self.env.render_mode == "ansi" and not isinstance(observation, str):
            return _COLOURED.sub(r"[\1]", self._drawing()).strip("\n")
        return _written(observation)

    def _drawing(self) -> str:
        try:
            drawn: Any = self.env.render()
        except NotImplementedError:
            drawn = None
        text = drawn.getvalue() if isinstance(drawn, io.StringIO) else drawn
        if not isinstance(text, str):
            self.refuse(
                f"its metadata list the render mode 'ansi', and render() returned {drawn!r:.80}, which is no text. "
                "Pass make_kwargs={'render_mode': None} to write its observations out, or format_observation."
            )
        return text


def _size(space: Any) -> int:
    """How many numbers an observation has."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return math.prod(space.shape or ())
    return sum(map(_size, parts.values() if isinstance(parts, Mapping) else parts))


def _written(value: object) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_written(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -------------------------------------------------------------------- TextArena

WORD_GAMES = {"Codenames", "Crosswords", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee"}
WORD_GAMES |= {"WordChains", "WordLadder", "WordSearch", "Wordle"}
"""Games that download dictionaries when they are imported or made."""


class TextArenaEnv(PackagedEnv):
    """A game of TextArena: the model reads the game's own prompt and, after each move, what is new.

    The game's reward at its end is the outcome reward; 1 is a success. A move that the game does not allow costs
    `invalid_action_reward`, and the game says why; a second one in a row ends most games. `opponent` moves for all
    other players.

    Args:
        id: of a registered game. What is played is the game without its wrappers.
        opponent: `(text) -> move`, a plain function, or its path. It gets all that its player has read.
        num_players: of the game; by default two with an opponent, else one.
        seat: whether the policy is the "first" or the "second" player, or "either", by the seed.
        make_kwargs: arguments of `textarena.make`.
        **settings: settings of `PackagedEnv`.

    Raises:
        ImportError: textarena is not installed.
        ValueError: there is no such game, or it downloads dictionaries, or settings contradict each other.
    """

    answer_tag = ""
    opponent: Callable[[str], str] | None = None
    num_players: Count | None = None
    seat: Annotated[str, OneOf("first", "second", "either")] = "first"

    def __init__(
        self,
        id: str,
        *,
        opponent: Callable[[str], str] | str | None = None,
        make_kwargs: Mapping[str, Any] | None = None,
        **settings: object,
    ) -> None:
        self._textarena = load_package("textarena", type(self).__name__, "textarena")
        self.id, self._make_kwargs = id, dict(make_kwargs or {})
        registry = self._textarena.envs.registration.ENV_REGISTRY
        if id not in registry:
            self.refuse(f"no game of TextArena.{did_you_mean(id, registry)}")
        if not WORD_GAMES.isdisjoint(str(registry[id].entry_point).split(".")):
            self.refuse(f"downloads dictionaries whenever it is made. Take none of {', '.join(sorted(WORD_GAMES))}.")
        self.opponent = function_of(opponent, "opponent") or self.opponent
        self.on_resume = "restart" if self.opponent else "replay"  # an opponent may move otherwise than before
        super().__init__(**settings)

    def start(self, seed: int) -> None:
        """Make the game and deal; others may move before the policy."""
        self._draws = random.Random(seed)
        self.player = self._draws.randrange(2) if self.seat == "either" else int(self.seat == "second")
        self._heard: dict[int, str] = {}
        give_own_draws(self._textarena.envs.registration.ENV_REGISTRY[self.id].entry_point, "textarena")
        with drawing_from(self._draws):
            game = self._textarena.make(self.id, **self._make_kwargs)
            while isinstance(game, self._textarena.Wrapper):
                game = game.env  # wrappers repeat the whole game in each observation
            try:
                game.reset(num_players=self._num_players, seed=seed)
            except AssertionError as error:
                fix = "Pass an opponent for a game of several players, and num_players for more than two."
                self.refuse(f"{error}. {fix}", error)
        self.game = game
        self.observation = self._next_observation()

    def read_action(self, text: str) -> str:
        """The text: the game reads it."""
        return text

    def how_to_act(self) -> str:
        """How the model writes its actions: by default as the game says."""
        return super().how_to_act() if self.answer_tag or self.action_format == "tool" else ""

    def act(self, action: str) -> dict[str, float]:
        """Make a move, and let the others make theirs."""
        state, info = self.game.state, self.game.state.game_info[self.player]
        num_errors, was_out = state.error_count, info["invalid_move"]
        self._move(action)
        self.is_effective = state.error_count <= num_errors and info["invalid_move"] == was_out
        self.observation = self._next_observation()
        return {} if self.is_effective else {"invalid_action": self.invalid_action_reward}

    # ---------------------------------------------------------------- internal

    @property
    def _num_players(self) -> int:
        return self.num_players or (2 if self.opponent else 1)

    def _move(self, text: str) -> None:
        with drawing_from(self._draws):
            self.is_over, _ = self.game.step(text)
        if self.is_over:
            self.own_reward = float((self.game.state.rewards or {}).get(self.player, 0.0))
            self.is_won = self.own_reward >= 1.0

    def _next_observation(self) -> str:
        """News for the policy when it is its turn again."""
        while not self.is_over:
            player, news = self.game.get_observation()
            names = {number: f"[Player {number}] " for number in range(self._num_players)}
            said = self._textarena.ObservationType.PLAYER_ACTION
            own = {(player, said)} if player == self.player else {}  # it stands in the conversation already
            told = "\n".join(names.get(who, "") + text for who, text, kind in news if (who, kind) not in own)
            if player == self.player or self.opponent is None:
                return told
            self._heard[player] = f"{self._heard.get(player, '')}\n{told}".strip()
            move = self.opponent(self._heard[player])
            if not isinstance(move, str):
                self.refuse(f"opponent returned {move!r:.200}: must be text. Return a move.")
            self._move(move)
        return str(self.game.state.game_info[self.player].get("reason", ""))

    def _check_settings(self) -> None:
        super()._check_settings()
        if (self._num_players > 1) != bool(self.opponent) or (self.seat != "first" and not self.opponent):
            self.refuse(
                f"num_players={self._num_players}, seat={self.seat!r}, opponent={self.opponent!r:.80}. Pass an "
                "opponent for several players, and for one nothing of it."
            )
