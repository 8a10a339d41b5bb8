"""`agent-r1-trl view`: show a run as an HTML file, or its trajectories on the terminal.

agent-r1-trl view outputs/my-agent
agent-r1-trl view outputs/my-agent --against outputs/other --html compared.html
agent-r1-trl view outputs/my-agent --serve
agent-r1-trl view outputs/my-agent --terminal --step 40 --filter unsolved
agent-r1-trl view outputs/my-agent --list
agent-r1-trl view outputs/my-agent --example q/17
agent-r1-trl view outputs/my-agent --events
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import DependencyError, PlainParser, UsageError, users_mistakes
from agent_r1_trl.cli.web import Port, serve_app
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import visible
from agent_r1_trl.settings import Count, check_value

if TYPE_CHECKING:
    from agent_r1_trl.recording import Record

COMMAND = "agent-r1-trl view"
NUM_SHOWN = 3
TERMINAL = ("terminal", "list", "events", "step", "example", "index", "split", "filter", "num", "width", "color")
"""Options for the terminal: one of them is enough, and no file is written."""
OLD_FILTERS = {"failed": "unsolved", "tool_errors": "call_errors", "infrastructure": "lost"}
"""Earlier name of a filter -> its name."""
FILTERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "unsolved": (
        "no exact match, a success below 1/2, or an outcome of 0 or less; without lost ones",
        lambda item: not item.is_solved and not item.stop_reason.is_infrastructure_failure,
    ),
    "solved": ("an exact match, a success of 1/2 or more, or an outcome above 0", lambda item: item.is_solved),
    "truncated": ("ended by a limit", lambda item: item.stop_reason.is_truncated),
    "call_errors": ("with a call error", lambda item: any(result.is_error for result in item.tool_results)),
    "invalid": ("with an unusable turn", lambda item: any(turn.is_invalid for turn in item.turns)),
    "lost": ("ended by an infrastructure failure", lambda item: item.stop_reason.is_infrastructure_failure),
}


def run(argv: Sequence[str]) -> int:
    """Show the chosen trajectories; returns the exit code."""
    arguments = make_parser().read(argv)
    of_terminal = [name for name in TERMINAL if getattr(arguments, name) not in (None, False)]
    if not of_terminal:
        return _write_page(arguments)
    for name in ("html", "against", "serve", "port"):
        if (value := getattr(arguments, name)) is not None and value is not False:
            raise UsageError(f"--{name}: is for the HTML file, and --{of_terminal[0]} for the terminal. Pass one.")
    from agent_r1_trl.recording import trajectory_files
    from agent_r1_trl.recording.events import describe_event, read_events

    with users_mistakes(OSError):
        for name in ("num", "width"):
            check_value(f"--{name}", getattr(arguments, name), Count | None)
        trajectory_files(arguments.run)  # refuses what is no run
        events = read_events(arguments.run) if arguments.events else []
        records, rolled_out = ([], []) if arguments.events else find_records(arguments)
    if arguments.events:
        text = "".join(f"{describe_event(event)}\n" for event in events)
        sys.stdout.write(visible(text) or "Nothing happened that is recorded here.\n")
        return 0
    from agent_r1_trl.recording import read_steps, render_trajectory, summary_table
    from agent_r1_trl.recording.terminal import render

    is_wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    color = {"always": True, "never": False}.get(arguments.color or "auto", is_wanted)
    if arguments.list or _is_over_steps(arguments):
        shown, hint = records[: arguments.num], "listed."
        sys.stdout.write(render([summary_table(shown, arguments.example)], width=arguments.width, color=color))
    else:
        shown = records if arguments.index is not None else records[: arguments.num or NUM_SHOWN]
        with users_mistakes(OSError):
            steps = read_steps(arguments.run)
        hint = "shown; --num, --index, --filter and --list choose others."
        has_ids = not all(record.trajectory.is_hosted for record in shown)
        tokenizer = load_tokenizer(arguments) if has_ids else None
        for record in shown:
            split = "evaluation, " if record.split == "eval" else ""
            head = visible(f"{split}step {record.step}, index {record.index}, {record.path}\n")
            note = _why(record, rolled_out, steps)
            text = render_trajectory(record.trajectory, tokenizer, arguments.width, color=color, note=note)
            sys.stdout.write(f"{head}{text}\n")
        if has_ids and tokenizer is None:
            fix = "Pass --tokenizer, a directory or a Hub id."
            sys.stdout.write(f"Tokens are not shown: no tokenizer in the run. {fix}\n")
    if len(shown) < len(records):
        sys.stdout.write(f"{len(shown)} of {len(records)} {hint}\n")
    return 0


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    filters = "; ".join(f"{name}: {text}" for name, (text, _) in FILTERS.items())
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2])
    parser.add_argument("run", metavar="RUN", help="Output directory of a run, or a file of trajectories.")
    parser.add_argument("--html", metavar="FILE", help="The HTML file; by default inspector.html in the run.")
    parser.add_argument(
        "--against", metavar="OTHER", help="Another run, or evaluation, to compare RUN with in the file."
    )
    parser.add_argument("--serve", action="store_true", help="Serve the page, which follows a run that still trains.")
    parser.add_argument("--port", type=int, help="With --serve: port on 127.0.0.1; by default 0, a free one.")
    parser.add_argument("--terminal", action="store_true", help="Show on the terminal, as the options below do, too.")
    parser.add_argument("--list", action="store_true", help="One line per trajectory instead of its tokens.")
    parser.add_argument("--events", action="store_true", help="What the echo guard did in this run, and why.")
    parser.add_argument("--step", type=int, help="Step to show; by default the last one recorded.")
    parser.add_argument("--example", metavar="ID", help="One example: a line for each trajectory of all steps.")
    parser.add_argument("--index", type=int, help="Trajectory to show; by default the first ones of the step.")
    parser.add_argument("--split", choices=("train", "eval"), help="Split to show; by default train, if recorded.")
    parser.add_argument(
        "--filter", type=_filter_name, choices=tuple(FILTERS), help=f"Show only some trajectories. {filters}."
    )
    parser.add_argument("--num", type=int, help=f"How many to show; by default {NUM_SHOWN}, with --list all of them.")
    parser.add_argument("--tokenizer", help="Directory or Hub id of a tokenizer; by default the one saved in the run.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Let code that comes with a tokenizer run.")
    parser.add_argument("--width", type=int, help="Width in columns; by default that of the terminal.")
    colors = ("auto", "always", "never")
    parser.add_argument("--color", choices=colors, help="auto, the default, respects NO_COLOR.")
    return parser


def _filter_name(name: str) -> str:
    if name in OLD_FILTERS:
        raise argparse.ArgumentTypeError(f"{name!r} is no filter. Did you mean {OLD_FILTERS[name]!r}? Set it to that")
    return name


@contextlib.contextmanager
def _stopped_by_the_disk(path: str | Path) -> Iterator[None]:
    """An OSError of a page that is written: a full disk may be cleared, the others are mistakes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(str(error)) from error
        raise DependencyError(
            f"--html {path}: cannot be written ({error}). Free space there, or pass --html with another file."
        ) from error


