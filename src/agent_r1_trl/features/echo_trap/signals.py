"""Each signal of the echo trap: its statistics, what is compared with its thresholds, and what is more than chance.

`docs/echo-trap.md` has the same formulas in prose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.features.echo_trap.verdict import PROGRESS, Level, Pair, Signal, Thresholds

_MOST_DEVIATIONS = 4.0
"""The largest difference between neighbours that counts as noise, in its own standard deviations."""
_OUTLIER_DEVIATIONS = 8.0
"""Standard deviations from the average beyond which a single value counts only once a neighbour confirms it."""
_SPAN = 20
"""Number of the last differences that make a noise of their own: what was sparse at first need not be so later."""


@dataclass
class Series:
    """Statistics of the known values of one key.

    The baseline is the mean of the first `window` values. With `needs_nonzero` it takes at least half as many that are
    not 0: a sparse reward may begin with steps that say nothing.
    """

    window: int
    decay: float
    needs_nonzero: bool = False
    is_good: bool = False
    """Whether larger is better: the noise then takes rises as they are, because a run that takes off is no crash."""

    num: int = 0
    num_nonzero: int = 0
    mean: float = 0.0
    """Mean of all values until the baseline is known; then the baseline."""
    has_baseline: bool = False
    ema: float = 0.0
    """Equal to `mean` until the baseline is known."""
    last: float = 0.0
    first: list[float] = field(default_factory=list)
    """The first three values."""
    raw: list[float] = field(default_factory=list)
    """The last five values, outliers included."""
    sum_squares: float = 0.0
    """Sum of the squared differences between neighbouring values."""
    squares: list[float] = field(default_factory=list)
    """The newest of these squares."""
    best: float = -math.inf
    """Largest `ema` since the baseline is known."""
    worst: float = math.inf
    """Smallest `ema` since the best one."""
    age: int = 0
    """Number of steps since the last known value."""

    def take(self, value: float | None) -> bool:
        """Take the value of one step, None if it is unknown; returns whether there is an average to judge by."""
        self.age += 1
        if value is None:
            return False
        self.age = 0
        self.first = [*self.first, value][:3]
        self.raw = [*self.raw, value][-5:]
        if self.num > 3 and 0 < _OUTLIER_DEVIATIONS * self.deviation < abs(value - self.ema):
            value = statistics.median(self.raw[-3:])
        if self.num:
            square = self._square(value - self.last)
            self.sum_squares += square
            self.squares = [*self.squares, square][-_SPAN:]
        self.num += 1
        self.num_nonzero += value != 0
        self.last = value
        if self.has_baseline:
            self.ema = self.decay * self.ema + (1 - self.decay) * value
        else:
            self.mean += (value - self.mean) / self.num
            self.ema = self.mean
            nonzero = self.num_nonzero if self.needs_nonzero else self.num
            self.has_baseline = self.num >= self.window and 2 * nonzero >= self.window
        if self.has_baseline:
            self.worst = self.ema if self.ema >= self.best else min(self.worst, self.ema)
            self.best = max(self.best, self.ema)
        return self.has_baseline

    @property
    def noise(self) -> float:
        """Standard error of `ema - mean`, from the differences of neighbours, which hold no trend."""
        of_ema = (1 - self.decay) / (1 + self.decay)
        return math.sqrt(self._variance * (of_ema + 1 / self.window))

    @property
    def error(self) -> float:
        """Standard error of `mean`."""
        return math.sqrt(self._variance / min(max(self.num, 1), self.window))

    @property
    def deviation(self) -> float:
        """Standard deviation of a single value."""
        return math.sqrt(self._variance)

    def _square(self, difference: float) -> float:
        """The square of a difference, or a cap: one crash would make the noise as large as itself."""
        square = difference**2
        variance = self._variance
        is_estimated = self.has_baseline and variance > 0
        is_gain = self.is_good and difference > 0
        if is_gain or not is_estimated:
            return square
        return min(square, 2 * _MOST_DEVIATIONS**2 * variance)

    @property
    def _variance(self) -> float:
        """Variance of a single value, late or over the run, the larger: a dry spell of a sparse reward is quiet."""
        of_late = math.fsum(self.squares) / max(len(self.squares), 1)
        return max(of_late, self.sum_squares / max(self.num - 1, 1)) / 2


@dataclass
class Norms:
    """Gradient norms: their median, and how many of the last ones were far above it."""

    window: int
    span: int
    values: list[float] = field(default_factory=list)
    """The last norms that were finite and not 0; a step without signal has 0."""
    ratios: list[float] = field(default_factory=list)
    """The last `span` norms over what was usual before them; infinite for a norm that was not finite."""
    first: float = 0.0
    """Median of the first norms; 0 until it is known."""

    def take(self, norm: float | None, *, at_least: int) -> bool:
        """Take the norm of one step; returns whether it could be compared with at least so many earlier ones."""
        if norm is None:
            return False
        is_known = len(self.values) >= at_least or not math.isfinite(norm)
        if is_known:
            # A run that has solved its task has norms near 0, and no step of ordinary size is a spike beside them.
            ratio = norm / max(statistics.median(self.values), 0.1 * self.first) if math.isfinite(norm) else math.inf
            self.ratios = [*self.ratios, ratio][-self.span :]
        if math.isfinite(norm) and norm > 0:
            self.values = [*self.values, norm][-self.window :]
            if not self.first and len(self.values) == at_least:
                self.first = statistics.median(self.values)
        return is_known


@dataclass
class Alarm:
    """The level of one signal, which takes patience to reach."""

    level: int = 0
    """0 none, 1 warning, 2 critical."""
    beyond: list[int] = field(default_factory=lambda: [0, 0])
    """Number of known values in a row beyond the warning and the critical threshold."""

    def take(self, crossed: tuple[bool, bool], patience: tuple[int, int]) -> None:
        """Judge one more known value: whether it is beyond each threshold, and how many in a row count."""
        for place in (0, 1):
            if crossed[place]:
                self.beyond[place] += 1
            else:
                self.beyond[place] = 0
        is_warning, is_critical = (self.beyond[place] >= patience[place] for place in (0, 1))
        if is_critical:
            self.level = 2
        elif is_warning:
            self.level = 1
        else:
            self.level = 0


VARIETY = ("reward_std", "zero_std_share", "entropy", "repetition")
"""Signals of lost variety, which learning lowers as well."""
SIGNS = {"entropy": 1.7, "repetition": 0.15, "inaction": 0.15}
"""Signs of another behaviour, whatever it earns, and how far each must be from its value when success was at its best:
beside a drop it tells a collapse from data that got harder. The entropy may move either way, by this factor."""
_SUDDEN_DEVIATIONS = 4.0
"""Standard deviations of a single value by which both of the last two must have moved to be a sudden collapse."""
_MIN_FALL = 0.5
"""A share that was high from the beginning must have lost half of what was missing to 1."""

_TEXTS = {
    "reward": "The smoothed reward has fallen from its best by {} of its scale",
    "success": "The smoothed success has fallen from its best by {} of its scale",
    "reward, sudden": "The reward fell from its best by {} of its scale, twice in a row",
    "success, sudden": "The success fell from its best by {} of its scale, twice in a row",
    "reward_std": "The standard deviation of the rewards inside groups is {} of its baseline",
    "zero_std_share": "In {} of the groups all trajectories earned the same",
    "entropy": "The entropy over action tokens is {} of its baseline",
    "grad_norm": "Three of the last gradient norms were at least {} their running median",
    "repetition": "{} of the assistant turns are said by another trajectory of the group as well",
    "inaction": "The share of trajectories without a tool call has risen by {}, and calls earned before",
}
"""The verdict on a value."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One signal after one step, against its thresholds."""

    key: str
    """Name of the signal in the history."""
    value: float
    """The quantity that is compared."""
    pair: Pair
    falls: bool = False
    """Whether the signal is below its thresholds where it is bad."""
    is_more_than_chance: bool = True
    is_sudden: bool = False
    """Whether the value says enough by itself, without patience: the milder of the last two, or a count of norms."""

    def is_beyond(self, threshold: float) -> bool:
        """Whether the value is on the bad side of a threshold, by more than chance."""
        return self.is_more_than_chance and (self.value < threshold if self.falls else self.value > threshold)

    def patience(self, limits: Thresholds) -> tuple[int, int]:
        """Number of values in a row beyond each threshold that count."""
        return (1, 1) if self.is_sudden else (limits.warning_steps, limits.critical_steps)

    def _shown(self, value: float) -> str:
        if self.key == "grad_norm":
            return f"{value:.3g} times"
        return f"{100 * value:.0f}%" if abs(value) >= 0.1 or value == 0 else f"{100 * value:.2g}%"

    def signal(self, level: Level) -> Signal:
        """The crossing as a verdict names it."""
        warning, critical = self.pair
        threshold = critical if level == "critical" else warning
        side = "below" if self.falls else "above"
        has_own_text = self.is_sudden and self.key in PROGRESS
        text = _TEXTS[f"{self.key}, sudden" if has_own_text else self.key].format(self._shown(self.value))
        reason = f"{text} ({level} {side} {self._shown(threshold)})."
        return Signal(name=self.key, level=level, value=self.value, threshold=threshold, reason=reason)


