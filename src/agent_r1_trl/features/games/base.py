"""GameEnv: turns in which the model plays one action or several, and reads what has become of the game.

A game is five methods (docs/games.md writes one). The level is text that depends on its seed and nothing else, so a
data set may hold it. What is random while a game is played (slips, the pay of an arm) is drawn from `self.random`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.prompts import prompt_messages
from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.rewards import extract_answer, strip_reasoning
from agent_r1_trl.rewards.format import check_answer_tag
from agent_r1_trl.settings import (
    Clash,
    Count,
    CountOrZero,
    Finite,
    Flag,
    OneOf,
    Rule,
    Words,
    check_value,
    find_clashes,
    refuse,
)
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Message, ToolCall, ToolResult, Trajectory

AROUND = " \t\r\n.,;:!'\"`\u3002\uff0c\u3001\uff01\u201c\u201d\u2018\u2019\u300c\u300d"
"""White space and punctuation, the full-width kind too, that may stand around the name of an action."""
MAX_SHOWN = 40
"""Characters of an action that is shown back to the model."""


def _is_answer_tag(value: object) -> bool:
    with contextlib.suppress(ValueError):
        check_answer_tag("", value)
        return True
    return value == ""


class ActionError(ValueError):
    """A text that names no action of the game; the message tells the model why."""


class GameEnv(ToolEnv, ABC):
    """A game that is played in turns of one or several actions.

    In the format "text" the model writes its actions into the answer, `<answer>Up || Right</answer>`; in the format
    "tool" it calls the tool `play` with a list of actions. The actions of a turn are played in order, up to the first
    one that the game does not know, which is reported to the model and costs `invalid_action_reward`. A turn in which
    nothing could be played costs the same, and after `max_idle_turns` of them the game is lost.

    A row of the data set may have the columns `seed` (of the level), `level` (the level itself: text, or a list of its
    lines) and `prompt` (what the user says before the game begins). A row without `seed` and `level` gets a level that
    all members of its group share.

    Info: `success`, `num_actions`, `num_effective_actions`, `num_invalid_turns`, and what `metrics` adds.

    Args:
        action_format: "text" or "tool".
        max_actions: number of actions after which the game is lost.
        max_actions_per_turn: maximum number of actions that are played in one turn; further ones are left out, and
            the model is told.
        max_idle_turns: number of turns without any action after which the game is lost.
        separator: text between two actions of a turn.
        answer_tag: tag around the actions in the format "text"; "" if the whole text (without the reasoning) holds
            them.
        invalid_action_reward: reward of a turn with an action that the game does not know, or without any action.
        show_actions_left: whether observations say how many actions are left.
        **settings: settings of `ToolEnv`.

    Raises:
        ValueError: a setting is out of range.
    """

    actions: tuple[str, ...] = ()
    """Names of the actions, matched without regard to case."""
    noun: str = "action"
    """The name of an action in the prompt."""
    CLASHES: ClassVar[tuple[Clash, ...]] = ()
    """Settings of a game that contradict each other."""
    action_format: Annotated[str, OneOf("text", "tool")] = "text"
    max_actions: Count = 10
    max_actions_per_turn: Count = 5
    max_idle_turns: Count = 3
    separator: Words = "||"
    answer_tag: Annotated[
        str, Rule("the bare name of a tag other than that of the reasoning, or an empty text", _is_answer_tag)
    ] = "answer"
    invalid_action_reward: Finite = -0.1
    show_actions_left: Flag = True
    failure_reward = 0.0
    on_resume = "replay"  # the same seed and the same actions lead to the same state

    is_over: bool = False
    """Set by `act` when the game has ended."""
    is_won: bool = False
    """Set by `act` when the game has been won."""
    random: random.Random
    """Random events of the game in flight."""
    _reset_seed = 0
    _dynamics_seed = 0

    def __init__(self, **settings: Any) -> None:
        self.names = self.actions
        """The words for `actions` that the model reads and writes."""
        if (settings.get("action_format") or self.action_format) == "tool":
            tools = settings.get("tools")
            play: Any = type(self).play
            if not isinstance(play, Tool):
                play = Tool(play, user_errors=())  # it answers what is no action by itself: what it raises is a bug
            settings["tools"] = [play, *(type(self).tools if tools is None else tools)]
        super().__init__(**settings)
        self._start_turn()

    # ---------------------------------------------------------------- what a game defines

    @abstractmethod
    def rules(self) -> str:
        """The rules of the game for the model; how to write actions is added."""

    @abstractmethod
    def new_level(self, seed: int) -> str:
        """A level as text, from its seed and the settings alone.

        Raises:
            ValueError: none was found.
        """

    @abstractmethod
    def load_level(self, level: str) -> None:
        """Begin a level.

        Raises:
            ValueError: the text is no level of this game.
        """

    @abstractmethod
    def describe(self) -> str:
        """The state of the game as the model reads it."""

    @abstractmethod
    def act(self, action: str) -> dict[str, float]:
        """Play one action (its name in the class); returns what it earns, by source. Sets `is_over` and `is_won`.

        By its end `self.is_effective` says whether the action has changed anything; it is True if nothing sets it.
        """

    def read_action(self, text: str) -> str:
        """The action that a text names.

        Raises:
            ActionError: it names none.
        """
        names = {text.strip().casefold(), text.strip(AROUND).casefold()}
        for action, written in zip(self.actions, self.names, strict=True):
            if written.casefold() in names:
                return action
        raise ActionError(f"{shown(text)} is not an action (actions: {', '.join(self.names)})")

    def split_actions(self, answer: str) -> list[str]:
        """The texts of the single actions in what the model wrote."""
        return answer.split(self.separator)

    def example_actions(self) -> list[str]:
        """Two actions to show how they are written."""
        return (list(self.names) * 2)[:2]

    def read_row(self, example: Mapping[str, Any]) -> str:
        """The level of a row of the data set.

        Raises:
            ValueError: a column holds no level or seed.
        """
        level, owner = example.get("level"), type(self).__name__
        seed: Any = example.get("seed")
        seed = seed.item() if hasattr(seed, "item") else seed  # NumPy's
        check_value(f"{owner}.reset: seed", seed, CountOrZero | None)
        if isinstance(level, list | tuple) and all(isinstance(line, str) for line in level):
            level = "\n".join(level)
        if level is not None and not isinstance(level, str):
            raise ValueError(f"{owner}.reset: level={level!r:.200} must be text, or a list of lines.")
        return level if level is not None else self.new_level(self._reset_seed if seed is None else seed)

    def metrics(self) -> dict[str, float]:
        """Further numbers of the finished game, logged as `env/*`."""
        return {}

    # ---------------------------------------------------------------- the episode

    def seed(self, *, reset_seed: int, dynamics_seed: int) -> None:
        """Take the seeds of the trajectory: the group's own for the level, the trajectory's own for random events."""
        self._reset_seed, self._dynamics_seed = reset_seed, dynamics_seed

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start a game.

        Raises:
            ValueError: a column holds no level or seed of this game.
        """
        given = example.get("prompt")
        if isinstance(given, list) and not any(item.get("content") for item in given):
            given = None  # the placeholder of a run whose environment owns the data
        prompt = prompt_messages(example, type(self).__name__) if given else []
        self.level = self.read_row(example)
        self.random = random.Random(self._dynamics_seed)
        self.num_actions = self.num_effective_actions = self.num_invalid_turns = self.num_idle_turns = 0
        self.is_over = self.is_won = False
        self._start_turn()
        self.load_level(self.level)
        said = prompt[-1]["content"] if prompt and prompt[-1]["role"] == "user" else None
        if isinstance(said, str):  # some templates refuse two user messages in a row
            prompt[-1]["content"] = f"{said}\n\n{self._state()}"
        else:
            prompt.append({"role": "user", "content": self._state()})
        return super().reset({**example, "prompt": prompt})

    def system_message(self, example: dict[str, Any]) -> str | None:
        """`system_prompt` ("" for none), by default the rules and how to write actions."""
        return f"{self.rules()}\n{self.how_to_act()}" if self.system_prompt is None else self.system_prompt

    def how_to_act(self) -> str:
        """How the model writes its actions."""
        most, tag = self.max_actions_per_turn, self.answer_tag
        legal = f"Actions: {', '.join(self.names)}. " if self.names else ""
        up_to = f"up to {most} {self.noun}s" if most > 1 else f"one {self.noun}"
        if self.action_format == "tool":
            return f"{legal}In each turn, call the tool play with {up_to}."
        example = f" {self.separator} ".join(self.example_actions()[:most])
        separated = f", separated by {self.separator}" if most > 1 else ""
        form = f" in this form: <{tag}>{example}</{tag}>" if tag else f", and nothing else, for example: {example}"
        return f"{legal}In each turn, write {up_to}{separated}{form}"

    def play(self, actions: list[str]) -> str:
        """Play actions in the game, in their order, and see what has become of it.

        Args:
            actions: The actions to play.
        """
        said = [] if actions else ["There was no action in your call."]
        if "invalid_action" in self._turn_parts:  # an earlier call of the same turn
            actions = []
            said = ["Not played, because of the action before that is none."]
        for number, text in enumerate(actions):
            if self.is_over:
                break
            if self._turn_actions >= self.max_actions_per_turn:
                said.append(
                    f"At most {self.max_actions_per_turn} actions are played in one turn; the last "
                    f"{len(actions) - number} of your {len(actions)} actions were left out."
                )
                break
            try:
                action = self.read_action(text)
            except ActionError as error:
                rest = "" if number + 1 == len(actions) else " The actions after it were not played."
                said.append(f"{error}.{rest}")
                self._pay({"invalid_action": self.invalid_action_reward})
                break
            self.is_effective = True
            self._pay(self.act(action))
            self._turn_actions += 1
            self.num_actions += 1
            self.num_effective_actions += self.is_effective
            self.is_over |= self.num_actions >= self.max_actions
        return "\n".join([*said, self._state()])

    def next_user_message(self, message: Message) -> str | None:
        """In the format "text": the state after the actions that the message holds."""
        if self.action_format == "tool":
            return None
        text = str(message.get("content") or "")
        answer = extract_answer(text, self.answer_tag) if self.answer_tag else strip_reasoning(text)
        if not (answer or "").strip():
            return f"There was no action in your turn. {self.how_to_act()}\n{self._state()}"
        return self.play(self.split_actions(answer or ""))

    def is_done(self, message: Message) -> bool:
        """Whether the game is over."""
        return self.is_over

    async def step(self, message: Message) -> StepResult:
        """Play the actions of an assistant message; see `ToolEnv.step`."""
        self._start_turn()
        observations, _, _, info = await super().step(message)
        parts = {name: value for name, value in info["reward_parts"].items() if name == "tool_error"}
        is_tools_fault = any(result.is_error and not result.is_charged for result in info["tool_results"])
        is_idle = self._turn_actions == 0 and not is_tools_fault
        if is_idle and not parts:
            self._turn_parts["invalid_action"] = self.invalid_action_reward
        parts |= self._turn_parts
        self.num_idle_turns += is_idle
        self.num_invalid_turns += "invalid_action" in parts or "tool_error" in parts
        self.is_over |= self.num_idle_turns >= self.max_idle_turns
        if message.get("cut_off") and self.action_format == "text" and not message.get("tool_calls"):
            text = f"There was no action in your turn: {message['cut_off']}. {self.how_to_act()}\n{self._state()}"
            observations = [{"role": "user", "content": text}]
        info = {**info, "reward_parts": parts, "is_invalid": is_idle}
        return StepResult(observations, math.fsum(parts.values()), self.is_over, info)

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """Nothing: what a call earns is what its actions earn."""
        return 0.0

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """`success_reward` for a game that was won, else `failure_reward`."""
        counts = ("num_actions", "num_effective_actions", "num_invalid_turns")
        numbers = {"success": self.is_won, **{name: getattr(self, name) for name in counts}, **self.metrics()}
        trajectory.info.update({name: float(value) for name, value in numbers.items()})
        reward = self.success_reward if self.is_won else self.failure_reward
        return reward, {"success": reward}

    # ---------------------------------------------------------------- internal

    def _start_turn(self) -> None:
        self._turn_actions = 0
        self._turn_parts: dict[str, float] = {}

    def _pay(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            self._turn_parts[name] = self._turn_parts.get(name, 0.0) + value

    def _state(self) -> str:
        if not self.show_actions_left:
            return self.describe()
        return f"{self.describe()}\n{self.noun.capitalize()}s left: {self.max_actions - self.num_actions}"

    def _check_settings(self) -> None:
        super()._check_settings()
        refuse(find_clashes(self, self.CLASHES))


# -------------------------------------------------------------------- what single games use


def pair_of(minimum: int, *, is_size: bool = False) -> Rule:
    """Two whole numbers, the second no smaller than the first (or, for a `size`, of any order)."""

    def takes(value: Any) -> bool:
        is_whole = len(value) == 2 and all(type(item) is int and item >= minimum for item in value)
        return is_whole and (is_size or value[0] <= value[1])

    words = "rows and columns" if is_size else "fewest and most"
    return Rule(f"two whole numbers >= {minimum}, {words}", takes, is_list=True)


def load_package(name: str, owner: str, extra: str = "games") -> Any:
    """Import a package of an extra.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ImportError(f'{owner} needs the package {package}: pip install "agent-r1-trl[{extra}]".') from error


def shown(text: str) -> str:
    """A text of the model's, short and printable, in quotes."""
    text = text.strip().encode("utf-8", errors="replace").decode("utf-8")
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
