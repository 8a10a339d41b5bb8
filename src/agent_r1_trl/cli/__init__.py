"""The command line: `agent-r1-trl train | eval | view | doctor`."""

from agent_r1_trl.cli.commands import main

__all__ = ["main"]