def reward_scale(progress: Series, spread: Series | None) -> float:
    """The unit of a drop of the reward or the success rate: its best, or how far it has come from below 0.

    For the reward, it is at least the in-group standard deviation, `spread`.
    """
    scale = max(progress.best - min(0.0, progress.mean), abs(progress.best))
    if spread is None or not spread.has_baseline:
        return scale
    return max(scale, spread.mean)


def signs_of_death(series: Mapping[str, Series]) -> dict[str, Signal]:
    """Signals without a baseline: how the run began, against its last values; two of these are a run that has died."""
    goal = "success" if series["success"].num else "reward"
    texts = {
        goal: (0.01, 3, f"The {goal} fell to {{}} of what it was, or less"),
        "entropy": (10.0, 3, "The entropy over action tokens rose to {} times that of the first step, or more"),
        "inaction": (1.0, 3, "The share of trajectories without a tool call rose to {}, and most called at first"),
        "zero_std_share": (1.0, 5, "The share of groups whose trajectories all earned the same rose to {}"),
    }
    found = {}
    for key, (limit, num, text) in texts.items():
        first, last = series[key].first, series[key].raw[-num:]
        if series[key].num < 3 + num:
            continue
        began, ended = {
            goal: (min(first) > 0, max(last) <= limit * min(first)),
            "entropy": (first[0] > 0, min(last) >= limit * first[0]),
            "inaction": (max(first) < 0.5, min(last) >= limit),
            "zero_std_share": (max(first) < 1, min(last) >= limit),
        }[key]
        if began and ended:
            reason = f"{text.format(f'{limit:g}')}, {num} times in a row (before there is a baseline)."
            value = min(last) / first[0] if key == "entropy" else last[-1]
            found[key] = Signal(name=key, level="critical", value=value, threshold=limit, reason=reason)
    return found


