"""One thread for the plain calls of one environment, which SQLite connections and browsers demand of their users."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from agent_r1_trl.tools.pool import DaemonThreadPool, Job, PoolExhaustedError

T = TypeVar("T")


class OwnThread:
    """The thread of one environment. It is started by the first call, and ends with `end` or with this object.

    A call holds a place of a pool while it runs, so the pool's limits hold for all environments together. If a call is
    given up, the thread is left to it, and the next call gets a fresh one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """Calls that wait for the thread; None ends it."""
        self._last: Job | None = None
        self._end: Callable[[], Any] = lambda: None

    async def run(self, fn: Callable[[], T], *, pool: DaemonThreadPool, **limits: float | None) -> T:
        """Run `fn` and return its value; see `DaemonThreadPool.run`."""
        job = Job(fn)
        try:
            return await pool.run(functools.partial(self._do, job), **limits)
        finally:
            job.is_abandoned = True  # without effect on one that has ended

    def end(self) -> None:
        """Let the thread end after the call that it runs."""
        with self._lock:
            self._end()
            self._thread = None

    def _do(self, job: Job) -> Any:
        """On a thread of the pool, which waits for the own one."""
        with self._lock:
            busy = self._last if self._last is not None and not self._last.finished.done() else None
            is_inside = busy is not None and not busy.is_abandoned  # a call out of a call, which waits
            if not is_inside:
                if busy is not None or self._thread is None or not self._thread.is_alive():
                    self._start()
                self._last = job
                self._inbox.put(job)
        return job.fn() if is_inside else job.finished.result()

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


def _serve(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job.run()
        del job  # it holds the environment


own_thread: ContextVar[OwnThread | None] = ContextVar("own_thread", default=None)
"""The thread of the environment whose code this is."""


async def run_on_own_thread(fn: Callable[[], T], *, pool: DaemonThreadPool, **limits: float | None) -> T:
    """Run `fn` on the thread of the environment whose code this is; on one of the pool if there is none.

    `limits`: `timeout_s` and `queue_timeout_s` of `DaemonThreadPool.run`.
    """
    thread = own_thread.get()
    return await (pool.run(fn, **limits) if thread is None else thread.run(fn, pool=pool, **limits))
