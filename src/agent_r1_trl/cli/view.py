"""`agent-r1-trl view`: show recorded trajectories with their masks in colour.

agent-r1-trl view outputs/my-agent --terminal --step 40 --filter failed
agent-r1-trl view outputs/my-agent --list
agent-r1-trl view outputs/my-agent --events
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agent_r1_trl.cli.errors import UsageError, explain_argparse, run_command
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import visible

if TYPE_CHECKING:
    from agent_r1_trl.recording import Record
    from agent_r1_trl.trajectory import Trajectory

COMMAND = "agent-r1-trl view"
NUM_SHOWN = 3


def _is_solved(trajectory: Trajectory) -> bool:
    score = trajectory.info.get("em")
    return bool(score) if isinstance(score, bool | int | float) else trajectory.outcome_reward > 0


FILTERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "failed": ("exact match 0, or an outcome of 0 or less", lambda item: not _is_solved(item)),
    "solved": ("all others", _is_solved),
    "truncated": ("ended by a limit", lambda item: item.stop_reason.is_truncated),
    "tool_errors": ("with a failed tool call", lambda item: any(result.is_error for result in item.tool_results)),
    "invalid": ("with an unusable turn", lambda item: any(turn.is_invalid for turn in item.turns)),
    "infrastructure": ("ended by an infrastructure failure", lambda item: item.stop_reason.is_infrastructure_failure),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith("RUN"):
            raise UsageError(f"RUN: not set. Pass the output directory of a run: {self.prog} outputs/my-agent.")
        raise UsageError(f"{explain_argparse(message)} {self.prog} --help lists the options.")


def run(argv: Sequence[str]) -> int:
    """Show the chosen trajectories; returns the exit code."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        if not unknown[0].startswith("-"):
            raise UsageError(
                f"{unknown[0]!r}: one RUN is shown at a time; the first is {arguments.run!r}. Remove one."
            )
        flags = [option for action in parser._actions for option in action.option_strings]
        raise UsageError(
            f"{unknown[0]}: there is no such option.{did_you_mean(unknown[0], flags)} {COMMAND} --help lists them all."
        )
    if arguments.events:
        sys.stdout.write(_show_events(arguments.run))
        return 0
    records = find_records(arguments)
    from agent_r1_trl.recording import render_trajectory, summary_table
    from agent_r1_trl.recording.terminal import render

    color = {"always": True, "never": False}.get(
        arguments.color, sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    if arguments.list:
        listed = records[: arguments.num]
        sys.stdout.write(render([summary_table(listed)], width=arguments.width, color=color))
        if len(listed) < len(records):
            sys.stdout.write(f"{len(listed)} of {len(records)} listed.\n")
        return 0
    shown = records if arguments.index is not None else records[: arguments.num or NUM_SHOWN]
    has_ids = not all(record.trajectory.is_hosted for record in shown)
    tokenizer = None
    if has_ids:
        tokenizer = load_tokenizer(
            arguments.tokenizer, Path(arguments.run), trust_remote_code=arguments.trust_remote_code
        )
    for record in shown:
        split = "evaluation, " if record.split == "eval" else ""
        sys.stdout.write(visible(f"{split}step {record.step}, index {record.index}, {record.path}\n"))
        sys.stdout.write(render_trajectory(record.trajectory, tokenizer, arguments.width, color=color) + "\n")
    if len(shown) < len(records):
        sys.stdout.write(f"{len(shown)} of {len(records)} shown; --num, --index, --filter and --list choose others.\n")
    if has_ids and tokenizer is None:
        sys.stdout.write("Tokens are not shown: no tokenizer in the run. Pass --tokenizer, a directory or a Hub id.\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    filters = "; ".join(f"{name}: {text}" for name, (text, _) in FILTERS.items())
    parser = _Parser(prog=COMMAND, description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="Output directory of a run, or a file of trajectories.")
    parser.add_argument("--terminal", action="store_true", help="Show on the terminal (the default).")
    parser.add_argument("--list", action="store_true", help="One line per trajectory instead of its tokens.")
    parser.add_argument("--events", action="store_true", help="What the echo guard did in this run, and why.")
    parser.add_argument("--step", type=int, help="Step to show; by default the last one recorded.")
    parser.add_argument("--index", type=int, help="Trajectory to show; by default the first ones of the step.")
    parser.add_argument("--split", choices=("train", "eval"), help="Split to show; by default train, if recorded.")
    parser.add_argument("--filter", choices=tuple(FILTERS), help=f"Show only some trajectories. {filters}.")
    parser.add_argument(
        "--num", type=int, help=f"How many trajectories to show; by default {NUM_SHOWN}, with --list all of them."
    )
    parser.add_argument("--tokenizer", help="Directory or Hub id of a tokenizer; by default the one saved in the run.")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="Allow code that comes with the tokenizer to run."
    )
    parser.add_argument("--width", type=int, help="Width in columns; by default that of the terminal.")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto respects NO_COLOR.",
    )
    return parser


