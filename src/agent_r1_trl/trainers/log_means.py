"""From the values of a metric to the number that is logged.

TRL logs the plain mean of the values that a metric got since the last log. That is wrong for three kinds of metrics:

- Means over tokens. Micro-batches differ in tokens, so each value carries their number (`TokenMean`), and the log gets
  the mean over all tokens.
- Counts that a rollout without any leaves out, such as the failures of one kind. Left out, they would be averaged over
  the other rollouts alone. Here they are 0 (`fill_absent`).
- Totals since the run began (`RunningTotal`), such as the calls of a judge: the log gets the last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from agent_r1_trl.rewards.function import RunningTotal


class TokenMean(float):
    """A mean over tokens, and over how many. Trainers and callbacks may log one.

    For example, `add_metrics({"mine": TokenMean(mean, num_tokens)})`.

    >>> logged_mean([TokenMean(1.0, 3), TokenMean(5.0, 1)])
    2.0
    """

    num_tokens: float
    """Tokens of all ranks that it is the mean of."""

    def __new__(cls, mean: float, num_tokens: float) -> TokenMean:
        """The mean; NaN, which logs leave out, where there are no tokens."""
        item = super().__new__(cls, mean if num_tokens else math.nan)
        item.num_tokens = num_tokens
        return item


def logged_mean(values: Sequence[float]) -> float:
    """The mean of a metric's values, over tokens if all of them are means over tokens; NaN counts nowhere.

    Of totals it is the last one.

    >>> logged_mean([RunningTotal(2.0), RunningTotal(5.0)])
    5.0
    """
    valid = [value for value in values if not math.isnan(value)]
    if not valid:
        return math.nan
    if isinstance(valid[-1], RunningTotal):
        return float(valid[-1])
    weights = [value.num_tokens if isinstance(value, TokenMean) else None for value in valid]
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(valid):
        return math.fsum(valid) / len(valid)
    return math.fsum(value * weight for value, weight in zip(valid, known, strict=True)) / math.fsum(known)


# -------------------------------------------------------------------- TRL's means over the tokens of a micro-batch


_TOKEN_MEANS = re.compile(r"entropy|kl|clip_ratio/.*|cispo_clip_ratio|vespo/.*")
_EXTREMES = re.compile(r"clip_ratio/.*_(min|max)")
"""The ones above that are the smallest or largest mean of a row."""


def weigh_token_means(metrics: Mapping[str, list[float]], num_tokens: float, *, in_rewards: bool) -> None:
    """Give the values that TRL has logged of a micro-batch the number of its tokens.

    Of a micro-batch without tokens in the loss TRL wrote 0: that becomes NaN, which logs leave out.

    Args:
        metrics: TRL's lists of values.
        num_tokens: tokens in the loss, of all ranks.
        in_rewards: the KL term is in the rewards, so that `kl` is not a mean over a micro-batch.
    """
    for name, values in metrics.items():
        if not values or not _TOKEN_MEANS.fullmatch(name) or (in_rewards and name == "kl"):
            continue
        if isinstance(values[-1], TokenMean):  # of an earlier micro-batch
            continue
        if not _EXTREMES.fullmatch(name):
            values[-1] = TokenMean(values[-1], num_tokens)
        elif not num_tokens:
            values[-1] = math.nan


# -------------------------------------------------------------------- metrics that are 0 where they are absent


ROLLOUT = "rollout/turns"
"""A metric that every rollout has."""
BASELINE = "reward/process"
"""One that every rollout has, and that is NaN where no trajectory is in the baseline."""
ABSENT: tuple[tuple[re.Pattern[str], float, str], ...] = (
    (re.compile(r"tools/call_errors/.+"), 0.0, ROLLOUT),
    (re.compile(r"tools/.+/calls"), 0.0, ROLLOUT),
    (re.compile(r"rollout/summaries"), 0.0, ROLLOUT),
    (re.compile(r"rollout/rows"), 1.0, ROLLOUT),
    (re.compile(r"reward_parts/.+"), 0.0, BASELINE),
)
"""Names of metrics, what one is for a rollout that does not log it, and which metric says how many rollouts have it.

Means over things of which such a rollout has none (seconds of a call, `env/*`) are not here: they are unknown.
"""


def fill_absent(metrics: dict[str, list[float]], seen: Iterable[str]) -> None:
    """Add the values of the rollouts that did not log a metric.

    Args:
        metrics: the values since the last log.
        seen: names of metrics that were logged before.
    """
    for name in [*dict.fromkeys([*metrics, *seen])]:
        for pattern, value, basis in ABSENT:
            if not pattern.fullmatch(name):
                continue
            num_rollouts = sum(not math.isnan(known) for known in metrics.get(basis, ()))
            values = list(metrics.get(name, ()))
            missing = num_rollouts - len(values)
            if missing > 0:
                metrics[name] = [*values, *[value] * missing]


class SeenMetrics:
    """The metrics of `ABSENT` that a run has logged. A resumed run knows them from its `log_history`."""

    def __init__(self) -> None:
        self._history: Sequence[Mapping[str, object]] = ()
        self._num_read = 0
        self._names: set[str] = set()

    def read(self, history: Sequence[Mapping[str, object]], prefix: str) -> list[str]:
        """The names, without their prefix, that stand in the log of a run so far."""
        if history is not self._history or len(history) < self._num_read:  # another run, or one that was rolled back
            self._history = history
            self._num_read = 0
            self._names = set()
        for entry in history[self._num_read :]:
            self._names.update(entry)
        self._num_read = len(history)
        patterns = [pattern for pattern, *_ in ABSENT]
        seen = []
        for full_name in self._names:
            name = full_name.removeprefix(prefix)
            if full_name.startswith(prefix) and any(pattern.fullmatch(name) for pattern in patterns):
                seen.append(name)
        return sorted(seen)


def complete(metrics: dict[str, list[float]], seen: Iterable[str]) -> None:
    """Make of TRL's lists of values, since the last log, those whose plain mean is to be logged."""
    fill_absent(metrics, seen)
    for name, values in metrics.items():
        if has_own_mean(values):
            metrics[name] = [logged_mean(values)]


def has_own_mean(values: Iterable[float]) -> bool:
    """Whether what is logged of these values is not their plain mean."""
    return any(isinstance(value, TokenMean | RunningTotal) for value in values)
