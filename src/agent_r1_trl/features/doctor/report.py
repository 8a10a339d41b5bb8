"""Findings of the checks, and their display."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from agent_r1_trl.safe_text import shown

if TYPE_CHECKING:
    from rich.table import Table

Level = Literal["ok", "skipped", "warning", "error"]
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "error": "bold red"}


@dataclass(kw_only=True, frozen=True)
class Finding:
    """One line of a report."""

    level: Level
    """error: a run would fail or learn the wrong thing. warning: probably not meant. skipped: could not be examined.
    ok: examined and fine."""
    message: str
    fix: str = ""
    """The fix; empty for ok and skipped."""
    check: str = ""
    """The subject: model, tokenizer, chat template, parser, masks, prompts, precision, memory; in the report of
    `check_env` construction, tools, reset, step, outcome, state, and of an agent agent, history, outcome, before which
    the doctor writes "environment: "."""


@dataclass
class Report:
    """Collects findings in the order in which they were made, each of them once."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, level: Level, check: str, message: str, fix: str = "") -> None:
        """Add a finding; one that is ok only if the check has found nothing."""
        finding = Finding(level=level, check=check, message=message, fix=fix)
        has_found = any(other.check == check and other.level != "ok" for other in self.findings)
        if finding not in self.findings and not (level == "ok" and has_found):
            self.findings.append(finding)

    def ok(self, check: str, message: str) -> None:
        """Add that a check looked and found nothing; ignored if it has a warning or an error."""
        self.add("ok", check, message)

    def skip(self, check: str, message: str) -> None:
        """Add what could not be examined, and why."""
        self.add("skipped", check, message)

    def warning(self, check: str, message: str, fix: str) -> None:
        """Add what is probably not meant."""
        self.add("warning", check, message, fix)

    def error(self, check: str, message: str, fix: str) -> None:
        """Add what would fail or teach the wrong thing."""
        self.add("error", check, message, fix)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.level == "error" for finding in findings)


def describe_error(error: BaseException, limit: int = 300) -> str:
    """`TypeError: ...`, cut to `limit` characters; works even if the error's own `__str__` raises."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(".")  # a sentence goes on after it
    except Exception:
        text = type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."


def render(findings: Iterable[Finding]) -> Table:
    """A rich table with one row per finding, the fix below the message."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="agent-r1-trl doctor", show_lines=True, expand=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("finding", ratio=1, overflow="fold")
    for finding in findings:
        text = Text(shown(finding.message))
        if finding.fix:
            text.append("\n-> " + shown(finding.fix), style="italic")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, text)
    return table
