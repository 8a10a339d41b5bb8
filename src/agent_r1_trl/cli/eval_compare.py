"""`agent-r1-trl eval compare`: what changed between two evaluations of the same examples.

agent-r1-trl eval compare scores-before scores-after
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from agent_r1_trl.cli.errors import PlainParser, UsageError
from agent_r1_trl.cli.tables import changes_table, new_table
from agent_r1_trl.display.console import table_console
from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, MetricChange, changed_rows, compare, read_examples
from agent_r1_trl.evaluation.result import number_text
from agent_r1_trl.evaluation.table import RESULT_FILE
from agent_r1_trl.recording.lines import EVALUATION

COMMAND = "agent-r1-trl eval compare"
ABOUT = """\
Compare two evaluations of the same examples, by the directories that eval wrote (output_dir, or the folder of one row
in it). Each metric's change from A to B has a 95% interval (paired bootstrap over examples). Rows of several are
paired by data set and method.
"""


def run(argv: Sequence[str]) -> int:
    """Print a table for each pair of rows; returns the exit code."""
    parser = PlainParser(COMMAND, ABOUT)
    for name in ("A", "B"):
        parser.add_argument(name, help="Directory that eval wrote.")
    parser.add_argument(
        "--list",
        choices=("lower", "higher"),
        help="Also name the examples on which the first metric is lower, or higher, in B than in A.",
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
            before = read_examples(one / EXAMPLES_FILE)
            after = read_examples(two / EXAMPLES_FILE)
            changes = compare(before, after)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{one} and {two}: their {EXAMPLES_FILE} cannot be read ({error}). Pass directories that eval wrote, "
                "or evaluate again."
            ) from error
        except ValueError as error:
            raise UsageError(f"{one} and {two}: {error}") from error
        _warn_of_data(one, two, changed_rows(before, after))
        unknown = [name for name in arguments.metric if name not in changes]
        if unknown:
            raise UsageError(f"--metric {unknown[0]}: not in both. Pass some of {', '.join(changes)}.")
        chosen = {name: changes[name] for name in arguments.metric or changes}
        console.print(changes_table(chosen, f"A: {one}, B: {two}, {before.num_examples} examples"))
        if arguments.list:
            metric = next(iter(chosen))
            console.print(*_examples_where(arguments.list, metric, chosen[metric]), sep="\n")
    return 0


def _warn_of_data(one: Path, two: Path, changed: list[str]) -> None:
    """Say which examples are about another row of the data in the second evaluation, if there are any."""
    if changed:
        print(
            f"warning: {one} and {two}: the rows of {len(changed)} examples have the same id and another content "
            f"({changed[0]!r} first), so what differs may come from the data. Evaluate one again with the other's "
            "file, unless that is what you compare.",
            file=sys.stderr,
        )


def _rows(folder: Path) -> dict[tuple[str, str], Path]:
    """(method, data set) -> folder."""
    if not (folder / RESULT_FILE).exists() and (folder / EVALUATION / RESULT_FILE).exists():  # of a run
        folder = folder / EVALUATION
    try:
        content = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        if "rows" not in content:
            return {(str(content.get("method")), str(content.get("dataset"))): folder}
        return {(row["method"], row["dataset"]): folder / row["dataset"] / row["method"] for row in content["rows"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder}: holds no evaluation ({error}). Pass the output_dir of agent-r1-trl eval, or the folder of one "
            "of its rows."
        ) from error


def _examples_where(side: str, metric: str, change: MetricChange) -> list[str | Table]:
    """On how many examples the metric is lower, or higher, in B than in A, and on which."""
    sign = -1 if side == "lower" else 1
    found = []
    for name, (before, after) in change.pairs.items():
        moved = sign * (after - before)
        if moved > 0:
            found.append((moved, [name, number_text(before), number_text(after)]))
    found.sort(key=operator.itemgetter(0), reverse=True)
    title = f"{metric} is {side} on {len(found)} of {len(change.pairs)} examples"
    return [title, new_table("", ("example", "A", "B"), [cells for _, cells in found])]
