"""The command line: `agent-r1-trl COMMAND`; `COMMANDS` lists them.

One file per command: `main` finds it and calls its `run`. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from agent_r1_trl.cli.errors import EXIT_USAGE, run_command
from agent_r1_trl.objects import did_you_mean

COMMANDS = {
    "train": "train an agent according to a recipe",
    "eval": "run a model on data sets and score it, or compare two runs",
    "view": "show recorded trajectories with their masks in colour",
    "doctor": "check model, template, tools and environment before a run",
    "chat": "talk to an agent, with its tools, as it was trained",
    "serve": "serve a model with vLLM, or an agent with its tools",
    "merge": "write a plain Hugging Face model from an adapter or a checkpoint",
    "push": "send a trained agent, or its trajectories, to the Hub",
    "export": "write recorded trajectories as a data set, or as conversations for SFT",
    "memory": "estimate the memory that a recipe needs on each GPU",
    "index": "build a search index from a corpus, or search one",
    "serve-retriever": "serve a search index over HTTP",
}

_USAGE = """\
usage: agent-r1-trl COMMAND [options]

Multi-turn, tool-using agents trained with reinforcement learning, on top of TRL.

commands:
{commands}

  agent-r1-trl COMMAND --help shows the options of a command; agent-r1-trl --version shows the version.

  agent-r1-trl train --config quickstart/grpo/cpu
  agent-r1-trl view outputs/quickstart --terminal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `agent-r1-trl`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0 if arguments else EXIT_USAGE
    if name in ("-V", "--version"):
        from agent_r1_trl import __version__

        print(f"agent-r1-trl {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"error: agent-r1-trl has no command {name!r}.{did_you_mean(name, COMMANDS)} "
            f"There are: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    module = importlib.import_module(f"agent_r1_trl.cli.{name.replace('-', '_')}")
    return run_command(module.run, arguments[1:])


def _usage() -> str:
    return _USAGE.format(commands="\n".join(f"  {name:15} {text}" for name, text in COMMANDS.items()))
