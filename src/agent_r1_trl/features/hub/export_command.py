"""`agent-r1-trl export`: write recorded trajectories as a data set, as conversations for SFT, or as documents of ATIF.

agent-r1-trl export outputs/my-agent --output trajectories
agent-r1-trl export outputs/my-agent --sft --min_reward 1 --output sft.jsonl
agent-r1-trl export outputs/my-agent --atif --output documents
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import DependencyError, PlainParser, UsageError, users_mistakes

COMMAND = "agent-r1-trl export"


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2])
    parser.add_argument("run", metavar="RUN", help="Output directory of a run, or a file of trajectories.")
    output = "Directory of the data set or documents, or with --sft a .jsonl file; it must not exist yet."
    parser.add_argument("--output", required=True, metavar="PATH", help=output)
    sft = "Write conversations (messages, and tools where the recipe names the environment) for TRL's SFTTrainer."
    parser.add_argument("--sft", action="store_true", help=sft)
    atif = "Write a document of the Agent Trajectory Interchange Format for each trajectory."
    parser.add_argument("--atif", action="store_true", help=atif)
    parser.add_argument("--min_reward", type=float, metavar="R", help="With --sft and --atif: least total reward.")
    split = "With --sft and --atif: which; by default train."
    parser.add_argument("--split", choices=("train", "eval", "all"), help=split)
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the trajectories; returns the exit code."""
    arguments = make_parser().read(argv)
    least = arguments.min_reward
    path = Path(arguments.output)
    sft = arguments.sft
    atif = arguments.atif
    chooses = (least, arguments.split) != (None, None)
    is_new = path.suffix == ".jsonl" and not path.exists()
    problems = [
        sft and atif and "--sft, --atif: one export has one form. Pass one of them.",
        chooses
        and not (sft or atif)
        and "--min_reward, --split: a data set holds all. Pass --sft, --atif or neither.",
        sft and least is None and "--min_reward: not set. With --sft, pass the least total reward, such as 1.",
        sft and not is_new and f"--output {path}: must be a new .jsonl file. Pass another.",
        atif and not find_spec("atif") and "--atif: needs the package atif: pip install 'agent-r1-trl[atif]'.",
    ]
    if problem := next(filter(None, problems), None):
        raise UsageError(problem)
    write = _write_sft if sft else _write_atif if atif else _write_dataset
    try:
        with users_mistakes():
            print(write(arguments))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:  # the run
            raise UsageError(str(error)) from error
        raise DependencyError(
            f"output={arguments.output!r}: cannot be written ({error}). Free space there, or set another output."
        ) from error
    return 0


def _write_dataset(arguments: argparse.Namespace) -> str:
    from agent_r1_trl.recording.dataset import write_dataset

    counts = write_dataset(arguments.run, arguments.output)
    said = ", ".join(f"{count} of {split}" for split, count in counts.items())
    return f"{arguments.output}: {said}; datasets.load_dataset({arguments.output!r}) reads them"


def _write_sft(arguments: argparse.Namespace) -> str:
    from agent_r1_trl.recording import read_trajectories
    from agent_r1_trl.recording.dataset import sft_rows
    from agent_r1_trl.safe_text import dump_json

    path, least = Path(arguments.output), arguments.min_reward
    _, tools, split = _facts(arguments)
    trajectories = read_trajectories(arguments.run, split=split)
    rows = list(map(dump_json, sft_rows(trajectories, min_reward=least, tools=tools)))
    if not rows:
        command = shlex.join(["agent-r1-trl", "view", arguments.run, "--list"])
        raise UsageError(
            f"--min_reward {least:g}: no whole trajectory of {arguments.run} (stop 'done', scored, in one context) "
            f"earned that much. Pass a smaller one if there are any; {command} shows."
        )
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return f"{path}: {len(rows)} conversations"


def _write_atif(arguments: argparse.Namespace) -> str:
    from agent_r1_trl import __version__
    from agent_r1_trl.recording.atif import write_documents

    model, tools, split = _facts(arguments)
    agent = {"name": "agent-r1-trl", "version": __version__, "model_name": model, "tool_definitions": tools}
    count = write_documents(arguments.run, arguments.output, agent, split, arguments.min_reward)
    return f"{arguments.output}: {count} documents"


def _facts(arguments: argparse.Namespace) -> tuple[str | None, list[dict[str, Any]] | None, str | None]:
    """Model and tools of the run, as far as its recipe tells; and the split."""
    from agent_r1_trl.environments.factory import tool_schemas
    from agent_r1_trl.features.hub.card import read_facts
    from agent_r1_trl.features.hub.push_command import environment_of
    from agent_r1_trl.recording.lines import run_folder

    facts = read_facts(run_folder(arguments.run), "")
    factory = environment_of(facts.recipe, "what is written will have no tools")
    split = {None: "train", "all": None}.get(arguments.split, arguments.split)
    return facts.base_model or None, None if factory is None else tool_schemas(factory) or None, split
