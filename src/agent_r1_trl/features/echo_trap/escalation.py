"""Which of the guard's actions is due. Pure: every rank, a dry run and a resumed run decide alike.

The actions stand in an order that the user chooses. Each has a severity: the mildest verdict that it answers.

    filter, clip, learning_rate    "warning"      they change how the next steps are trained
    rollback                       "collapsing"   goes back to the last healthy checkpoint
    stop                           "collapsed"    ends the run

What `filter` and `clip` have changed is undone once the run has been healthy for a while. `clip` does not fit a run
whose entropy is high: it is not taken then, and undone at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEALTHY = ("healthy", "converged")
UNDONE = ("filter", "clip")
"""Actions that end with their cause; the learning rate comes back by itself, and a rollback is over at once."""
SEVERITIES = ("healthy", "warning", "collapsing", "collapsed")
_NEEDS = {"rollback": 2, "stop": 3}
"""Severity that an action answers; 1 for all others."""


@dataclass(kw_only=True)
class GuardState:
    """The state behind the guard's next decision besides the verdict; every checkpoint holds it."""

    run: str = ""
    """Name of the run, which its checkpoints share."""
    is_dry: bool = False
    num_steps: int = 0
    """Optimizer steps made, those included that a rollback has undone. It never falls."""
    num_taken: dict[str, int] = field(default_factory=dict)
    """How often each action was taken, in a dry run: would have been."""
    last_action: int | None = None
    """`num_steps` when an action was taken last."""
    last_rollback: int | None = None
    num_rollbacks: int = 0
    """Rollbacks that really happened; they seed the draws of the rollouts."""
    noticed_at: int | None = None
    """Optimizer step, as checkpoints count them, whose verdict was the first in a row not to be healthy."""
    healthy_for: int = 0
    """Number of steps in a row whose verdict was healthy or converged."""
    rate_until: int = 0
    """The learning rate is lowered as long as `num_steps` is below this."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The guard's actions, in their order."""

    def note(self, step: int, *, is_healthy: bool) -> None:
        """Keep since which optimizer step the run is, or is not, healthy."""
        self.noticed_at = None if is_healthy else step if self.noticed_at is None else self.noticed_at
        self.healthy_for = self.healthy_for + 1 if is_healthy else 0

    def take(self, name: str) -> None:
        """Count an action that is taken now."""
        self.num_taken[name] = self.num_taken.get(name, 0) + 1
        self.last_action = self.num_steps
        if name == "rollback":
            self.last_rollback = self.num_steps

    def past_actions(self, patience: int, *, is_exploding: bool) -> list[str]:
        """Actions that were taken and are to be undone now."""
        is_over = self.healthy_for >= patience
        return [name for name in UNDONE if name in self.num_taken and (is_over or (is_exploding and name == "clip"))]


def due_actions(
    actions: Sequence[str],
    state: GuardState,
    verdict: str,
    *,
    patience: int,
    max_rollbacks: int,
    is_exploding: bool = False,
) -> list[str]:
    """The actions to take after this step, in order; none, as a rule.

    One action is taken at a time, and gets `patience` steps to work. Only a run that has collapsed does not wait: the
    actions up to the next rollback (or stop) are then taken together, because what they would have had to repair is
    undone anyway. A rollback gets its `patience` steps in any case. Every other action is in force once.

    >>> due_actions(["filter", "stop"], GuardState(num_steps=3), "warning", patience=10, max_rollbacks=2)
    ['filter']
    """

    def is_within(last: int | None) -> bool:
        return last is not None and state.num_steps - last < patience

    severity = SEVERITIES.index(verdict) if verdict in SEVERITIES else 0
    left = [
        name
        for name in actions
        if _NEEDS.get(name, 1) <= severity
        and state.num_taken.get(name, 0) < (max_rollbacks if name == "rollback" else 1)
        and not (is_exploding and name == "clip")
    ]
    if is_within(state.last_rollback):
        return []
    heavy = next((place for place, name in enumerate(left) if name in _NEEDS), None)
    if verdict == "collapsed" and heavy is not None:
        return left[: heavy + 1]
    return [] if is_within(state.last_action) else left[:1]