def signs_of_change(series: Mapping[str, Series], at_best: Mapping[str, float], limits: Thresholds) -> list[Signal]:
    """Which of `SIGNS` the policy shows, by more than chance; `at_best`: their averages when success was highest."""
    found = []
    for key, least in SIGNS.items():
        if key not in at_best or not series[key].has_baseline:
            continue
        before, now = at_best[key], series[key].ema
        value, threshold = now - before, least
        has_moved = value > least
        if key == "entropy":
            value = now / (before or 1.0)
            threshold = least if now > before else 1 / least
            has_moved = max(now, before) > least * min(now, before) and before > 0
        if has_moved and abs(now - before) > limits.noise * series[key].noise:
            reason = f"The {key} was {before:.2g} when success was at its best, and is {now:.2g}."
            found.append(Signal(name=key, level="warning", value=value, threshold=threshold, reason=reason))
    return found


_COMPARED = (
    ("reward_std", "reward_std", "ratio", True, False),
    ("zero_std_share", "zero_std_share", "value", False, True),
    ("entropy", "entropy_low", "ratio", True, False),
    ("entropy", "entropy_high", "ratio", False, False),
    ("repetition", "repetition", "value", False, False),
    ("inaction", "inaction", "rise", False, True),
)
"""Key of a signal; field of `Thresholds` with its two levels; what is compared: the ratio of the average to the
baseline, its rise above it, or the value itself; whether it is bad where it falls; whether two values that are
critical by themselves are enough."""


