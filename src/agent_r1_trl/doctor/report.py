"""What the doctor found, and how it is shown.

Not part of the data flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(kw_only=True, frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    """What was checked: versions, tokenizer, chat template, parser, masks, tools, environment, prompts."""
    verdict: Verdict
    """error: a run would fail or learn the wrong thing. warning: probably not meant."""
    message: str
    cure: str = ""
    """What to do; empty for ok."""


@dataclass
class Chart:
    """Collects checks; a name that got neither warning nor error can be closed with one ok line."""

    checks: list[Check] = field(default_factory=list)

    def ok(self, name: str, message: str) -> None:
        """What is fine; left out where the same name has a warning or an error."""
        if all(check.name != name or check.verdict == "ok" for check in self.checks):
            self.checks.append(Check(name=name, verdict="ok", message=message))

    def warning(self, name: str, message: str, cure: str) -> None:
        """What is probably not meant."""
        self._add(Check(name=name, verdict="warning", message=message, cure=cure))

    def error(self, name: str, message: str, cure: str) -> None:
        """What would fail or teach the wrong thing."""
        self._add(Check(name=name, verdict="error", message=message, cure=cure))

    def _add(self, check: Check) -> None:
        if check not in self.checks:
            self.checks.append(check)


def has_errors(checks: Iterable[Check]) -> bool:
    """Whether any verdict is an error."""
    return any(check.verdict == "error" for check in checks)


def render(checks: Iterable[Check]) -> Table:
    """A rich table, one line per check, the cure below the message."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="agent-r1-trl doctor", show_lines=True, expand=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("finding", ratio=1, overflow="fold")
    for check in checks:
        finding = Text(check.message)
        if check.cure:
            finding.append("\n-> " + check.cure, style="italic")
        table.add_row(Text(check.verdict, style=_STYLES[check.verdict]), check.name, finding)
    return table
