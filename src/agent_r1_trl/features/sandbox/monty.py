"""The `monty` backend: a subset of Python in an interpreter of its own, which has no files, network or processes.

`pydantic-monty` runs each session in a small worker process. A snippet takes fractions of a millisecond; there are no
third-party packages and only a few modules of the standard library.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from agent_r1_trl.features.sandbox.base import Language, SandboxError, SandboxLimits, SandboxResult

MAX_WORKERS = 1024


class MontySandbox:
    """Runs Python in a monty session, which begins with the first call.

    Args:
        limits: `timeout_s`, `memory_mb`, `max_output_chars` and `start_timeout_s` apply.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._session: Any = None
        self._end: Any = None
        self._lock = threading.Lock()

    def run(self, code: str, language: Language = "python") -> SandboxResult:
        """Run one piece of Python code.

        Raises:
            SandboxError: no worker could be started.
            ValueError: `language` is not Python.
        """
        import pydantic_monty

        if language != "python":
            raise ValueError(f'language={language!r}: sandbox="monty" runs Python only; use "sandlock" or "limits".')
        with self._lock:
            if self._session is None:
                self._open()
            output = _Output(4 * self.limits.max_output_chars)
            began = time.monotonic()
            try:
                value = self._session.feed_run(code, print_callback=output.write)
            except pydantic_monty.MontyCrashedError as error:
                self._close_session()
                return SandboxResult(output=output.text, error=f"The interpreter ended: {error}", lost="variables")
            except pydantic_monty.MontyError as error:
                if "limit exceeded" in str(error) and time.monotonic() - began >= self.limits.timeout_s:
                    self._close_session()
                    text = f"Timeout: it ran for longer than {self.limits.timeout_s:g} s and was stopped."
                    return SandboxResult(output=output.text, error=text, lost="variables")
                return SandboxResult(output=output.text, error=_shorten(error))
        return SandboxResult(output=output.text, value=None if value is None else repr(value))

    def close(self) -> None:
        """End the session."""
        self._close_session()

    def _open(self) -> None:
        limits = {"max_feed_duration_secs": self.limits.timeout_s, "max_memory": self.limits.memory_mb << 20}
        try:
            session = _the_pool().checkout(limits=limits)
            session.__enter__()
        except Exception as error:
            raise SandboxError(f"no monty worker could be started: {type(error).__name__}: {error}") from error
        self._session = session
        self._end = weakref.finalize(self, session.__exit__, None, None, None)

    def _close_session(self) -> None:
        self._session = None
        if self._end is not None:
            self._end()


class _Output:
    """Keeps what is printed, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.text = ""
        self._limit = limit

    def write(self, stream: str, text: str) -> None:
        self.text += text[: max(0, self._limit - len(self.text))]


def _shorten(error: Any, limit: int = 3000) -> str:
    """The traceback as monty prints it, its end if it is long."""
    text = error.display()
    return text if len(text) <= limit else f"[...]{text[-limit:]}"


_pool: Any = None
_pool_lock = threading.Lock()


def _the_pool() -> Any:
    """This process's workers; one starts when a session needs it."""
    global _pool
    with _pool_lock:
        if _pool is None:
            import pydantic_monty

            _pool = pydantic_monty.Monty(max_processes=MAX_WORKERS, min_processes=0)
            _pool.__enter__()
        return _pool


def _forget_pool() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
