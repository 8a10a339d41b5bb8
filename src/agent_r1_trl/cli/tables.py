"""Tables of an evaluation on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from agent_r1_trl.evaluation.comparison import MetricChange
from agent_r1_trl.evaluation.result import EvaluationResult, interval_text, number_text
from agent_r1_trl.safe_text import shown


def new_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], num_left: int = 1) -> Table:
    """A table in the style of all; texts are shown as they are, not as markup, and all but the first are numbers."""
    table = Table(title=Text(shown(title)) if title else None, box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right")
    for line in lines:
        table.add_row(*(Text(shown(cell)) for cell in line))
    return table


def result_table(result: EvaluationResult, title: str = "") -> Table:
    """A table with one line per metric and its 95% interval."""
    intervals = result.intervals
    lines = [[name, number_text(value), interval_text(intervals[name])] for name, value in result.metrics.items()]
    return new_table(title, ("metric", "value", "95% interval"), lines)


def changes_table(changes: Mapping[str, MetricChange], title: str) -> Table:
    """The change of each metric from A to B."""
    headings = ("metric", "A", "B", "change", "95% interval", "higher", "lower", "equal")
    lines = [
        [name, number_text(one.before), number_text(one.after), number_text(one.after - one.before, "+"),
         interval_text((one.low, one.high), "+"), *map(str, one.counts)]
        for name, one in changes.items()
    ]  # fmt: skip
    return new_table(title, headings, lines)
