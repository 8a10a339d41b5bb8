"""Trajectories that ended in an infrastructure failure: what caused it, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agent_r1_trl.errors import RunError
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trajectory import StopReason, Trajectory

MAX_TEXT, MAX_CAUSES = 500, 5
"""Characters of an error that are kept, and causes that a message lists."""
NOT_SCORED = "not_scored"


class NothingRolledOutError(RunError):
    """Nothing could be rolled out, or less than `failures.max_share` asks for."""


@dataclass(kw_only=True, frozen=True)
class FailureCause:
    """Why trajectories were lost."""

    stop_reason: str
    error: str
    """The error of the first of them."""
    example_id: str
    """The example of the first of them."""
    count: int = 1

    @property
    def key(self) -> str:
        """Equal for errors that differ in numbers and addresses alone."""
        return without_numbers(f"{self.stop_reason}: {self.error}")

    def __str__(self) -> str:
        return f"{self.count} x {self.stop_reason}: {self.error} (first in example {self.example_id!r})"


def without_numbers(text: str) -> str:
    """A key, equal for messages that differ in numbers and addresses alone."""
    return re.sub("0x[0-9a-fA-F]+|[0-9]+", "#", text)


def failure_of(trajectory: Trajectory) -> FailureCause | None:
    """Why the trajectory failed, or a reward function that is required did for it; None if nothing failed."""
    has_failed = trajectory.stop_reason.is_infrastructure_failure
    if not has_failed and (trajectory.is_scored or trajectory.error is None):
        return None
    error = trajectory.error or "the prompt leaves no room for a completion"
    return FailureCause(
        stop_reason=trajectory.stop_reason.value if has_failed else NOT_SCORED,
        error=shown(error.strip()).rstrip(".")[:MAX_TEXT],
        example_id=shown(trajectory.example_id),
    )


def may_pass(trajectory: Trajectory, *, is_refused: bool) -> bool:
    """Whether the trajectory failed for no fault of the policy, of something that may be over at the next try."""
    reason = trajectory.stop_reason
    return reason.is_infrastructure_failure and reason is not StopReason.PROMPT_TOO_LONG and not is_refused


def count_causes(failures: Iterable[FailureCause | None]) -> list[FailureCause]:
    """Each cause once, with its count; the most frequent one first."""
    causes: dict[str, FailureCause] = {}
    for failure in filter(None, failures):
        num_before = causes[failure.key].count if failure.key in causes else 0
        causes[failure.key] = replace(causes.get(failure.key, failure), count=num_before + failure.count)
    return sorted(causes.values(), key=lambda cause: -cause.count)


def describe_causes(causes: Sequence[FailureCause]) -> str:
    """The causes in words, for a message."""
    parts = [str(cause) for cause in causes[:MAX_CAUSES]]
    if rest := causes[MAX_CAUSES:]:
        parts.append(f"{sum(cause.count for cause in rest)} x {len(rest)} other causes")
    return "; ".join(parts)


def what_to_do(causes: Sequence[FailureCause], choice: str = "") -> str:
    """The advice for a message that lists these causes; the doctor calls no reward function and asks no policy."""
    reasons = {cause.stop_reason for cause in causes}
    if reasons == {NOT_SCORED}:
        return f"Correct the reward function{choice}, or resume when what it asks answers again."
    if reasons == {StopReason.GENERATION_ERROR.value}:
        return f"Correct the model or what it is sampled with{choice}, or try again when the server answers."
    return f"Correct the environment or the data{choice}. Run `agent-r1-trl doctor` on this environment and data set."


def check_some_rolled_out(trajectories: Sequence[Trajectory]) -> None:
    """Refuse a rollout in which every trajectory ended in an infrastructure failure."""
    causes = count_causes(map(failure_of, trajectories))
    if sum(cause.count for cause in causes) == len(trajectories):
        raise NothingRolledOutError(
            f"All {len(trajectories)} trajectories were lost: {describe_causes(causes)}. {what_to_do(causes)}"
        )
