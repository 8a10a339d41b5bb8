"""The command line: `agent-r1-trl COMMAND`.

One module per command: `main` finds it and calls its `run`. Nothing heavy is imported before a command needs it, and
`--help` of a command that `arguments.HELP` describes is answered without its module.
Whatever a user got wrong is raised as a `UsageError`; `errors.py` says how each error ends a command.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from agent_r1_trl.cli.errors import EXIT_USAGE, run_command
from agent_r1_trl.cli.options import HelpPage, help_text
from agent_r1_trl.features import FEATURES, has_feature
from agent_r1_trl.objects import did_you_mean

COMMANDS = {
    "train": "train an agent according to a recipe",
    "eval": "run a model on data sets and score it",
    "eval compare": "compare two evaluations of the same examples",
    "view": "show a run, token by token: as an HTML file, or on the terminal",
}
"""Commands that are always there; features bring others."""


def find_commands() -> dict[str, tuple[str, str]]:
    """Name -> module and help of every command that is there."""
    found = {name: (f"agent_r1_trl.cli.{name.replace(' ', '_')}", text) for name, text in COMMANDS.items()}
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
    rest = arguments[1:]
    if rest and f"{name} {rest[0]}" in commands:
        name, rest = f"{name} {rest[0]}", rest[1:]
    package = commands[name][0].rpartition(".")[0]
    if {"-h", "--help"} & set(rest) and (page := _find_help(package, name)):
        print(help_text(f"agent-r1-trl {name}", page.about, page.kinds), end="")
        raise SystemExit(0)  # as argparse ends the help of the others
    return run_command(importlib.import_module(commands[name][0]).run, rest)


def _find_help(package: str, name: str) -> HelpPage | None:
    """The help of a command: in `cli/arguments.py`, or in `command_arguments.py` of its feature.

    None: the command's own parser answers.
    """
    module = "arguments" if package == "agent_r1_trl.cli" else "command_arguments"
    if importlib.util.find_spec(f"{package}.{module}") is None:
        return None
    pages: dict[str, HelpPage] = importlib.import_module(f"{package}.{module}").HELP
    return pages.get(name)


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
