"""What a judgement consists of: the state of a run, the signals that led there, and the thresholds they crossed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

State = Literal["healthy", "converged", "warning", "collapsing", "collapsed"]
Level = Literal["warning", "critical"]

STATES: tuple[State, ...] = ("healthy", "converged", "warning", "collapsing", "collapsed")
"""From the mildest to the worst: `STATES.index(verdict.state)` compares two states."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where a signal becomes a warning, and where it becomes critical; the defaults are those of `docs/echo-trap.md`.

    Raises:
        ValueError: a value is out of its range, or a warning would come after its critical level.
    """

    window: int = 10
    """W: the number of first known values of a signal whose mean is its baseline."""
    solved_reward: float | None = None
    """Mean reward from which the task counts as solved; None infers it from `reward_max` and `reward_min`."""
    solved_success: float = 0.9
    """Success rate from which the task counts as solved, where `success` is known."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One signal that has crossed a threshold."""

    name: str
    """`reward_std`, `zero_std_share`, `entropy`, `grad_norm`, `reward`, `repetition` or `inaction`."""
    level: Level
    value: float
    """What was compared: a ratio, a share or a drop, as the page of the signals defines it."""
    threshold: float
    """What it was compared with."""
    reason: str
    """One sentence in plain English, with the numbers."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state of a run after its last step."""

    state: State
    step: int
    """Number of steps that were judged; 0 before the first one."""
    signals: Mapping[str, Signal] = field(default_factory=lambda: MappingProxyType({}))
    """By name, those that have crossed a threshold: also the ones that the state does not count, because the run
    earns more than it did."""
    reason: str = ""
    """Why the state is what it is, in plain English."""

    @property
    def severity(self) -> int:
        """Place of the state in `STATES`: 0 for healthy, 4 for collapsed."""
        return STATES.index(self.state)
