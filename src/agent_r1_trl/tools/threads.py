"""One thread for the plain calls of one environment, which SQLite connections and browsers demand of their users."""

from __future__ import annotations

import contextvars
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

from agent_r1_trl.tools.pool import DaemonThreadPool, PoolExhaustedError, prepare_thread

T = TypeVar("T")


class OwnThread:
    """The thread of one environment. It is started by the first call, and ends with `end` or with this object.

    A call holds a place of a pool while it runs, so the pool's limits hold for all environments together. If a call is
    given up, the thread is left to it, and the next call gets a fresh one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls that wait for the thread; None ends it."""
        self._call: _Call | None = None
        """The last one."""
        self._end: Callable[[], Any] = lambda: None

    async def run(
        self,
        fn: Callable[[], T],
        *,
        pool: DaemonThreadPool,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> T:
        """Run `fn` and return its value; see `DaemonThreadPool.run`."""
        call = _Call(fn)
        try:
            work = functools.partial(self._do, call)
            return await pool.run(work, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
        finally:
            call.is_given_up = True  # without effect on one that has ended

    def end(self) -> None:
        """Let the thread end after the call that it runs."""
        with self._lock:
            self._end()
            self._thread = None

    def _do(self, call: _Call) -> Any:
        """On a thread of the pool, which waits for the own one."""
        with self._lock:
            last = self._call
            is_busy = last is not None and not last.outcome.done()
            is_inside = is_busy and last is not None and not last.is_given_up  # a call out of a call, which waits
            if not is_inside:
                if is_busy or self._thread is None or not self._thread.is_alive():
                    self._start()
                self._call = call
                self._inbox.put(call)
        return call.fn() if is_inside else call.outcome.result()

    def _start(self) -> None:
        self._end()
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._inbox,), name="environment", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self._thread = None
            raise PoolExhaustedError("the system has no more threads") from error
        self._end = weakref.finalize(self, self._inbox.put, None)


class _Call:
    """A function to call, with the context variables of where it was asked for."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn: Callable[[], Any] = functools.partial(contextvars.copy_context().run, fn)
        self.outcome: Future[Any] = Future()
        self.is_given_up = False

    def run(self) -> None:
        try:
            prepare_thread()
            self.outcome.set_result(self.fn())
        except BaseException as error:  # SystemExit too: it would end the thread and leave the caller waiting
            self.outcome.set_exception(error)


def _serve(inbox: queue.SimpleQueue[_Call | None]) -> None:
    while (call := inbox.get()) is not None:
        call.run()
        del call  # it holds the environment


own_thread: ContextVar[OwnThread | None] = ContextVar("own_thread", default=None)
"""The thread of the environment whose code this is."""


async def run_on_own_thread(
    fn: Callable[[], T],
    *,
    pool: DaemonThreadPool,
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
) -> T:
    """Run `fn` on the thread of the environment whose code this is; on one of the pool if there is none."""
    thread = own_thread.get()
    if thread is None:
        return await pool.run(fn, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
    return await thread.run(fn, pool=pool, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