def crossings(series: Mapping[str, Series], norms: Norms, limits: Thresholds) -> list[Crossing]:
    """The verdict of every signal after a step; those without a baseline are left out."""
    found = drops(series, limits, limits.reward_noise)
    for key, name, of, falls, may_be_sudden in _COMPARED:
        item, pair = series[key], getattr(limits, name)
        if not item.has_baseline or (of == "ratio" and item.mean <= 0):
            continue
        values = {"ratio": item.ema / (item.mean or 1.0), "rise": item.ema - item.mean, "value": item.ema}
        is_real = abs(item.ema - item.mean) > limits.noise * item.noise
        if of == "value":
            is_real = is_real and 1 - item.ema < _MIN_FALL * (1 - item.mean)
        compared: dict = {"value": values[of], "is_more_than_chance": is_real}
        if may_be_sudden:
            compared |= _sudden(item, pair, origin=item.mean if of == "rise" else 0.0, reference=item.mean)
        found.append(Crossing(key=key, pair=pair, falls=falls, **compared))
    if norms.ratios:  # single steps: one outlier says nothing, whatever its size
        third = sorted([0.0, 0.0, *norms.ratios])[-3]
        found.append(Crossing(key="grad_norm", value=third, pair=limits.grad_norm, is_sudden=True))
    return found


def _sudden(
    series: Series, pair: Pair, *, origin: float, reference: float, scale: float = 1.0, sign: float = 1.0
) -> dict[str, Any]:
    """The replacement for the average of a signal whose last two values are both critical; nothing, as a rule.

    The distance from `origin`, in units of `scale`, is compared with the thresholds. The values come from `reference`
    (the best, or the baseline), and are bad where they rise (`sign` 1) or fall (-1).
    """
    last = min(series.raw[-2:], key=lambda value: sign * value)  # the milder one
    is_far = sign * (last - reference) > _SUDDEN_DEVIATIONS * series.deviation
    distance = sign * (last - origin) / scale
    if series.num < series.window + 2 or not is_far or distance <= pair[1]:
        return {}
    return {"value": distance, "is_more_than_chance": True, "is_sudden": True}


def drops(series: Mapping[str, Series], limits: Thresholds, noise: float) -> list[Crossing]:
    """How far reward and success have fallen: a reward that is gamed rises while success falls.

    `noise` is the number of standard errors that may be chance.
    """
    found: list[Crossing] = []
    for key in ("reward", "success"):
        average, spread = series[key], series["reward_std"] if key == "reward" else None
        scale = reward_scale(average, spread) if average.has_baseline else 0.0
        if scale == 0:
            continue
        best = average.best
        drop = average.best - average.ema
        pair = limits.reward_drop
        compared: dict = {"value": drop / scale, "is_more_than_chance": drop > noise * average.noise}
        compared |= _sudden(average, pair, origin=best, reference=best, scale=scale, sign=-1.0)
        found.append(Crossing(key=key, pair=pair, **compared))
    return found
