"""Evaluation results as tables, and `agent-r1-trl eval compare A B`: is B better than A on the same examples?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from agent_r1_trl.cli.console import table_console
from agent_r1_trl.cli.errors import PlainParser, UsageError
from agent_r1_trl.evaluation import EvaluationResult
from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, MetricChange, compare, read_examples
from agent_r1_trl.evaluation.result import interval_text, number_text
from agent_r1_trl.safe_text import shown

ABOUT = """\
Compare two evaluations of the same examples, by the directories that eval wrote (output_dir, or the folder of one row
in it). Each metric's change from A to B has a 95% interval (paired bootstrap over examples). Rows of several are
paired by data set and method.
"""


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
    headings = ("metric", "A", "B", "change", "95% interval", "better", "worse", "equal")
    lines = [
        [name, number_text(one.before), number_text(one.after), number_text(one.after - one.before, "+"),
         interval_text((one.low, one.high), "+"), *map(str, one.counts)]
        for name, one in changes.items()
    ]  # fmt: skip
    return new_table(title, headings, lines)


def compare_command(argv: Sequence[str]) -> int:
    """`eval compare`: print a table for each pair of rows; returns the exit code."""
    parser = PlainParser("agent-r1-trl eval compare", ABOUT)
    for name in ("A", "B"):
        parser.add_argument(name, help="Directory that eval wrote.")
    parser.add_argument(
        "--list",
        choices=("worse", "better"),
        help="Also name the examples on which B is worse, or better, than A in the first metric.",
    )
    parser.add_argument("--metric", nargs="+", default=[], metavar="NAME", help="Only these; by default all of both.")
    arguments = parser.read(argv)
    first, second = (_rows(Path(folder)) for folder in (arguments.A, arguments.B))
    if len(first) == len(second) == 1:
        pairs = [(*first.values(), *second.values())]
    else:
        pairs = [(first[name], second[name]) for name in first if name in second]
    if not pairs:
        raise UsageError(
            f"{arguments.A} and {arguments.B}: no row is in both. Pass the folders of two rows, such as "
            f"{next(iter(first.values()))} {next(iter(second.values()))}."
        )
    console = table_console()
    for one, two in pairs:
        try:
            before, after = read_examples(one / EXAMPLES_FILE), read_examples(two / EXAMPLES_FILE)
            changes = compare(before, after)
        except ValueError as error:
            raise UsageError(f"{one} and {two}: {error}") from error
        unknown = [name for name in arguments.metric if name not in changes]
        if unknown:
            raise UsageError(f"--metric {unknown[0]}: not in both. Pass some of {', '.join(changes)}.")
        chosen = {name: changes[name] for name in arguments.metric or changes}
        console.print(changes_table(chosen, f"A: {one}, B: {two}, {before.num_examples} examples"))
        if arguments.list:
            console.print(*_list(arguments.list, *next(iter(chosen.items()))), sep="\n")
    return 0


def _rows(folder: Path) -> dict[tuple[str, str], Path]:
    """(method, data set) -> folder."""
    try:
        content = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        if "rows" not in content:
            return {(str(content.get("method")), str(content.get("dataset"))): folder}
        return {(row["method"], row["dataset"]): folder / row["dataset"] / row["method"] for row in content["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder}: holds no evaluation ({error}). Pass the output_dir of agent-r1-trl eval, or the folder of one "
            "of its rows."
        ) from error


def _list(side: str, metric: str, change: MetricChange) -> list[str | Table]:
    """How many examples are worse, or better, in B than in A, and which."""
    sign = -1 if side == "worse" else 1
    found = {name: pair for name, pair in change.pairs.items() if sign * (pair[1] - pair[0]) > 0}
    ordered = sorted(found.items(), key=lambda item: sign * (item[1][0] - item[1][1]))
    title = f"{len(found)} of {len(change.pairs)} examples are {side} in {metric}"
    return [title, new_table("", ("example", "A", "B"), [[name, *map(number_text, pair)] for name, pair in ordered])]