def _write_page(arguments: argparse.Namespace) -> int:
    """Write the run as an HTML file and print its path, or serve it."""
    from agent_r1_trl.features import feature
    from agent_r1_trl.recording import trajectory_files
    from agent_r1_trl.recording.lines import run_folder

    if arguments.serve and arguments.html is not None:
        raise UsageError(f"--html {arguments.html}: --serve keeps no file. Pass one of them.")
    if arguments.port is not None and not arguments.serve:
        raise UsageError(f"--port {arguments.port}: is for --serve. Pass --serve, or remove it.")
    run = Path(arguments.run)
    path = arguments.html or (run.with_suffix(".html") if run.is_file() else run_folder(run) / "inspector.html")

    def tokenizer_of(source: str) -> Any:
        try:
            return load_tokenizer(argparse.Namespace(**{**vars(arguments), "run": source}), is_light=True)
        except UsageError:
            if arguments.tokenizer is not None:
                raise
            return None  # an evaluated model that is not here any more: the page shows messages, and says so

    if Path(path).is_dir():
        raise UsageError(f"--html {path}: is a directory. Pass the name of a file, such as {path}/inspector.html.")
    with _stopped_by_the_disk(path), users_mistakes():
        _check_panels(run_folder(run), arguments.against)
        inspector = feature("inspector", "agent-r1-trl view without --terminal")
        if not arguments.serve:
            print(inspector.write_page(run, path, tokenizer_of, against=arguments.against))
            return 0
        check_value("--port", arguments.port, Port | None)
        runs = [run, *([Path(arguments.against)] if arguments.against else [])]
        for source in runs:
            trajectory_files(source)  # refuses what is no run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inspector.html"
        write = functools.partial(inspector.write_page, run, path, tokenizer_of, against=arguments.against)
        live = inspector.LivePage(runs, path, lambda version: write(version=version))
        say = f"the page of {arguments.run}, which follows the run; Ctrl-C ends it"

        def tell(url: str) -> None:
            print(f"{url}  {say}", *tunnel_lines(url, os.environ), sep="\n", flush=True)

        serve_app(live.app(), "127.0.0.1", arguments.port or 0, tell)
    return 0


def tunnel_lines(url: str, environment: Mapping[str, str]) -> list[str]:
    """Over ssh, how the machine that the user sits at reaches a URL of this one; else nothing.

    >>> tunnel_lines("http://127.0.0.1:8123", {"SSH_CONNECTION": "10.0.0.9 5022 10.0.0.5 22", "USER": "ana"})
    ['on your own machine: ssh -L 8123:127.0.0.1:8123 ana@10.0.0.5  and open the address there']
    """
    parts = environment.get("SSH_CONNECTION", "").split()
    if len(parts) != 4:
        return []
    port = url.rpartition(":")[2]
    user = f"{environment['USER']}@" if environment.get("USER") else ""
    other_port = "" if parts[3] == "22" else f"-p {parts[3]} "
    command = f"ssh {other_port}-L {port}:127.0.0.1:{port} {user}{parts[2]}"
    return [f"on your own machine: {command}  and open the address there"]


