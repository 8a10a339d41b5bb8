"""One trajectory's sandbox: made with its first call, one of a bounded number, freed with the trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from agent_r1_trl.features.sandbox.base import Language, Sandbox, SandboxError, SandboxResult


class Places:
    """A bounded number of places for open sandboxes; who finds none waits in line, without a thread.

    Args:
        limit: number of places.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_free = limit
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    async def take(self, timeout_s: float) -> None:
        """Wait for a place.

        Raises:
            SandboxError: none became free in time.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._num_free > 0:
                self._num_free -= 1
                return
            ticket = (loop, loop.create_future())
            self._waiting.append(ticket)
        try:
            granted, _ = await asyncio.wait({ticket[1]}, timeout=timeout_s)
        except BaseException:
            self._give_up(ticket)
            raise
        if not granted:
            self._give_up(ticket)
            raise SandboxError(
                f"all {self.limit} sandboxes were in use for {timeout_s:g} s: raise max_sandboxes, or lower the "
                "number of trajectories that run at once."
            )

    def take_now(self) -> None:
        """Take a place whether or not one is free."""
        with self._lock:
            self._num_free -= 1

    def release(self) -> None:
        """Give a place back."""
        with self._lock:
            while self._waiting and self._num_free >= 0:
                loop, future = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    loop.call_soon_threadsafe(self._grant, future)
                    return
            self._num_free += 1

    def _grant(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self.release()
        else:
            future.set_result(None)

    def _give_up(self, ticket: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return
        # It was granted at the same moment: either the grant has arrived, or it will find the future cancelled.
        if not ticket[1].cancel():
            self.release()


_places: dict[int, Places] = {}
_places_lock = threading.Lock()


def shared_places(limit: int) -> Places:
    """The process's places of this number, shared by all tools."""
    with _places_lock:
        return _places.setdefault(limit, Places(limit))


class Session:
    """The sandbox of one trajectory.

    Args:
        make: makes the sandbox.
        max_sandboxes: maximum number of open sandboxes in this process.
        wait_s: maximum seconds to wait for a place.
        run_in_thread: runs a function on a thread, for the event loop.
    """

    def __init__(
        self, make: Callable[[], Sandbox], *, max_sandboxes: int, wait_s: float, run_in_thread: Callable[..., Any]
    ) -> None:
        self._arguments: dict[str, Any] = {
            "make": make, "max_sandboxes": max_sandboxes, "wait_s": wait_s, "run_in_thread": run_in_thread,
        }  # fmt: skip
        self._make = make
        self._places = shared_places(max_sandboxes)
        self._wait_s = wait_s
        self._run_in_thread = run_in_thread
        self._sandbox: Sandbox | None = None
        self._end: Any = None

    def another(self) -> Session:
        """A closed session with the same settings."""
        return Session(**self._arguments)

    def __deepcopy__(self, memo: Any) -> Session:
        return self.another()  # a copy of an environment is another trajectory

    async def run(self, code: str, language: Language) -> SandboxResult:
        """Run one piece of code on a thread.

        Raises:
            SandboxError: there is no sandbox for it.
        """
        if self._sandbox is None:
            await self._places.take(self._wait_s)
            self._open()
        sandbox = self._sandbox
        assert sandbox is not None
        # The function holds no reference to the session: a thread keeps its last function until it gets another.
        return await self._run_in_thread(lambda: _run(sandbox, code, language))

    def run_now(self, code: str, language: Language) -> SandboxResult:
        """Run code on the calling thread, without waiting for a place."""
        if self._sandbox is None:
            self._places.take_now()
            self._open()
        assert self._sandbox is not None
        return _run(self._sandbox, code, language)

    def close(self) -> None:
        """Close the sandbox and give its place back; the next call opens another one."""
        self._sandbox = None
        if self._end is not None:
            self._end()

    def _open(self) -> None:
        try:
            sandbox = self._make()
        except BaseException as error:
            self._places.release()
            if isinstance(error, SandboxError) or not isinstance(error, Exception):
                raise
            raise SandboxError(f"the sandbox could not be made: {type(error).__name__}: {error}") from error
        self._sandbox = sandbox
        self._end = weakref.finalize(self, _close, sandbox, self._places)


def _run(sandbox: Sandbox, code: str, language: Language) -> SandboxResult:
    try:
        result = sandbox.run(code, language)
    except SandboxError:
        raise
    except Exception as error:  # of a backend of the user's own: a lost connection, say
        raise SandboxError(f"{type(sandbox).__name__}.run raised {type(error).__name__}: {error}") from error
    if not isinstance(result, SandboxResult):
        raise SandboxError(f"{type(sandbox).__name__}.run returned {result!r:.200}. Return a SandboxResult.")
    return result


def _close(sandbox: Sandbox, places: Places) -> None:
    try:
        sandbox.close()
    finally:
        places.release()
