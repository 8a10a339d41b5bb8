"""The Environment protocol: what a policy acts in, in chat messages.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

An environment is created afresh for every trajectory and may hold state. Its methods may be plain or async; plain
ones run in a worker thread, so a slow environment never stops another trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from agent_r1_trl.trajectory import Message, Trajectory


class RewardError(ValueError):
    """A reward method of an environment failed: the user's bug, which no rollout may turn into a state."""


class StepResult(NamedTuple):
    """What one assistant turn led to. A plain 4-tuple works as well."""

    observations: list[Message]
    """Messages to append (usually role `tool`); ignored when `done`."""
    reward: float
    """Process reward of the turn."""
    done: bool
    """The episode is over."""
    info: dict[str, Any]
    """Known keys: `tool_results` (list[ToolResult]), `reward_parts` (dict[str, float], sums to `reward`),
    `is_invalid` (bool: nothing in the turn could be run, counts towards `max_invalid_calls`)."""


@runtime_checkable
class Environment(Protocol):
    """Anything with these methods can be trained in. `tools` and `outcome_reward` are optional.

    Attributes:
        tools: the tools whose schemas the chat template renders into the prompt.
    """

    tools: Sequence[Any]

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the episode for one row of the data set; returns the prompt messages."""
        ...

    def step(self, message: Message) -> StepResult:
        """Take one assistant message (`content`, `tool_calls` as parsed, and `malformed_tool_call`: the reason, when a
        call was attempted that could not be read).
        """
        ...

    def outcome_reward(self, trajectory: Trajectory) -> float | tuple[float, dict[str, float]]:
        """Score the finished trajectory, once; optionally with its parts by name (which sum to it)."""
        ...

    def close(self) -> None:
        """Free what `reset` took. Called exactly once, also after a failure."""
        ...
