"""Evaluation results as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent_r1_trl.evaluation import EvaluationResult, EvaluationTable, difference
from agent_r1_trl.safe_text import shown

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

LABELS = {
    "exact_match": "exact match",
    "f1": "F1",
    "valid_answer_rate": "valid answers",
    "turns": "turns",
    "tool_calls": "tool calls",
    "tool_error_rate": "failed tool calls",
    "truncated_rate": "truncated",
    "reward": "reward",
    "completion_tokens": "tokens",
    "input_tokens": "tokens read",
    "sampled_tokens": "tokens sampled",
    "cost_per_1000": "cost of 1000",
    "solved_always": "solved every time",
    "solved_never": "never solved",
    "infrastructure_failure_rate": "infrastructure failures",
}
SHARES = frozenset(
    ("exact_match", "f1", "valid_answer_rate", "tool_error_rate", "truncated_rate", "infrastructure_failure_rate")
)


def result_table(result: EvaluationResult, title: str = "") -> Table:
    """A table with one line per metric and its 95% interval."""
    table = new_table(title)
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95% interval", justify="right", style="dim")
    for name in _order(result.metrics):
        table.add_row(
            metric_label(name), number_text(name, result.metrics[name]), interval_text(name, result.intervals[name])
        )
    return table


def rows_table(table: EvaluationTable, title: str = "") -> Table:
    """A table with a line for each method on each data set."""
    from rich.text import Text

    shape = new_table(title)
    headings, lines = table.cells()
    for index, heading in enumerate(headings):
        shape.add_column(heading, justify="left" if index < 2 else "right")
    for line in lines:
        shape.add_row(*(Text(shown(cell)) for cell in line))
    return shape


def comparison_table(
    before: EvaluationResult,
    after: EvaluationResult,
    *,
    names: tuple[str, str] = ("before", "after"),
    metrics: Sequence[str] | None = None,
    title: str = "",
) -> Table:
    """Two results side by side; the change has a paired interval if both are on the same examples.

    Args:
        before: the first result.
        after: the second result.
        names: headings of the two.
        metrics: the metrics to show; None: all.
        title: of the table.
    """
    table = new_table(title)
    table.add_column("metric")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("95% interval", justify="right", style="dim")
    is_paired = before.example_ids == after.example_ids
    changes = difference(before, after) if is_paired else {}
    table.add_column("change", justify="right")
    if is_paired:
        table.add_column("95% interval", justify="right", style="dim")
    for name in _order({**before.metrics, **after.metrics}):
        if metrics is not None and name not in metrics:
            continue
        cells: list[RenderableType] = [metric_label(name)]
        for result in (before, after):
            value = result.metrics.get(name, math.nan)
            cells += [number_text(name, value), interval_text(name, result.intervals.get(name, (math.nan, math.nan)))]
        change = after.metrics.get(name, math.nan) - before.metrics.get(name, math.nan)
        cells.append(number_text(name, change, sign=True))
        if is_paired:
            cells.append(interval_text(name, changes[name][1:], sign=True) if name in changes else "")
        table.add_row(*cells, style="bold" if name == "exact_match" else None)
    return table


def new_table(title: str) -> Table:
    """An empty table in the style of all."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(shown(title)) if title else None, box=box.SIMPLE_HEAD)


def _order(metrics: Mapping[str, float]) -> list[str]:
    """Names of the metrics: those of `LABELS` in their order, then the environment's own."""
    known = [name for name in LABELS if name in metrics]
    return [*known, *(name for name in metrics if name not in LABELS)]


def metric_label(name: str) -> Text:
    """The environment names its own metrics, so they are shown as they are, not as markup."""
    from rich.text import Text

    return Text(LABELS.get(name) or shown(name))


def number_text(name: str, value: float, *, sign: bool = False) -> str:
    """A metric's value; "-" if there is none."""
    if not math.isfinite(value):
        return "-"
    plus = "+" if sign else ""
    return f"{value:{plus}.3f}" if name in SHARES or abs(value) < 100 else f"{value:{plus}.0f}"


def interval_text(name: str, bounds: tuple[float, ...], *, sign: bool = False) -> str:
    """A metric's interval; "" if there is none."""
    if not all(map(math.isfinite, bounds)):
        return ""
    return "[" + ", ".join(number_text(name, value, sign=sign) for value in bounds) + "]"
