"""The lines of a run in a terminal, as functions of its numbers: a table, curves, a bar.

step  reward  exact match  entropy  turns  call errors  taught  s/step
  11   +0.52         0.76    0.034    3.1         0.0%     62%     3.3
  12   +0.72         0.86    0.040    3.2         0.0%     41%     3.4

reward      ▁▂▅▄▅▄▆█ -0.38 to +0.72
exact match ▁▂▅▄▅▄▆█ 0.31 to 0.86
entropy     ▆█▃▅▂▂▁▅ 0.034 to 0.051
step 13/65 ━━━━────────────── 18%  0:00:44  eta 0:03:12
  rollout 37 of 128 done, 3 waiting for search, longest 12 s
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from rich.text import Text

from agent_r1_trl.trajectory import own_numbers

TAUGHT = "taught"
"""Share of the groups that taught something: `group/taught_share`."""
MAX_ROWS, MAX_SPARK, MAX_LABEL = 20, 64, 11
"""Bounds of a table's rows and of the characters of a sparkline and of the label of a number of the user's own."""


class Metric(NamedTuple):
    """A column of the table."""

    name: str
    label: str
    format: str
    is_wide: bool = False
    """Whether it is left out where the columns are too wide for the terminal, the last one first."""


INFO = "env/"
"""Beginning of the logged names of numbers in `Trajectory.info`."""
SCORES = ("env/em", "env/success", "sampling/pass_rate")
"""The first of these that is logged has a column."""
METRICS = (
    Metric("reward", "reward", "+.2f"),
    Metric("env/em", "exact match", ".2f"),
    Metric("env/success", "success", ".2f"),
    Metric("sampling/pass_rate", "pass rate", ".2f"),
    Metric("entropy", "entropy", ".3f"),
    Metric("rollout/turns", "turns", ".1f", True),
    Metric("tools/call_error_share", "call errors", ".1%", True),
    Metric(TAUGHT, "taught", ".0%", True),
    Metric("step_time", "s/step", ".1f", True),
)
NUM_SPARKS = 3
"""The first columns, of which there is a sparkline."""
BLUE = "color(32)"
BLOCKS, BLOCKS_ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"

Row = Mapping[str, float]
"""Metric -> value, and `step`."""
HEADLINE = {
    "reward": "reward",
    "sampling/pass_rate": "pass rate",
    "env/em": "exact match",
    "env/success": "success",
    "rollout/turns": "turns",
    "rollout/tool_calls": "calls",
    "tools/call_error_share": "call errors",
    TAUGHT: "taught",
    "entropy": "entropy",
    "filter/kept_share": "kept",
    "filter/skipped_steps": "skipped steps",
}
"""Logged metric -> its label on a plain line."""


def numbers_of(logs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The entries of a log that are numbers."""
    return ((name, value) for name, value in logs.items() if isinstance(value, int | float))


def headline_of(logs: dict[str, Any]) -> str:
    """The metrics of a plain line, as text."""
    known = {label: logs[name] for name, label in HEADLINE.items() if isinstance(logs.get(name), int | float)}
    own = {name: logs[INFO + name] for name in own_numbers(_names_of_info(logs))}
    return "  ".join(f"{label} {float(value):.3g}" for label, value in {**known, **own}.items())


def _names_of_info(logs: Mapping[str, Any]) -> Iterator[str]:
    """Names of the numbers that environments have put into `Trajectory.info`."""
    return (name.removeprefix(INFO) for name, _ in numbers_of(logs) if name.startswith(INFO))


def row_of(logs: Mapping[str, Any], *, has_critic: bool = False) -> dict[str, float]:
    """The numbers of a log that are shown; with a critic, groups are not what teaches.

    >>> row_of({"reward": 0.5, "group/zero_variance_share": 0.25, "loss": 1.0, "epoch": 0.1})
    {'reward': 0.5, 'taught': 0.75}
    """
    flat = logs.get("group/zero_variance_share", logs.get("frac_reward_zero_std"))
    taught = logs.get("group/taught_share", None if flat is None else 1.0 - flat)  # runs of old have no share
    logs = logs if taught is None or has_critic else {**logs, TAUGHT: taught}
    own = [INFO + name for name in own_numbers(_names_of_info(logs))]
    names = ("step", *(metric.name for metric in METRICS), *own)
    return {name: float(logs[name]) for name in names if isinstance(logs.get(name), int | float)}


