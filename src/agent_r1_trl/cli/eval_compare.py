"""`agent-r1-trl eval compare A B`: is B better than A on the same examples?"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1_trl.cli.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from agent_r1_trl.evaluation.comparison import Change

HELP = """\
usage: agent-r1-trl eval compare A B [--list worse|better] [--metric NAME ...]

Compare two evaluations of the same examples, by the directories that eval wrote (output_dir, or the folder of one row
in it). Each metric's change from A to B has a 95% interval (paired bootstrap over examples) and the p-value of a
two-sided permutation test. Rows of several are paired by data set and method.

  --list worse|better
      Also name the examples on which B is worse, or better, than A in the first metric, the largest change first.
  --metric NAME ...
      Only these metrics. [default: all that both have]
"""
EXAMPLES_FILE = "examples.jsonl"


def run(argv: Sequence[str]) -> int:
    """Print a table for each pair of rows; returns the exit code."""
    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    folders, metrics, side = _read(argv)
    first, second = (_rows(folder) for folder in folders)
    if len(first) == len(second) == 1:
        pairs = [(*first.values(), *second.values())]
    else:
        pairs = [(first[name], second[name]) for name in first if name in second]
    if not pairs:
        held = [", ".join(" of ".join(name) for name in rows) for rows in (first, second)]
        example = f"{next(iter(first.values()))} {next(iter(second.values()))}"
        raise UsageError(
            f"{folders[0]} holds {held[0]} and {folders[1]} {held[1]}: no row is in both. Pass the folders of two "
            f"rows, such as {example}."
        )
    from agent_r1_trl.cli.console import table_console
    from agent_r1_trl.evaluation.comparison import compare, read_examples

    console = table_console()
    for one, two in pairs:
        try:
            before, after = read_examples(one / EXAMPLES_FILE), read_examples(two / EXAMPLES_FILE)
            changes = compare(before, after)
        except ValueError as error:
            raise UsageError(f"{one} and {two}: {error}") from error
        unknown = [name for name in metrics if name not in changes]
        if unknown:
            raise UsageError(f"--metric {unknown[0]}: not in both. Pass some of {', '.join(changes)}.")
        chosen = {name: changes[name] for name in metrics or changes}
        console.print(_table(chosen, f"A: {one}, B: {two}, {before.num_examples} examples"))
        if side:
            console.print(*_list(side, *next(iter(chosen.items()))), sep="\n")
    return 0


def _read(argv: Sequence[str]) -> tuple[list[Path], list[str], str | None]:
    """The two directories, the metrics, and the side whose examples are listed."""
    argv, side = list(argv), None
    if "--list" in argv:
        at = argv.index("--list")
        side = next(iter(argv[at + 1 : at + 2]), "")
        if side not in ("worse", "better"):
            raise UsageError(f"--list {side!r}: is none of 'worse', 'better'. Name one of them.")
        del argv[at : at + 2]
    end = argv.index("--metric") if "--metric" in argv else len(argv)
    places, metrics = list(argv[:end]), list(argv[end + 1 :])
    unknown = [item for item in [*places, *metrics] if item.startswith("--")]
    if unknown:
        raise UsageError(f"{unknown[0]}: there is no such option. agent-r1-trl eval compare --help lists all options.")
    if len(places) != 2:
        raise UsageError(f"eval compare takes two directories, not {len(places)}. Pass two that eval wrote.")
    return [Path(place) for place in places], metrics, side


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


def _list(side: str, metric: str, change: Change) -> list[str | Table]:
    """How many examples are worse, or better, in B than in A, and which."""
    from rich.text import Text

    from agent_r1_trl.cli.tables import metric_label, new_table, number_text
    from agent_r1_trl.safe_text import shown

    sign = -1 if side == "worse" else 1
    found = {name: pair for name, pair in change.pairs.items() if sign * (pair[1] - pair[0]) > 0}
    title = f"{len(found)} of {len(change.pairs)} examples are {side} in {metric_label(metric)}"
    table = new_table("")
    table.add_column("example")
    for heading in ("A", "B"):
        table.add_column(heading, justify="right")
    for name, pair in sorted(found.items(), key=lambda item: sign * (item[1][0] - item[1][1])):
        table.add_row(Text(shown(name)), *(number_text(metric, value) for value in pair))
    return [title, table] if found else [title]


def _table(changes: dict[str, Change], title: str) -> Table:
    from rich.text import Text

    from agent_r1_trl.cli.tables import interval_text, metric_label, new_table, number_text

    table = new_table(title)
    table.add_column("metric")
    for heading in ("A", "B", "change", "95% interval", "p", "better", "worse", "equal"):
        table.add_column(heading, justify="right")
    for name, change in changes.items():
        p_value = "-" if math.isnan(change.p_value) else f"{change.p_value:.4f}"
        table.add_row(
            metric_label(name),
            number_text(name, change.before),
            number_text(name, change.after),
            number_text(name, change.after - change.before, sign=True),
            interval_text(name, (change.low, change.high), sign=True),
            *(Text(text) for text in (p_value, *map(str, (change.num_better, change.num_worse, change.num_equal)))),
        )
    return table
