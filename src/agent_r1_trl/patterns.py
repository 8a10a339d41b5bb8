"""Regular expressions that come with a model, a tool or a user and run on text that a model wrote.

A pattern such as `^(a+)+$` needs exponential time on the wrong text, and Python's `re` holds up the whole process for
it. These run with a limit, and `PatternTimeoutError` names the pattern.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

logger = logging.getLogger(__name__)

LIMIT_S = 2.0
"""Seconds that a pattern may take on one text; those of all searches inside `time_limit` count together."""
_until: ContextVar[float | None] = ContextVar("until", default=None)
_named: set[str] = set()


class PatternTimeoutError(ValueError):
    """A pattern took too long on a text."""


class Match(Protocol):
    """A match; of `re` or of `regex`."""

    def __getitem__(self, group: int) -> str: ...
    def start(self) -> int:
        """Where it begins."""

    def end(self) -> int:
        """Where it ends."""


class TimedPattern:
    """A compiled pattern whose searches end; as `re.Pattern` otherwise.

    Args:
        pattern: a regular expression, with the syntax of the package `regex`.
        ignore_case: whether letters of both cases are the same.
        dot_all: whether a dot is a newline as well.

    Raises:
        ValueError: it is no regular expression.
    """

    def __init__(self, pattern: str, *, ignore_case: bool = False, dot_all: bool = False) -> None:
        self.pattern = pattern
        flags = "i" * ignore_case + "s" * dot_all
        self._compiled = _compile(f"(?{flags}){pattern}" if flags else pattern)

    def search(self, text: str, position: int = 0) -> Match | None:
        """The first match from `position` on, or None."""
        found: Match | None = self._run(lambda timeout: self._compiled.search(text, position, timeout=timeout))
        return found

    def finditer(self, text: str) -> Iterator[Match]:
        """All matches; they are found when this is called."""
        return iter(self._run(lambda timeout: list(self._compiled.finditer(text, timeout=timeout))))

    def sub(self, replacement: str, text: str) -> str:
        """The text with all matches replaced; `replacement` is taken as it is."""
        found: str = self._run(lambda timeout: self._compiled.sub(lambda match: replacement, text, timeout=timeout))
        return found

    def _run(self, search: Callable[[float], Any]) -> Any:
        until = _until.get()
        left = LIMIT_S if until is None else until - time.thread_time()
        try:
            if left <= 0:
                raise TimeoutError
            return search(left)
        except TimeoutError:
            raise PatternTimeoutError(
                f"the pattern {self.pattern!r} took longer than {LIMIT_S:g} s on one text. Write it so that no part "
                "can match in many ways, such as a+ in place of (a+)+."
            ) from None


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Let all searches inside take `LIMIT_S` together."""
    token = _until.set(time.thread_time() + LIMIT_S)
    try:
        yield
    finally:
        _until.reset(token)


def warn_once(error: PatternTimeoutError, place: str) -> None:
    """Name a pattern that took too long, the first time that it does."""
    text = f"{place}: {error}"
    if text not in _named:
        _named.add(text)
        logger.warning(text)


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> Any:
    import regex  # type: ignore[import-untyped]

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error})") from error