def shown_metrics(rows: Sequence[Row], width: int) -> list[Metric]:
    """The columns for these rows; `success` stands for a score before the first of them.

    Numbers of the user's own stand behind the score. Columns that do not fit are left out, the last one first.
    """
    own = own_numbers(dict.fromkeys(name for row in rows for name in _names_of_info(row)))
    of_user = [Metric(INFO + name, name[:MAX_LABEL], ".2f", index > 0) for index, name in enumerate(own)]
    behind = next(place for place, metric in enumerate(METRICS) if metric.name == "entropy")
    score = next((name for name in SCORES if any(name in row for row in rows)), None if rows else SCORES[1])
    is_flat = bool(rows) and not any(TAUGHT in row for row in rows)
    shown = [
        metric
        for metric in (*METRICS[:behind], *of_user, *METRICS[behind:])
        if (metric.name not in SCORES or metric.name == score) and not (metric.name == TAUGHT and is_flat)
    ]
    for metric in reversed(shown):
        if metric.is_wide and len(table([], shown)[0]) >= width:
            shown.remove(metric)
    return shown


def table(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Text]:
    """A header, and a line for each row."""
    cells = [["step", *(metric.label for metric in metrics)]]
    for row in rows:
        cells.append([f"{row.get('step', 0):.0f}", *(_cell(row.get(each.name), each) for each in metrics)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(line, widths, strict=True)) for line in cells]
    return [Text(line, style="" if index else "bold") for index, line in enumerate(lines)]


def _cell(value: float | None, metric: Metric) -> str:
    return "-" if value is None or math.isnan(value) else format(value, metric.format)


def sparks(rows: Sequence[Row], metrics: Sequence[Metric], width: int, *, is_ascii: bool = False) -> list[Text]:
    """A line for each of the first metrics: its name, the curve, the least and the largest value."""
    lines = []
    for metric in metrics[:NUM_SPARKS]:
        values = [value for row in rows if math.isfinite(value := row.get(metric.name, math.nan))]
        least, most = (_cell(end(values) if values else None, metric) for end in (min, max))
        span = least if least == most else f"{least} to {most}"
        curve = sparkline(values, min(MAX_SPARK, width - 30), BLOCKS_ASCII if is_ascii else BLOCKS)
        lines.append(Text.assemble(f"{metric.label:<11} ", (curve, BLUE), f" {span}"))
    return lines


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """A curve of at most `width` characters, from the least value to the largest; a flat one is at half height.

    >>> sparkline([0, 1, 2, 3], 8), sparkline([0, 2, 4, 6], 2), sparkline([5, 5], 8), sparkline([], 8)
    ('▁▃▆█', '▂▇', '▅▅', '')
    """
    num = max(0, min(width, len(values)))
    means = [
        statistics.fmean(values[index * len(values) // num : (index + 1) * len(values) // num]) for index in range(num)
    ]
    least, spread = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    shares = [(mean - least) / spread if spread else 0.5 for mean in means]
    return "".join(levels[round(share * (len(levels) - 1))] for share in shares)


def progress_line(
    label: str, done: int, total: int, seconds: float, left_s: float | None, width: int, *, is_ascii: bool = False
) -> Text:
    """How far it has come, since when, and how long it will take (`left_s`, None if nobody knows)."""
    share, size = done / max(1, total), 24 if width >= 100 else 16 if width >= 60 else 8
    full, rest = "#-" if is_ascii else "━─"
    num = min(size, int(share * size))
    eta = "-:--:--" if left_s is None else _clock(left_s)
    return Text.assemble(
        f"{label} {done}/{total} ", (full * num, BLUE), (rest * (size - num), "dim"), f" {share:.0%}",
        f"  {_clock(seconds)}  eta {eta}",
    )  # fmt: skip


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def seconds_left(num_done: int, num_left: int, seconds: float, idle_s: float) -> float | None:
    """How long the rest will take at the mean pace so far; None before the first is done.

    Args:
        num_done: of this process, in `seconds`.
        num_left: what is to be done.
        seconds: since the beginning.
        idle_s: the part of them since the last one was done. No more than one can be in it: it may be an evaluation.

    >>> seconds_left(2, 8, 610.0, 10.0), seconds_left(2, 8, 2000.0, 1400.0), seconds_left(0, 10, 60.0, 60.0)
    (2390.0, 2100.0, None)
    """
    pace = (seconds - idle_s) / max(1, num_done)
    return max(0.0, pace * num_left - min(idle_s, pace)) if num_done else None
