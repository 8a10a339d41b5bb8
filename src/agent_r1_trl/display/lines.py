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
    numbers = dict(numbers_of(logs))
    shown = {label: numbers[name] for name, label in HEADLINE.items() if name in numbers}
    shown |= {name: numbers[INFO + name] for name in own_numbers(_names_of_info(logs))}
    return "  ".join(f"{label} {float(value):.3g}" for label, value in shown.items())


def _names_of_info(logs: Mapping[str, Any]) -> Iterator[str]:
    """Names of the numbers that environments have put into `Trajectory.info`."""
    return (name.removeprefix(INFO) for name, _ in numbers_of(logs) if name.startswith(INFO))


def row_of(logs: Mapping[str, Any], *, has_critic: bool = False) -> dict[str, float]:
    """The numbers of a log that are shown; with a critic, groups are not what teaches.

    >>> row_of({"reward": 0.5, "group/zero_variance_share": 0.25, "loss": 1.0, "epoch": 0.1})
    {'reward': 0.5, 'taught': 0.75}
    """
    numbers = dict(numbers_of(logs))
    taught = _taught_share(logs)
    if isinstance(taught, int | float) and not has_critic:
        numbers[TAUGHT] = taught
    own = [INFO + name for name in own_numbers(_names_of_info(logs))]
    names = ("step", *(metric.name for metric in METRICS), *own)
    return {name: float(numbers[name]) for name in names if name in numbers}


def _taught_share(logs: Mapping[str, Any]) -> float | None:
    """Share of the groups that taught something; older runs logged the share of those that did not."""
    flat = logs.get("group/zero_variance_share", logs.get("frac_reward_zero_std"))
    return logs.get("group/taught_share", None if flat is None else 1.0 - flat)


def shown_metrics(rows: Sequence[Row], width: int) -> list[Metric]:
    """The columns for these rows; `success` stands for a score before the first of them.

    Numbers of the user's own stand behind the score. Columns that do not fit are left out, the last one first.
    """
    own = own_numbers(dict.fromkeys(name for row in rows for name in _names_of_info(row)))
    of_user = [Metric(INFO + name, name[:MAX_LABEL], ".2f", index > 0) for index, name in enumerate(own)]
    behind = next(place for place, metric in enumerate(METRICS) if metric.name == "entropy")
    logged = {name for row in rows for name in row}
    if rows:
        hidden = {TAUGHT} - logged
        score = next((name for name in SCORES if name in logged), None)
    else:
        hidden = set()
        score = SCORES[1]
    hidden |= {name for name in SCORES if name != score}
    candidates = (*METRICS[:behind], *of_user, *METRICS[behind:])
    shown = [metric for metric in candidates if metric.name not in hidden]
    for metric in reversed(shown):
        if metric.is_wide and len(table([], shown)[0]) >= width:
            shown.remove(metric)
    return shown


def table(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Text]:
    """A header, and a line for each row."""
    lines = [["step", *(metric.label for metric in metrics)]]
    for row in rows:
        values = [_cell(row.get(metric.name), metric) for metric in metrics]
        lines.append([f"{row.get('step', 0):.0f}", *values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for index, cells in enumerate(lines):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        texts.append(Text("  ".join(padded), style="bold" if index == 0 else ""))
    return texts


def _cell(value: float | None, metric: Metric) -> str:
    return "-" if value is None or math.isnan(value) else format(value, metric.format)


def sparks(rows: Sequence[Row], metrics: Sequence[Metric], width: int, *, is_ascii: bool = False) -> list[Text]:
    """A line for each of the first metrics: its name, the curve, the least and the largest value."""
    lines = []
    for metric in metrics[:NUM_SPARKS]:
        values = [row.get(metric.name, math.nan) for row in rows]
        values = [value for value in values if math.isfinite(value)]
        least = _cell(min(values, default=None), metric)
        most = _cell(max(values, default=None), metric)
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
    least = min(values, default=0.0)
    spread = max(values, default=0.0) - least
    curve = ""
    for index in range(num):
        start, end = index * len(values) // num, (index + 1) * len(values) // num
        height = (statistics.fmean(values[start:end]) - least) / spread if spread else 0.5
        curve += levels[round(height * (len(levels) - 1))]
    return curve


def progress_line(
    label: str, done: int, total: int, seconds: float, left_s: float | None, width: int, *, is_ascii: bool = False
) -> Text:
    """How far it has come, since when, and how long it will take (`left_s`, None if nobody knows)."""
    share = done / max(1, total)
    if width >= 100:
        size = 24
    elif width >= 60:
        size = 16
    else:
        size = 8
    num = min(size, int(share * size))
    full, rest = "#-" if is_ascii else "━─"
    eta = "-:--:--" if left_s is None else _clock(left_s)
    return Text.assemble(
        f"{label} {done}/{total} ",
        (full * num, BLUE),
        (rest * (size - num), "dim"),
        f" {share:.0%}",
        f"  {_clock(seconds)}  eta {eta}",
    )


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