def _check_panels(run: Path, against: str | None) -> None:
    """Refuse two evaluations of different panels."""
    from agent_r1_trl.evaluation.comparison import EXAMPLES_FILE, check_panels, read_examples

    files = [Path(folder) / EXAMPLES_FILE for folder in (run, against or "")]
    if against is not None and all(file.is_file() for file in files):
        check_panels(*map(read_examples, files))


def _why(record: Record, rolled_out: Sequence[Record], steps: Mapping[int, Any]) -> str:
    """Where the advantage comes from, given everything that was sampled in the step."""
    if record.split != "train":
        return ""
    from agent_r1_trl.recording.explain import describe  # loads torch

    return describe(record, rolled_out, steps.get(record.step))


def find_records(arguments: argparse.Namespace) -> tuple[list[Record], list[Record]]:
    """The records that the options select, and all that they are chosen from."""
    from agent_r1_trl.recording import read_records, trajectory_files
    from agent_r1_trl.recording.store import file_step

    run = arguments.run
    split = arguments.split or ("train" if trajectory_files(run, split="train") else "eval")
    files, is_folder = trajectory_files(run, split=split), Path(run).is_dir()
    steps = sorted({file_step(path) for path in files}) if is_folder else []
    step = arguments.step if arguments.step is not None or not steps else steps[-1]
    if steps and step not in steps and not _is_over_steps(arguments):
        raise ValueError(f"--step {step}: was not recorded. There are steps {steps[0]} to {steps[-1]}.")
    if _is_over_steps(arguments):
        step, split = None, arguments.split
    where = f"step {step}" if step is not None else run
    records: Iterable[Record] = read_records(
        run, step=step, split=split if is_folder else arguments.split, columns=not _is_over_steps(arguments)
    )
    if _is_over_steps(arguments) and files:
        records = _of_example(arguments.example, records, where)
    rolled_out = list(records) if files else []
    if not rolled_out:
        raise ValueError(
            f"RUN {run}: holds no recorded trajectories{f' of split {split}' if split else ''} "
            "(trajectories/step_*.jsonl). Train with record_trajectories: jsonl, or pass another run."
        )
    chosen = rolled_out if arguments.example is None else _of_example(arguments.example, rolled_out, where)
    for option, value in {"filter": arguments.filter, "index": arguments.index}.items():
        before = len(chosen)
        if option == "filter" and value:
            chosen = [record for record in chosen if FILTERS[value][1](record.trajectory)]
        elif value is not None:
            chosen = [record for record in chosen if record.index == value]
        if not chosen:
            raise ValueError(f"--{option} {value}: not among the {before} trajectories of {where}. --list shows them.")
    return chosen, rolled_out


def _is_over_steps(arguments: argparse.Namespace) -> bool:
    """Whether an example is listed over all steps, rather than shown in one of them."""
    return arguments.example is not None and arguments.step is None and arguments.index is None


def _of_example(name: str, records: Iterable[Record], where: str) -> list[Record]:
    """The records of one example; the others, which may be many, are not kept in memory."""
    chosen, known = [], set()
    for record in records:
        known.add(record.trajectory.example_id)
        if record.trajectory.example_id == name:
            chosen.append(record)
    if known and not chosen:
        hint = did_you_mean(name, sorted(known))
        raise UsageError(
            f"--example {name!r}: not among the {len(known)} examples of {where}.{hint} Name one, such as "
            f"{max(known)!r}; --list shows them."
        )
    return chosen


def load_tokenizer(arguments: argparse.Namespace, *, is_light: bool = False) -> Any:
    """The tokenizer of `--tokenizer`, of the run, its last checkpoint or its evaluation; None if there is none.

    `is_light` takes a `tokenizers.Tokenizer` where there is a tokenizer.json: importing transformers takes seconds.
    """
    from agent_r1_trl.recording.lines import run_folder

    folder = run_folder(arguments.run)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    evaluated = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no evaluation, or one of another program
        evaluated = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["settings"]["model"]
    places = [str(path) for path in (folder, *checkpoints) if (path / "tokenizer_config.json").exists()]
    name = next(filter(None, [arguments.tokenizer, *places, evaluated]), None)
    if name is None:
        return None
    if is_light and (file := Path(name) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    from agent_r1_trl.evaluation.agent import is_local

    try:
        is_local(name, flag="tokenizer")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        trust = "--trust_remote_code if you trust its code, or " if "trust_remote_code" in str(error) else ""
        raise UsageError(
            f"--tokenizer {name}: cannot be loaded ({str(error).splitlines()[0]}). Pass {trust}a directory that holds "
            "a tokenizer, or a Hub id."
        ) from error
