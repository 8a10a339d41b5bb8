"""TRL's `tools=[functions]` as an environment: the functions, and no reward of its own.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.tools import Tool, as_tool


class FunctionToolsEnv(ToolEnv):
    """Plain functions as tools; the reward comes from `reward_funcs`.

    The prompt is the column `prompt` (messages or a string). Results read as in TRL: `str` of the return value.

    Args:
        tools: functions with type hints and a Google docstring, or `Tool`s.
        **settings: of `ToolEnv`; process rewards are 0 unless set here.

    Raises:
        ValueError: no tools, one that is no function, or two of one name.
    """

    tool_call_reward = 0.0
    tool_error_reward = 0.0
    has_reward = False

    def __init__(self, tools: Iterable[Any], **settings: Any) -> None:
        functions = [trl_tool(item) for item in tools]
        if not functions:
            raise ValueError("tools=[]: pass at least one function.")
        super().__init__(tools=functions, **settings)
        _ = self.executor  # two tools of one name are reported here, not in the first rollout


def trl_tool(item: Any, *, sequential: bool | None = None) -> Tool:
    """A function as TRL runs it; a `Tool` keeps its own settings."""
    if isinstance(item, Tool):
        return item
    return Tool(as_tool(item).fn, render=render_as_trl, sequential=sequential)


def render_as_trl(value: Any) -> str:
    """TRL's text of a return value: `str`, and the texts of a list of content blocks."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(str(part.get("text", f"[{part['type']}]")) for part in value)
    return str(value)
