"""`agent-r1-trl export`: write recorded trajectories as a data set, or those above a reward as conversations for SFT.

agent-r1-trl export outputs/my-agent --output trajectories
agent-r1-trl export outputs/my-agent --sft --min_reward 1 --output sft.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

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
    least, split, path = arguments.min_reward, arguments.split, Path(arguments.output)
    problems = [
        (least, split) != (None, None) and "--min_reward, --split: a data set holds all. Pass --sft, or remove them.",
        least is None and "--min_reward: not set. With --sft, pass the least total reward, such as --min_reward 1.",
        (path.suffix != ".jsonl" or path.exists()) and f"--output {path}: must be a new .jsonl file. Pass another.",
    ]
    if problem := next(filter(None, problems[1:] if arguments.sft else problems[:1]), None):
        raise UsageError(problem)
    try:
        with users_mistakes():
            print((_write_sft if arguments.sft else _write_dataset)(arguments))
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
    from agent_r1_trl.environments.factory import tool_schemas
    from agent_r1_trl.features.hub.card import read_facts
    from agent_r1_trl.features.hub.push_command import environment_of
    from agent_r1_trl.recording.dataset import sft_rows
    from agent_r1_trl.safe_text import dump_json

    path, least = Path(arguments.output), arguments.min_reward
    folder = Path(arguments.run) if Path(arguments.run).is_dir() else Path(arguments.run).parent
    folder = folder.parent if folder.name == "trajectories" else folder
    factory = environment_of(read_facts(folder, "").recipe, "the conversations will have no tools")
    tools = [] if factory is None else tool_schemas(factory)
    split = {None: "train", "all": None}.get(arguments.split, arguments.split)
    rows = list(map(dump_json, sft_rows(arguments.run, min_reward=least, tools=tools, split=split)))
    if not rows:
        raise UsageError(
            f"--min_reward {least:g}: no whole trajectory of {arguments.run} earned that much. Pass a smaller one; "
            f"agent-r1-trl view {arguments.run} --list shows rewards."
        )
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return f"{path}: {len(rows)} conversations"
