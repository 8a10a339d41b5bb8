"""Sessions with servers of MCP, on a thread of their own.

A session has to end in the task that began it, and rollouts and their event loops come and go. So one thread of the
process has a loop that holds all sessions, each in a task. Calls come from any loop or thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TextIO, TypeVar

from agent_r1_trl.tools import InfrastructureError
from agent_r1_trl.tools.faults import HandledError
from agent_r1_trl.tools.pool import JobTimeoutError

T = TypeVar("T")

CONNECTION_CLOSED = -32000
"""MCP's code for requests that were in flight when their connection ended."""
ANSWER_S = 10.0
"""Seconds in which a server that has refused a call has to list its tools; else it is gone."""
END_S = 10.0
"""Seconds that all sessions have to end when the process does; mcp gives a command 4 of them."""
MAX_ERROR_CHARS = 800
_lock = threading.Lock()


def session_loop() -> asyncio.AbstractEventLoop:
    """The loop that holds the sessions of this process; a fork has its own."""
    with _lock:
        return _loop_of(os.getpid())


@functools.cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    atexit.register(_end_all, loop, pid)
    return loop


def _end_all(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End the sessions when the process ends, and with them the processes of those that are commands."""

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == HeldSession.__name__]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks or [asyncio.create_task(asyncio.sleep(0))])

    with contextlib.suppress(Exception):
        if pid == os.getpid():
            asyncio.run_coroutine_threadsafe(end(), loop).result(END_S)


class HeldSession:
    """An open session, and the task in which it begins and ends."""

    def __init__(self, name: str, connect: Callable[[TextIO], Any], timeout_s: float) -> None:
        self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.client: asyncio.Future[Any] = self.loop.create_future()
        """The `mcp.Client`, or the `InfrastructureError` that says why there is none."""
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())  # nobody may look
        self.is_lost = False
        # It outlives the call that begins it, and has none of its variables.
        holding = self._hold(name, connect, timeout_s)
        self._task = self.loop.create_task(holding, name=HeldSession.__name__, context=contextvars.Context())

    def end(self) -> None:
        """End it; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._over.set)

    def lose(self, error: InfrastructureError) -> HeldSession:
        """Let further requests hear why there is none."""
        self.is_lost, self.client = True, self.loop.create_future()
        self.client.set_exception(error)
        return self

    async def _hold(self, name: str, connect: Callable[[TextIO], Any], timeout_s: float) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as written:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(timeout_s):
                        client = await stack.enter_async_context(connect(written))
                    self.client.set_result(client)
                    await self._over.wait()
            except BaseException as error:  # the ends of broken connections too
                if not self.client.done():
                    written.seek(0)
                    said = written.read()[-MAX_ERROR_CHARS:].strip()
                    told = f"MCP server {name} cannot be reached (connect_timeout_s={timeout_s:g}): {_told(error)}"
                    told += f"; it wrote: {said}." if said else "."
                    self.client.set_exception(InfrastructureError(f"{told} Start it, or correct server=..."))


class ServerSession:
    """One session with a server at a time, which begins with the first request.

    Args:
        name: of the server, in messages.
        connect: makes the `mcp.Client`, from a file for what a command writes to its error output.
        connect_timeout_s: maximum seconds until it is connected.
        is_renewed: whether another session follows one that was lost; False if sessions have state.
    """

    def __init__(
        self, name: str, connect: Callable[[TextIO], Any], connect_timeout_s: float, is_renewed: bool
    ) -> None:
        self._name, self._connect, self._is_renewed = name, connect, is_renewed
        self._connect_timeout_s = connect_timeout_s
        self._held: HeldSession | None = None

    async def ask(self, what: str, request: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """The answer to a request, which is a function of the `mcp.Client`. Runs on the session loop.

        Raises:
            InfrastructureError: the server cannot be reached, or went away.
            JobTimeoutError: it has not answered in time.
            HandledError: it refused the request.
            Exception: what else the request raised while the server is well.
        """
        held = self._open()
        opened = held.client
        try:
            client = await asyncio.shield(opened)
            async with asyncio.timeout(timeout_s) as limit:
                return await request(client)
        except Exception as error:
            if opened.exception() is not None:
                self._drop(held)
                failure: Exception = error
            elif limit.expired():
                if self._is_renewed:  # one that hangs as a whole gets another session
                    self._checking = asyncio.create_task(self._is_gone(held, self._connect_timeout_s))
                failure = JobTimeoutError(f"{what} took longer than {timeout_s:g} s and was given up.")
            else:
                failure = await self._explain(held, what, error)
            failure.__cause__ = error if failure is not error else error.__cause__
        raise failure

    def close(self) -> None:
        """End the session; a further request begins another one. From any thread."""
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _open(self) -> HeldSession:
        if self._held is None or self._held.loop is not session_loop():  # of the process that this one is a fork of
            self._held = HeldSession(self._name, self._connect, self._connect_timeout_s)
            weakref.finalize(self, self._held.end).atexit = False
        return self._held

    async def _explain(self, held: HeldSession, what: str, error: Exception) -> Exception:
        """What a request raises that has failed in time."""
        if getattr(error, "code", None) == CONNECTION_CLOSED or await self._is_gone(held, ANSWER_S):
            self._drop(held)
            told = f"MCP server {self._name} went away ({_told(error)})."
            if self._is_renewed:
                return InfrastructureError(told)
            lost = InfrastructureError(f"{told} The state of the trajectory went with it.")
            self._held = held.lose(lost)
            return lost
        return HandledError(f"{what} failed: {error}") if type(error).__name__ == "MCPError" else error

    async def _is_gone(self, held: HeldSession, timeout_s: float) -> bool:
        """Whether a server no longer lists its tools; its session is left then."""
        try:
            async with asyncio.timeout(timeout_s):
                await held.client.result().session.list_tools()
                return False
        except Exception:
            self._drop(held)
            return True

    def _drop(self, held: HeldSession) -> None:
        held.end()
        if self._held is held and not held.is_lost:
            self._held = None


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
