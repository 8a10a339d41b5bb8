"""What `check_env` found.

Not part of the data flow: a linter's result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["error", "warning", "ok"]


@dataclass(kw_only=True, frozen=True)
class Finding:
    """One line of a check's report."""

    level: Level
    """error: training will fail or learn the wrong thing. warning: probably not meant. ok: checked and fine."""
    message: str
    cure: str = ""
    """What to change; empty for ok."""
    check: str = ""
    """Which check said it: construction, methods, tools, reset, step, outcome, state, close."""


@dataclass
class Report:
    """Findings, without repetition, in the order of the checks."""

    findings: list[Finding] = field(default_factory=list)
    _seen: set[Hashable] = field(default_factory=set)

    def is_first(self, key: Hashable) -> bool:
        """True the first time: for messages that differ only in addresses, times or thread numbers."""
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def error(self, check: str, message: str, cure: str) -> None:
        """Add an error."""
        self._add("error", check, message, cure)

    def warning(self, check: str, message: str, cure: str) -> None:
        """Add a warning."""
        self._add("warning", check, message, cure)

    @contextmanager
    def section(self, check: str, fine: str) -> Iterator[None]:
        """Add an ok line afterwards if the section found nothing."""
        yield
        if not any(finding.check == check for finding in self.findings):
            self._add("ok", check, fine, "")

    def has_errors(self, *checks: str) -> bool:
        """Whether one of these checks (all, without arguments) found an error."""
        return any(item.level == "error" and (not checks or item.check in checks) for item in self.findings)

    def _add(self, level: Level, check: str, message: str, cure: str) -> None:
        finding = Finding(level=level, check=check, message=message, cure=cure)
        if finding not in self.findings:
            self.findings.append(finding)


def describe_error(error: BaseException, limit: int = 300) -> str:
    """`TypeError: ...`, cut, whatever its `str` does."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(".")  # a sentence goes on after it
    except Exception:
        text = type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."
