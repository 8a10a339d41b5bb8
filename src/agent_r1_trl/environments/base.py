"""The Environment protocol: a policy acts in an environment by exchanging chat messages with it.

A new environment is created for every trajectory, so it may hold state. Its methods may be plain or async.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from agent_r1_trl.errors import RunError
from agent_r1_trl.trajectory import Message, Trajectory


class RewardError(RunError, ValueError):
    """A reward method of an environment failed: a bug in the user's code, which the rollout lets propagate."""

    exit_code = 2


class ProtocolError(RunError, ValueError):
    """A method of an environment returned another form than it must: a bug in the user's code, which ends the run."""

    exit_code = 2


class StepResult(NamedTuple):
    """The environment's answer to one assistant turn. A plain 4-tuple works as well."""

    observations: list[Message]
    """Messages to append (usually role `tool`); ignored when `done`."""
    reward: float
    """Process reward of the turn."""
    done: bool
    """Whether the episode is over."""
    info: dict[str, Any]
    """Known keys: `tool_results` (list[ToolResult]), `reward_parts` (dict[str, float], sums to `reward`),
    `is_invalid` (bool: nothing in the turn could be run, counts towards `max_invalid_calls`),
    `is_truncated` (bool: `done` only because of the environment's own limit, gymnasium's `truncated`: `max_turns`),
    `next_context` (list[Message]: what the next turn is sampled after, for `context.policy="step"`)."""


@runtime_checkable
class Environment(Protocol):
    """Any object with these methods is an environment. `tools` and `outcome_reward` are optional.

    So are `render_text()` and `render_svg()`, each a str: the present state for readers of the record, asked for after
    `reset` and after each `step`. No prompt holds it. And `seed(*, reset_seed, dynamics_seed)`, called before `reset`:
    the members of a group share the first number, what else is random is drawn from the second.
    """

    tools: Sequence[Any]
    """Their schemas are rendered into the prompt."""

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start the episode for one row of the data set; returns the prompt messages."""
        ...

    def step(self, message: Message) -> StepResult:
        """React to one assistant message.

        Args:
            message: `content`, `tool_calls` as parsed, and `malformed_tool_call`: the reason, if the model attempted a
                call that could not be read. `cut_off`: the reason, if a limit cut the turn and no call had begun.
        """
        ...

    def outcome_reward(self, trajectory: Trajectory) -> float | tuple[float, dict[str, float]]:
        """Score the finished trajectory; called once. Optionally with parts by name, which sum to the score."""
        ...

    def close(self) -> None:
        """Release what `reset` acquired. Called exactly once, also after a failure."""
        ...
