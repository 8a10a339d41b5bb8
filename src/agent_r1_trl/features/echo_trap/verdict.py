"""What a judgement consists of: the state of a run, the signals that led there, and the thresholds they crossed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

State = Literal["healthy", "converged", "warning", "collapsing", "collapsed"]
Level = Literal["warning", "critical"]
Pair = tuple[float, float]

STATES: tuple[State, ...] = ("healthy", "converged", "warning", "collapsing", "collapsed")
"""From the mildest to the worst: `STATES.index(verdict.state)` compares two states."""
PROGRESS = ("reward", "success")
"""What a run is for."""
NOTHING: Mapping[str, Signal] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where a signal becomes a warning, and where it becomes critical: pairs (warning, critical).

    `docs/echo-trap.md` defines what each pair is compared with.

    Raises:
        ValueError: a value is out of its range, or a warning would come after its critical level.
    """

    reward_std: Pair = (0.5, 0.1)
    """In-group standard deviation of the raw returns, as a ratio to its baseline: below."""
    zero_std_share: Pair = (0.7, 0.9)
    """Share of groups whose returns are all equal: above."""
    entropy_low: Pair = (0.5, 0.1)
    """Entropy over action tokens, as a ratio to its baseline: below."""
    entropy_high: Pair = (1.5, 2.0)
    """The same: above."""
    grad_norm: Pair = (5.0, 10.0)
    """Gradient norm, as a ratio to the median of the last `median_window` norms: above."""
    reward_drop: Pair = (0.2, 0.5)
    """Distance of the smoothed reward, and of the success rate, from its best, as a share of its scale: above."""
    repetition: Pair = (0.5, 0.9)
    """Share of assistant turns that another trajectory of the group says as well: above."""
    inaction: Pair = (0.3, 0.6)
    """Share of trajectories without a call, minus its baseline: above."""

    solved_reward: float | None = None
    """Mean reward from which the task counts as solved. None infers it; see `docs/echo-trap.md`."""
    solved_success: float = 0.9
    """Success rate from which the task counts as solved, where `success` is known."""

    window: int = 10
    """W: number of first known values of a signal, whose mean is its baseline."""
    ema_decay: float = 0.8
    """Of the exponential moving average (EMA) that is compared with the baseline."""
    median_window: int = 50
    """Number of steps whose gradient norms the median is taken over."""
    warning_steps: int = 3
    """Number of known values in a row beyond a threshold that make a warning."""
    critical_steps: int = 5
    """The same for the critical level."""
    recovery_steps: int = 5
    """Number of steps in a row that must look better before the state gets better."""
    noise: float = 3.5
    """Number of standard errors by which a signal must differ from its baseline. Below that the difference is chance,
    which sparse rewards and small batches give plenty of."""
    reward_noise: float = 6.0
    """The same for the distance of the smoothed reward from its best, which is a maximum over many steps."""
    stale_steps: int = 50
    """A signal that has been unknown for this many steps is forgotten until it is known again."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            rule = _broken_rule(item.name, str(item.type), value)
            if rule is not None:
                raise ValueError(f"Thresholds.{item.name}={value!r} must be {rule}.")


def _broken_rule(name: str, kind: str, value: Any) -> str | None:
    """What a threshold must be and is not; None if it is.

    Args:
        name: of the field.
        kind: its annotation.
        value: that was given.
    """
    if kind == "Pair":
        falls = name in ("reward_std", "entropy_low")
        is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))
        if is_pair and min(value) > 0 and (value[0] >= value[1] if falls else value[0] <= value[1]):
            return None
        order = f"the critical value is the {'smaller' if falls else 'larger'} one"
        return f"two numbers (warning, critical), both above 0, with the warning first: {order}"
    if value is None and kind == "float | None":
        return None
    if not _is_number(value):
        return "a finite number"
    least = 2 if name == "window" else 1
    if kind == "int" and (not isinstance(value, int) or value < least):
        return f"a whole number of at least {least}"
    if name == "ema_decay" and not 0 <= value < 1:
        return "at least 0 and below 1"
    if name in ("noise", "reward_noise") and value < 0:
        return "at least 0, which takes no noise into account"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One signal that has crossed a threshold, and has stayed there long enough to count."""

    name: str
    """`reward_std`, `zero_std_share`, `entropy`, `grad_norm`, `reward`, `success`, `repetition` or `inaction`."""
    level: Level
    value: float
    """What was compared: a ratio, a share or a drop, as `docs/echo-trap.md` defines it."""
    threshold: float
    """What it was compared with."""
    reason: str
    """One sentence in plain English, with the numbers."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state of a run after its last step."""

    state: State
    step: int
    """Number of steps that were judged."""
    signals: Mapping[str, Signal] = field(default_factory=lambda: NOTHING)
    """By name, the signals that the state follows from."""
    excused: Mapping[str, Signal] = field(default_factory=lambda: NOTHING)
    """By name, signals beyond a threshold that the state does not follow from, because the reward gains."""
    measures: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By name, what each signal that is known compares with its thresholds, crossed or not; besides, the response
    length as a ratio to its baseline."""
    reason: str = ""
    """Why the state is what it is, in plain English."""
    num_kinds: int = 2
    """Number of kinds of signals that the state follows from; `reward` and `success` are one, as are `reward_std` and
    `zero_std_share`, and all of them where nothing succeeds any more."""
    is_recovering: bool = False
    """Whether success (the reward, where that is unknown) has made up a third of what it had lost."""
    is_entropy_high: bool = False
    """Whether the entropy is above its first upper threshold, for however few steps."""

    @property
    def severity(self) -> int:
        """Place of the state in `STATES`: 0 for healthy, 4 for collapsed."""
        return STATES.index(self.state)

    @property
    def answered(self) -> State:
        """The state that actions may answer: one kind of signal alone, however far, is never enough for any.

        A rollback takes a critical signal of what the policy does, since a task may get harder by any amount. A run
        that is recovering would lose by it what was done for it.
        """
        if self.num_kinds < 2:
            return "healthy"
        has_critical = any(item.level == "critical" for name, item in self.signals.items() if name not in PROGRESS)
        is_mild = self.is_recovering or not has_critical
        return "warning" if is_mild and self.severity > STATES.index("warning") else self.state

    @property
    def entropy_side(self) -> int:
        """2 where the entropy is high or was so until lately, 1 where a signal says that it is low, else 0."""
        signal = self.signals.get("entropy")
        if self.is_entropy_high or (signal is not None and signal.threshold > 1):
            return 2
        return 0 if signal is None else 1
