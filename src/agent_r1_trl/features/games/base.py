"""GameEnv: turns in which the model plays one action or several, and reads what has become of the game.

A game is five methods. The level is text that depends on its seed and nothing else, so a data set may hold it:

    class Count(GameEnv):
        actions = ("More", "Less")

        def rules(self): return "Bring the number to 3."
        def new_level(self, seed): return str(seed % 3)
        def load_level(self, level): self.number = int(level)
        def describe(self): return f"Number: {self.number}"
        def act(self, action):
            self.number += 1 if action == "More" else -1
            self.is_won = self.is_over = self.number == 3
            return {"step": -0.1}

What is random while a game is played (slips, the pay of an arm) is drawn from `self.random`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.tool_env import ToolEnv, prompt_messages
from agent_r1_trl.features.games.checks import (
    AROUND,
    Tag,
    check_seed,
    has_no_text,
    shown,
)
from agent_r1_trl.rewards import extract_answer, strip_reasoning
from agent_r1_trl.settings import Count, Finite, Flag, OneOf, Words
from agent_r1_trl.trajectory import Message, ToolCall, ToolResult, Trajectory


class ActionError(ValueError):
    """A text that names no action of the game; the message tells the model why."""


class GameEnv(ToolEnv):
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

    actions: ClassVar[tuple[str, ...]] = ()
    """Names of the actions, matched without regard to case."""
    noun: str = "action"
    """What an action is called in the prompt."""
    action_format: Annotated[str, OneOf("text", "tool")] = "text"
    max_actions: Count = 10
    max_actions_per_turn: Count = 5
    max_idle_turns: Count = 3
    separator: Words = "||"
    answer_tag: Annotated[str, Tag()] = "answer"
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
        """What the model reads and writes for `actions`."""
        if settings.get("action_format", self.action_format) == "tool":
            settings["tools"] = ["play", *settings.get("tools", ())]
        super().__init__(**settings)
        self._start_turn()

    # ---------------------------------------------------------------- what a game defines

    def rules(self) -> str:
        """What the model must know of the game; how to write actions is added."""
        raise NotImplementedError

    def new_level(self, seed: int) -> str:
        """A level as text, from its seed and the settings alone."""
        raise NotImplementedError

    def load_level(self, level: str) -> None:
        """Begin a level.

        Raises:
            ValueError: the text is no level of this game.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """The state of the game as the model reads it."""
        raise NotImplementedError

    def act(self, action: str) -> dict[str, float]:
        """Play one action (its name in the class); returns what it earns, by source. Sets `is_over` and `is_won`.

        By its end `self.is_effective` says whether the action has changed anything; it is True if nothing sets it.
        """
        raise NotImplementedError

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

    def example_actions(self) -> list[str]:
        """Two actions to show how they are written."""
        return (list(self.names) * 2)[:2]

    def read_row(self, example: Mapping[str, Any]) -> str:
        """The level of a row of the data set.

        Raises:
            ValueError: a column holds no level or seed.
        """
        level, seed = example.get("level"), check_seed(type(self).__name__, example.get("seed"))
        if isinstance(level, list | tuple) and all(isinstance(line, str) for line in level):
            level = "\n".join(level)
        if level is not None and not isinstance(level, str):
            raise ValueError(f"{type(self).__name__}.reset: level={level!r:.200} must be text, or a list of lines.")
        return level if level is not None else self.new_level(self._reset_seed if seed is None else seed)

    def metrics(self) -> dict[str, float]:
        """Further numbers of the finished game, logged as `env/*`."""
        return {}

    def check_options(self) -> None:
        """Check what settings of the game say together.

        Raises:
            ValueError: one is out of range.
        """

    # ---------------------------------------------------------------- the episode

    def seed(self, *, reset_seed: int, dynamics_seed: int) -> None:
        """Take the seeds of the trajectory: the group's own for the level, the trajectory's own for random events."""
        self._reset_seed, self._dynamics_seed = reset_seed, dynamics_seed

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start a game.

        Raises:
            ValueError: a column holds no level or seed of this game.
        """
        prompt: list[Message] = []
        if not isinstance(example, Mapping) or not has_no_text(example.get("prompt")):
            prompt = prompt_messages(example, type(self).__name__)
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
        most, examples = self.max_actions_per_turn, self.example_actions()
        legal = f"Actions: {', '.join(self.names)}. " if self.names else ""
        up_to = f"up to {most} {self.noun}s" if most > 1 else f"one {self.noun}"
        if self.action_format == "tool":
            return f"{legal}In each turn, call the tool play with {up_to}."
        example = f" {self.separator} ".join(examples[:most])
        separated = f", separated by {self.separator}" if most > 1 else ""
        if not self.answer_tag:
            return f"{legal}In each turn, write {up_to}{separated}, and nothing else, for example: {example}"
        tag = self.answer_tag
        return f"{legal}In each turn, write {up_to}{separated} in this form: <{tag}>{example}</{tag}>"

    def play(self, actions: list[str]) -> str:
        """Play actions in the game, in their order, and see what has become of it.

        Args:
            actions: The actions to play.
        """
        said = [] if actions else ["There was no action in your call."]
        if "invalid_action" in self._turn_parts:  # an earlier call of the same turn
            actions, said = [], ["Not played, because of the action before that is none."]
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
            self._play_one(action)
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

    def split_actions(self, answer: str) -> list[str]:
        """The texts of the single actions in an answer."""
        return answer.split(self.separator)

    def is_done(self, message: Message) -> bool:
        """Whether the game is over."""
        return self.is_over

    async def step(self, message: Message) -> StepResult:
        """Play the actions of an assistant message; see `ToolEnv.step`."""
        self._start_turn()
        observations, _, _, info = await super().step(message)
        parts = {name: value for name, value in info["reward_parts"].items() if name == "tool_error"}
        is_idle = self._turn_actions == 0
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
        trajectory.info.update(
            success=float(self.is_won),
            num_actions=float(self.num_actions),
            num_effective_actions=float(self.num_effective_actions),
            num_invalid_turns=float(self.num_invalid_turns),
            **self.metrics(),
        )
        reward = self.success_reward if self.is_won else self.failure_reward
        return reward, {"success": reward}

    # ---------------------------------------------------------------- internal

    def _start_turn(self) -> None:
        self._turn_actions = 0
        self._turn_parts: dict[str, float] = {}

    def _play_one(self, action: str) -> None:
        self.is_effective = True
        self._pay(self.act(action))
        self._turn_actions += 1
        self.num_actions += 1
        self.num_effective_actions += self.is_effective
        self.is_over |= self.num_actions >= self.max_actions

    def _pay(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            self._turn_parts[name] = self._turn_parts.get(name, 0.0) + value

    def _state(self) -> str:
        if not self.show_actions_left:
            return self.describe()
        return f"{self.describe()}\n{self.noun.capitalize()}s left: {self.max_actions - self.num_actions}"

    def _check_settings(self) -> None:
        super()._check_settings()
        self.check_options()
