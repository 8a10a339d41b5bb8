"""HomeEnv: functions described by JSON schemas change the state of a house; the state at the end decides."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from agent_r1_trl import ToolEnv
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Message, Trajectory

FUNCTIONS = Path(__file__).with_name("functions.json")

State = dict[str, dict[str, Any]]
"""Room -> its `light` (whether it is on) and its `heating` (degrees)."""


def call(state: State, function: str, *, room: str, **values: Any) -> str:
    """Call a function of the house, which it may change; returns what it answers."""
    devices = state[room]
    if function == "set_light":
        devices["light"] = values["on"]
    elif function == "set_heating":
        devices["heating"] = values["degrees"]
    return f"{room}: light {'on' if devices['light'] else 'off'}, heating {devices['heating']}"


class HomeEnv(ToolEnv):
    """Lights and heating of five rooms. Several calls may stand in one turn; they are made at once.

    Rows have the columns `question`, `state` (the house before) and `goal` (the house after). The episode is won if
    the house is in the state `goal` when the model answers: what was asked for is done, and nothing else.

    Args:
        functions: a JSON file with a list of function schemas: `read_room`, `set_light`, `set_heating`.
        **settings: settings of `ToolEnv`.
    """

    system_prompt = "You control a house through functions. Call several of them in one turn where you can."
    tool_call_reward = 0.0  # a call is worth what it changes
    failure_reward = 0.0

    def __init__(self, functions: str | None = None, **settings: Any) -> None:
        schemas = json.loads(Path(functions or FUNCTIONS).read_text(encoding="utf-8"))
        super().__init__(
            tools=[Tool(functools.partial(self._call, item["name"]), schema=item) for item in schemas], **settings
        )

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the episode with the row's house."""
        messages = super().reset(example)
        self.state: State = copy.deepcopy(example["state"])
        return messages

    def _call(self, function: str, **arguments: Any) -> str:
        return call(self.state, function, **arguments)

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """1 if the house is as it was asked for, else 0."""
        is_right = self.state == self.example["goal"]
        num_calls = sum(len(turn.tool_results) for turn in trajectory.turns)
        num_turns = sum(bool(turn.tool_results) for turn in trajectory.turns)
        trajectory.info["success"] = float(is_right)
        trajectory.info["calls_per_turn"] = num_calls / max(num_turns, 1)
        return float(is_right), {"goal": float(is_right)}
