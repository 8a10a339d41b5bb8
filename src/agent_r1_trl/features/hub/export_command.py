"""`agent-r1-trl export`: write recorded trajectories as a data set, or those above a reward as conversations for SFT.

agent-r1-trl export outputs/my-agent --output trajectories
agent-r1-trl export outputs/my-agent --sft --min_reward 1 --output sft.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import DependencyError, PlainParser, UsageError, users_mistakes

COMMAND = "agent-r1-trl export"


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2])
    parser.add_argument("run", metavar="RUN", help="Output directory of a run, or a file of trajectories.")
    output = "Directory of the data set, or with --sft a .jsonl file; it must not exist yet."
    parser.add_argument("--output", required=True, metavar="PATH", help=output)
    sft = "Write conversations (messages, and tools where the recipe names the environment) for TRL's SFTTrainer."
    parser.add_argument("--sft", action="store_true", help=sft)
    parser.add_argument("--min_reward", type=float, metavar="R", help="With --sft: least total reward.")
    parser.add_argument("--split", choices=("train", "eval", "all"), help="With --sft: which; by default train.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the trajectories; returns the exit code."""
    arguments = make_parser().read(argv)
    if arguments.sft and arguments.min_reward is None:
        raise UsageError("--min_reward: not set. With --sft, pass the least total reward, such as --min_reward 1.")
    for flag in ("min_reward", "split"):
        if not arguments.sft and getattr(arguments, flag) is not None:
            raise UsageError(
                f"--{flag}: goes with --sft; a data set holds every trajectory. Pass --sft, or remove it."
            )
    try:
        with users_mistakes():
            print(_write_sft(arguments) if arguments.sft else _write_dataset(arguments))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:  # the run
            raise UsageError(str(error)) from error
        raise DependencyError(f"output={arguments.output!r}: cannot be written ({error}).") from error
    return 0


def _write_dataset(arguments: argparse.Namespace) -> str:
    from agent_r1_trl.recording.dataset import write_dataset

    counts = write_dataset(arguments.run, arguments.output)
    said = ", ".join(f"{count} of {split}" for split, count in counts.items())
    return f"{arguments.output}: {said}; datasets.load_dataset({arguments.output!r}) reads them"


def _write_sft(arguments: argparse.Namespace) -> str:
    from agent_r1_trl.recording.dataset import sft_rows
    from agent_r1_trl.recording.store import dump_json

    path = Path(arguments.output)
    if path.suffix != ".jsonl" or path.exists():
        problem = "exists already" if path.exists() else "is no .jsonl file"
        raise UsageError(f"--output {arguments.output!r} {problem}. Pass the name of a new .jsonl file.")
    split = {None: "train", "all": None}.get(arguments.split, arguments.split)
    rows = sft_rows(arguments.run, min_reward=arguments.min_reward, tools=_tools(arguments.run), split=split)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            count = sum(file.write(dump_json(row) + "\n") > 0 for row in rows)
        if not count:
            raise UsageError(
                f"--min_reward {arguments.min_reward:g}: no whole trajectory of {arguments.run} earned that much. "
                f"Pass a smaller one; agent-r1-trl view {arguments.run} --list shows rewards."
            )
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{path}: {count} conversations"


def _tools(run: str) -> list[dict[str, Any]]:
    """Schemas of the tools of the environment that the run's recipe names; none where it cannot be made here."""
    from agent_r1_trl.environments.factory import tool_schemas
    from agent_r1_trl.features.hub.card import read_facts
    from agent_r1_trl.features.hub.push_command import environment_of

    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    folder = folder.parent if folder.name == "trajectories" else folder
    factory = environment_of(read_facts(folder, "").recipe, "the conversations will have no tools")
    return [] if factory is None else tool_schemas(factory)