def _show_events(run: str) -> str:
    from agent_r1_trl.recording.events import describe_event, read_events

    if not Path(run).exists():
        raise UsageError(f"RUN {run}: no such file or directory. Pass the output directory of a run.")
    try:
        lines = [describe_event(event) for event in read_events(run)]
    except ValueError as error:
        raise UsageError(f"RUN {error} Pass the output directory of a run.") from error
    return "".join(visible(f"{line}\n") for line in lines) or "Nothing happened that is recorded here.\n"


def find_records(arguments: argparse.Namespace) -> list[Record]:
    """The records that the options select.

    Raises:
        UsageError: no record is selected; names what was recorded.
    """
    from agent_r1_trl.recording import read_records, trajectory_files
    from agent_r1_trl.recording.store import file_step

    for name in ("num", "width"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UsageError(
                f"--{name} {getattr(arguments, name)}: must be >= 1. Pass such a number, or leave it out."
            )
    try:
        files = trajectory_files(arguments.run)
        split = arguments.split or ("train" if trajectory_files(arguments.run, split="train") else "eval")
        files = trajectory_files(arguments.run, split=split)
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN {error} Pass the output directory of a run.") from error
    if not files:
        raise UsageError(
            f"RUN {arguments.run}: no recorded trajectories{f' of split {split}' if arguments.split else ''} "
            "(trajectories/step_*.jsonl or .parquet). Train with record_trajectories: jsonl, or pass another run."
        )
    is_folder = Path(arguments.run).is_dir()
    steps = sorted({file_step(path) for path in files}) if is_folder else []
    step = arguments.step if arguments.step is not None or not steps else steps[-1]
    if steps and step not in steps:
        raise UsageError(f"--step {step}: was not recorded. There are steps {steps[0]} to {steps[-1]}.")
    try:
        records = list(read_records(arguments.run, step=step, split=split if is_folder else arguments.split))
    except ValueError as error:
        raise UsageError(f"RUN {error} Pass the output directory of a run.") from error
    if not records:
        raise UsageError(f"RUN {arguments.run}: holds no trajectory. Pass the output directory of a run.")
    selections: list[tuple[str, Callable[[Record], bool]]] = []
    if arguments.filter:
        belongs = FILTERS[arguments.filter][1]
        selections.append((f"--filter {arguments.filter}", lambda record: belongs(record.trajectory)))
    if arguments.index is not None:
        selections.append((f"--index {arguments.index}", lambda record: record.index == arguments.index))
    where = f"step {step}" if step is not None else arguments.run
    for option, is_selected in selections:
        selected = [record for record in records if is_selected(record)]
        if not selected:
            raise UsageError(f"{option}: selects none of {len(records)} trajectories of {where}. --list shows them.")
        records = selected
    return records


def load_tokenizer(given: str | None, run_folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of `--tokenizer`, of the run, or of its last checkpoint; None if there is none.

    Raises:
        UsageError: the tokenizer cannot be loaded.
    """
    folder = run_folder if run_folder.is_dir() else run_folder.parent
    folder = folder.parent if folder.name == "trajectories" else folder
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    places = [str(path) for path in (folder, *checkpoints) if (path / "tokenizer_config.json").exists()]
    name = given or next(iter(places), None) or _evaluated_model(folder)
    if name is None:
        return None
    from transformers import AutoTokenizer

    from agent_r1_trl.evaluation.loading import is_local

    try:
        is_local(name, flag="tokenizer")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--tokenizer {name}: cannot be loaded ({str(error).splitlines()[0]}). Pass "
            + ("--trust_remote_code if you trust its code, or " if "trust_remote_code" in str(error) else "")
            + "a directory that holds a tokenizer, or a Hub id."
        ) from error


def _evaluated_model(folder: Path) -> str | None:
    """The model of the evaluation in a folder, if there is one."""
    file = folder / "evaluation.json"
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["settings"]["model"]
    except (OSError, ValueError, KeyError, TypeError):  # no evaluation, or one of another program
        return None
    return name if isinstance(name, str) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.view`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
