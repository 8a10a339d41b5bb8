"""One number over the steps of a run: its baseline, its moving average and its noise, in constant memory."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

_MOST_DEVIATIONS = 4.0
"""What a difference between neighbours may add to the noise, in its own standard deviations."""
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
        square, variance = difference**2, self._variance
        is_estimated = self.has_baseline and variance > 0 and not (self.is_good and difference > 0)
        return min(square, 2 * _MOST_DEVIATIONS**2 * variance) if is_estimated else square

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
            self.beyond[place] = self.beyond[place] + 1 if crossed[place] else 0
        self.level = 2 if self.beyond[1] >= patience[1] else 1 if self.beyond[0] >= patience[0] else 0
