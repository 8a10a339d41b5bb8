"""A judgement: the state of a run, the signals that led there, and the thresholds they crossed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from agent_r1_trl.settings import Count, NotNegative, Number, Rule, SettingsGroup, Whole

State = Literal["healthy", "converged", "warning", "collapsing", "collapsed"]
Level = Literal["warning", "critical"]
Pair = tuple[float, float]

STATES: tuple[State, ...] = ("healthy", "converged", "warning", "collapsing", "collapsed")
"""From the mildest to the worst: `STATES.index(verdict.state)` compares two states."""
PROGRESS = ("reward", "success")
"""The aim of a run."""


def _levels(critical: str, is_ordered: Callable[[float, float], bool]) -> Rule:
    """A pair (warning, critical) of numbers above 0."""

    def takes(value: Any) -> bool:
        is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(Number(above=0).accepts, value))
        return is_pair and is_ordered(*value)

    return Rule(f"two numbers above 0, [warning, critical], the critical one the {critical}", takes)


Falling = Annotated[Pair, _levels("smaller", operator.ge)]
Rising = Annotated[Pair, _levels("larger", operator.le)]


@dataclass(kw_only=True)
class Thresholds(SettingsGroup):
    """Where a signal becomes a warning, and where it becomes critical; `docs/echo-trap.md` defines what is compared.

    The judge that they are given to refuses values out of their range.
    """

    reward_std: Falling = (0.5, 0.1)
    """In-group standard deviation of the raw returns, as a ratio to its baseline: below."""
    zero_std_share: Rising = (0.7, 0.9)
    """Share of groups whose returns are all equal: above."""
    entropy_low: Falling = (0.5, 0.1)
    """Entropy over action tokens, as a ratio to its baseline: below."""
    entropy_high: Rising = (1.5, 2.0)
    """Entropy over action tokens, as a ratio to its baseline: above."""
    grad_norm: Rising = (5.0, 10.0)
    """Gradient norm, as a ratio to the median of the last `median_window` norms: above."""
    reward_drop: Rising = (0.2, 0.5)
    """Distance of the smoothed reward, and of the success rate, from its best, as a share of its scale: above."""
    repetition: Rising = (0.5, 0.9)
    """Share of assistant turns that another trajectory of the group says as well: above."""
    inaction: Rising = (0.3, 0.6)
    """Share of trajectories without a call, minus its baseline: above."""

    solved_reward: Annotated[float, Number()] | None = None
    """Mean reward from which the task counts as solved. None infers it; see `docs/echo-trap.md`."""
    solved_success: Annotated[float, Number()] = 0.9
    """Success rate from which the task counts as solved, where `success` is known."""

    window: Annotated[int, Whole(2)] = 10
    """W: number of first known values of a signal, whose mean is its baseline."""
    ema_decay: Annotated[float, Number(minimum=0, below=1)] = 0.8
    """Decay of the exponential moving average (EMA) that is compared with the baseline."""
    median_window: Count = 50
    """Number of steps whose gradient norms the median is taken over."""
    warning_steps: Count = 3
    """Number of known values in a row beyond a threshold that make a warning."""
    critical_steps: Count = 5
    """Number of known values in a row beyond the critical level that make a collapse."""
    recovery_steps: Count = 5
    """Number of steps in a row that must look better before the state gets better."""
    noise: NotNegative = 3.5
    """Number of standard errors by which a signal must differ from its baseline. Below that the difference is chance,
    which sparse rewards and small batches give plenty of."""
    reward_noise: NotNegative = 6.0
    """`noise` for the distance of the smoothed reward from its best, which is a maximum over many steps."""
    stale_steps: Count = 50
    """A signal that has been unknown for this many steps is forgotten until it is known again."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One signal that has crossed a threshold, and has stayed there long enough to count."""

    name: str
    """`reward_std`, `zero_std_share`, `entropy`, `grad_norm`, `reward`, `success`, `repetition` or `inaction`."""
    level: Level
    value: float
    """The compared value: a ratio, a share or a drop, as `docs/echo-trap.md` defines it."""
    threshold: float
    """The bound that it was compared with."""
    reason: str
    """One sentence in plain English, with the numbers."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state of a run after its last step."""

    state: State
    step: int
    """Number of steps that were judged."""
    signals: Mapping[str, Signal] = field(default_factory=dict)
    """By name, the signals that the state follows from."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """By name, what each signal that is known compares with its thresholds, crossed or not."""
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
    def is_exploding(self) -> bool:
        """Whether the entropy is high or was so until lately, to which a wider clip would add."""
        signal = self.signals.get("entropy")
        return self.is_entropy_high or (signal is not None and signal.threshold > 1)
