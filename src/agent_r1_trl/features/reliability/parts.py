"""The parts of the data: metrics of each, and a warning where one falls while the mean rises (`watch_by`)."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, NamedTuple

from accelerate.utils import gather_object

from agent_r1_trl.environments.data_files import tag_of, tags_of
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.update.entries import Inputs

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows

logger = logging.getLogger(__name__)

NUM_ERRORS = 3.0
"""Standard errors by which the reward of a part has fallen for certain."""
MIN_ROWS = 8
"""Rows of a part at the beginning of a run, and as many now, before it is judged."""
MAX_PARTS = 50
"""Values of a column that is watched; one with more is no kind of question."""


class RowResult(NamedTuple):
    """One row of the data set in one rollout."""

    tag: str
    reward: float
    """Mean of its trajectories that are in the baseline."""
    solved: float
    """The share of them that is solved."""


class Fall(NamedTuple):
    """A part whose reward has fallen."""

    tag: str
    before: float
    now: float


class PartWatch(RolloutCallback):
    """Metrics of each part of the data, and a warning where a part falls while the mean rises.

    Args:
        column: its values are the parts; `a.b` is the key `b` of the column `a`.
    """

    name = "parts"

    def __init__(self, column: str) -> None:
        self.column = column
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run of the same trainer."""
        self.results: list[RowResult] = []
        """The rows of all rollouts, in the order of time."""
        self._warned_of: set[str] = set()

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Take the rollout in, log the metrics of its parts, and warn. All ranks must call it."""
        own = [
            (tag_of(row, self.column), item.total_reward if item.in_baseline else math.nan, float(item.is_solved))
            for row, item in zip(batch.rows, batch.trajectories, strict=True)
        ]
        rows = row_results(gather_object(own), batch.position.group_size)
        self.trainer.add_metrics(part_metrics(rows))
        self.results += rows
        for fall in find_falls(self.results):
            self._warn(fall)

    def _warn(self, fall: Fall) -> None:
        if fall.tag not in self._warned_of and is_main_process():
            part = f"{self.column}={shown(fall.tag[:40])}"
            logger.warning(
                "%s falls while the mean rises: its reward was %.2f at the beginning and is now %.2f. Sample more of "
                "its rows, or set more prompts per step or a lower learning_rate. Reported once; the metrics by/* go "
                "on.",
                part,
                fall.before,
                fall.now,
            )
        self._warned_of.add(fall.tag)


def check_parts(rows: TrainRows, column: str) -> None:
    """Refuse a column that no row has, or that has too many values; rows of an environment are not looked at.

    Raises:
        ValueError: names the setting, the column and the fix.
    """
    if not isinstance(rows, Sized):  # none, or streamed
        return
    values = {*tags_of(rows, column, flag="watch_by")}  # type: ignore[arg-type]
    if len(values) > MAX_PARTS:
        raise ValueError(
            f"watch_by={column!r}: the column has {len(values)} values, and at most {MAX_PARTS} parts are watched. "
            "Name a column with fewer, such as the kind of question."
        )


def row_results(trajectories: Sequence[tuple[str, float, float]], group_size: int) -> list[RowResult]:
    """The results of the rows of a rollout, without rows of which nothing is in the baseline.

    Args:
        trajectories: tag, reward (NaN outside the baseline) and whether it is solved; those of a row are consecutive.
        group_size: trajectories of one row.

    >>> row_results([("a", 1.0, 1.0), ("a", 0.0, 0.0), ("b", math.nan, 0.0), ("b", math.nan, 0.0)], 2)
    [RowResult(tag='a', reward=0.5, solved=0.5)]
    """
    results = []
    for start in range(0, len(trajectories), group_size):
        group = [item for item in trajectories[start : start + group_size] if not math.isnan(item[1])]
        if group:
            tags, rewards, solved = zip(*group, strict=True)
            results.append(RowResult(tags[0], statistics.fmean(rewards), statistics.fmean(solved)))
    return results


def part_metrics(rows: Sequence[RowResult]) -> dict[str, float]:
    """`by/TAG/reward` and `by/TAG/solved`: means over the rows of each part."""
    metrics = {}
    for tag in sorted({row.tag for row in rows})[:MAX_PARTS]:
        of_part = [row for row in rows if row.tag == tag]
        metrics[f"by/{tag}/reward"] = statistics.fmean(row.reward for row in of_part)
        metrics[f"by/{tag}/solved"] = statistics.fmean(row.solved for row in of_part)
    return metrics


def find_falls(rows: Sequence[RowResult]) -> list[Fall]:
    """The parts whose reward has fallen from the first third of their rows to the last, if the mean has not.

    Args:
        rows: of a whole run, in the order of time.
    """
    before, now = _ends([row.reward for row in rows])
    if len(before) < MIN_ROWS or statistics.fmean(now) < statistics.fmean(before):
        return []
    falls = []
    for tag in sorted({row.tag for row in rows})[:MAX_PARTS]:
        first, last = _ends([row.reward for row in rows if row.tag == tag])
        if len(first) < MIN_ROWS:
            continue
        fall = statistics.fmean(first) - statistics.fmean(last)
        error = math.hypot(*(statistics.stdev(part) / math.sqrt(len(part)) for part in (first, last)))
        if fall > NUM_ERRORS * error and fall > 0:
            falls.append(Fall(tag, statistics.fmean(first), statistics.fmean(last)))
    return falls


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first third and the last."""
    size = len(values) // 3
    return values[:size], values[len(values) - size :]
