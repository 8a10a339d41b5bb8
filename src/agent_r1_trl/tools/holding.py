"""Which call of user code holds an event loop, and for how long.

Everything on an event loop takes turns: an async tool that calls `time.sleep` stops all others until it returns. Here
every step of such a call is timed, so that a watchdog on another thread can name the call, and its caller can tell a
call that took too long from the ones that had to wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

owner_name: ContextVar[Callable[[], str] | None] = ContextVar("owner_name", default=None)
"""Names the trajectory and the turn that the calls of this context belong to."""
_current_call: ContextVar[LoopCall | None] = ContextVar("current_call", default=None)
_holders: dict[int, LoopCall] = {}
"""Thread -> the call that its event loop is running now."""


class LoopCall:
    """A call of user code on an event loop.

    Args:
        name: of the tool or method.
    """

    def __init__(self, name: str) -> None:
        self.held_s = 0.0
        """Seconds for which the call, with the tasks that it started, held the loop."""
        self._name = name
        self._owner = owner_name.get()

    @property
    def name(self) -> str:
        """The call, and the trajectory that it belongs to."""
        return self._name if self._owner is None else f"{self._name} of {self._owner()}"

    def timed(self, awaitable: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
        """The awaitable as a coroutine whose steps are timed."""
        return _Timed(self, awaitable if isinstance(awaitable, Coroutine) else _drive(awaitable))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The call holds the loop of this thread."""
        thread, began, token = threading.get_ident(), time.monotonic(), _current_call.set(self)
        outer = _holders.get(thread)
        _holders[thread] = self
        try:
            yield
        finally:
            self.held_s += time.monotonic() - began
            _current_call.reset(token)
            if outer is None:
                del _holders[thread]
            else:
                _holders[thread] = outer


def holder_of(thread: int) -> LoopCall | None:
    """The call that the event loop of a thread is running now; None if it runs none."""
    return _holders.get(thread)


def timed_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory: the steps of tasks that a call starts (`asyncio.gather`) count as steps of the call."""
    call = _current_call.get()
    if call is not None and isinstance(coroutine, Coroutine):
        coroutine = call.timed(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


async def _drive(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _Timed(Coroutine[Any, Any, Any]):
    """Passes everything on to a coroutine, inside `LoopCall.step`."""

    def __init__(self, call: LoopCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._call = call
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        with self._call.step():
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._call.step():
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)
