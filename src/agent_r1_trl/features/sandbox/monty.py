"""The `monty` backend: a subset of Python in an interpreter of its own, which has no files, network or processes.

`pydantic-monty` runs each session in a small worker process. A snippet takes fractions of a millisecond; there are no
third-party packages and only a few modules of the standard library.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from agent_r1_trl.features.sandbox.base import Language, SandboxError, SandboxLimits, SandboxResult

MAX_WORKERS = 1024
MAX_ERROR_CHARS = 3000


class MontySandbox:
    """Runs Python in a monty session, which begins with the first call.

    Args:
        limits: `timeout_s`, `memory_mb` and `max_output_chars` apply.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._session: Any = None
        self._lock = threading.Lock()

    def run(self, code: str, language: Language = "python") -> SandboxResult:
        """Run one piece of Python code.

        Raises:
            SandboxError: no worker could be started.
        """
        import pydantic_monty

        printed, room = [""], 4 * self.limits.max_output_chars

        def keep(stream: str, text: str) -> None:
            printed[0] += text[: max(0, room - len(printed[0]))]

        with self._lock:
            session = self._session = self._session or self._open()
            began = time.monotonic()
            try:
                value = session.feed_run(code, print_callback=keep)
            except pydantic_monty.MontyCrashedError as error:
                self.close()
                return SandboxResult(output=printed[0], error=f"The interpreter ended: {error}", lost="variables")
            except pydantic_monty.MontyError as error:
                if "limit exceeded" in str(error) and time.monotonic() - began >= self.limits.timeout_s:
                    self.close()
                    text = f"Timeout: it ran for longer than {self.limits.timeout_s:g} s and was stopped."
                    return SandboxResult(output=printed[0], error=text, lost="variables")
                text = error.display()
                text = text if len(text) <= MAX_ERROR_CHARS else f"[...]{text[-MAX_ERROR_CHARS:]}"
                return SandboxResult(output=printed[0], error=text)
        try:
            return SandboxResult(output=printed[0], value=None if value is None else repr(value))
        except ValueError as error:  # a number of more than 4,300 digits
            return SandboxResult(output=printed[0], error=f"ValueError: {error}")

    def close(self) -> None:
        """End the session; a call that is running comes to its end first."""
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(None, None, None)

    def _open(self) -> Any:
        limits = {"max_feed_duration_secs": self.limits.timeout_s, "max_memory": self.limits.memory_mb << 20}
        try:
            session = _the_pool().checkout(limits=limits)
            session.__enter__()
        except Exception as error:
            raise SandboxError(f"no monty worker could be started: {type(error).__name__}: {error}") from error
        return session


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
