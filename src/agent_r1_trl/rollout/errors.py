"""What stops a run: a format that cannot give token-exact rollouts, and a rollout in which nothing could be played.

Not part of the data flow: raised before a rollout starts, or after one that went wrong from its first step.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1_trl.trajectory import Trajectory


class ChatFormatError(ValueError):
    """A user's mistake with its cure; the message is both, in this order."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(f"{problem} {cure}")
        self.problem = problem
        self.cure = cure


class NothingPlayedError(RuntimeError):
    """Every trajectory failed before the policy could act."""


def check_some_played(trajectories: Sequence[Trajectory]) -> None:
    """Refuse a rollout that holds infrastructure failures and nothing else.

    Raises:
        NothingPlayedError: says what the first one said, with the cure.
    """
    if all(trajectory.stop_reason.is_infrastructure_failure for trajectory in trajectories):
        first = trajectories[0]
        reason = (first.error or "the prompt leaves no room for a completion").rstrip(".")
        raise NothingPlayedError(
            f"All {len(trajectories)} trajectories failed before the policy could act; the first one with "
            f"{first.stop_reason.value}: {reason}. Run `agent-r1-trl doctor` on this environment and data set."
        )
