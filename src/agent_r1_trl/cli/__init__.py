"""The command line: `agent-r1-trl COMMAND`.

One module per command: `main` finds it and calls its `run`. Nothing heavy is imported before a command needs it.
Whatever a user got wrong is raised as a `UsageError`; `errors.py` says how each error ends a command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from agent_r1_trl.cli.errors import EXIT_USAGE, run_command
from agent_r1_trl.features import FEATURES, has_feature
from agent_r1_trl.objects import did_you_mean

COMMANDS = {
    "train": "train an agent according to a recipe",
    "eval": "run a model on data sets and score it, or compare two runs",
    "view": "show a run, token by token: as an HTML file, or on the terminal",
}
"""Those that are always there; features bring others."""


def find_commands() -> dict[str, tuple[str, str]]:
    """Name -> module and help of every command that is there."""
    found = {name: (f"agent_r1_trl.cli.{name}", text) for name, text in COMMANDS.items()}
    for folder, row in FEATURES.items():
        if has_feature(folder):
            for name, text in row.commands.items():
                found[name] = f"agent_r1_trl.features.{folder}.{name.replace('-', '_')}_command", text
    return found


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
    commands = find_commands()
    if name not in commands:
        print(
            f"error: agent-r1-trl has no command {name!r}.{did_you_mean(name, commands)} "
            f"There are: {', '.join(commands)}.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    module = importlib.import_module(commands[name][0])
    return run_command(module.run, arguments[1:])


def _usage() -> str:
    commands = "\n".join(f"  {name:15} {text}" for name, (_, text) in find_commands().items())
    return f"""\
usage: agent-r1-trl COMMAND [options]

Multi-turn, tool-using agents trained with reinforcement learning, on top of TRL.

commands:
{commands}

  agent-r1-trl COMMAND --help shows the options of a command; agent-r1-trl --version shows the version.

  agent-r1-trl train --config quickstart/grpo/cpu
  agent-r1-trl view outputs/quickstart
"""
