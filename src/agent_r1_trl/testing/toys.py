"""Two tools, and two environments that offer them, for tests of what stands around an environment."""

from __future__ import annotations

from typing import Any

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import Trajectory


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


@tool
def echo(text: str) -> str:
    """Repeat a text.

    Args:
        text: What to repeat.
    """
    return text


class AddEnv(ToolEnv):
    """One tool. An answer is right (+1) if it has an even number of characters, else wrong (-1).

    So a test of a reward, an estimator or a callback chooses each trajectory's reward by its text alone.
    """

    tools: Any = (add,)

    def outcome_reward(self, trajectory: Trajectory) -> bool:
        """Whether the answer has an even number of characters."""
        return len(trajectory.final_text) % 2 == 0


class AddEchoEnv(AddEnv):
    """Two tools; the same answers are right."""

    tools: Any = (add, echo)
