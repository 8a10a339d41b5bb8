"""Daemon threads for code that may never return.

`concurrent.futures` joins its threads when the interpreter exits, and a hanging job occupies its worker for ever. Here
a job that took too long is *abandoned*: its thread goes on (Python cannot stop it), but it no longer holds one of the
`max_workers` places and does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar
from typing import Any, TypeVar

from agent_r1_trl.settings import Count, check_value
from agent_r1_trl.tools.variables import Changes, changes_since, set_all

T = TypeVar("T")

POKE_S = 1.0
"""Seconds after which a job that waits for a place looks whether the system has threads again."""

_preparations: list[Callable[[], Any]] = []


def prepare_threads_with(prepare: Callable[[], Any]) -> None:
    """Have a function called on each thread before it runs a user's code; it replaces an earlier one.

    A trainer makes its rank's GPU the current one there: CUDA keeps that per thread, and begins with the first GPU.
    """
    _preparations[:] = [prepare]


def prepare_thread() -> None:
    """Call it, if there is one."""
    for prepare in _preparations:
        prepare()


class JobTimeoutError(RuntimeError):
    """A job took longer than its timeout (not a `TimeoutError`, which the job itself may raise)."""


class PoolExhaustedError(RuntimeError):
    """No thread was free: jobs that never returned hold them all, or the wait for one was too long."""


class Job:
    """One function call, with the context variables of where it was asked for, which it may change.

    Args:
        fn: the function.
        thread: the only thread that may run it; None: a new one.
    """

    def __init__(self, fn: Callable[[], Any], thread: OwnThread | None = None) -> None:
        self.placed: Future[None] = Future()
        self.finished: Future[Any] = Future()
        for future in (self.placed, self.finished):
            future.set_running_or_notify_cancel()  # so that nobody who waits can cancel it
        self.is_abandoned = False
        self.seconds = 0.0
        """How long the function ran."""
        self.fn = fn
        self.thread = thread
        self.before = contextvars.copy_context()
        self.context = self.before.copy()
        """In which the function runs; an environment's thread has its own."""
        self.changes: Changes = []
        """The variables that the function has set."""

    def run(self) -> None:
        """Run the function; called by the thread that does the work."""
        began = time.monotonic()
        try:
            prepare_thread()
            fn = self.fn
            del self.fn  # a context that something copied may keep the job, but not the environment
            try:
                self.context.run(set_all, changes_since(self.context, self.before))
                value = self.context.run(fn)
            finally:
                self.changes = changes_since(self.before, self.context)
                del self.before, self.context
        except BaseException as error:  # SystemExit too: it would end the worker and leave the caller waiting
            self.seconds = time.monotonic() - began
            is_accepted = not isinstance(error, StopIteration)  # which no future of asyncio takes
            self.finished.set_exception(error if is_accepted else RuntimeError("the function raised StopIteration"))
        else:
            self.seconds = time.monotonic() - began
            self.finished.set_result(value)

    def refuse(self, reason: str) -> None:
        """Tell the caller that it will never run."""
        self.finished.set_exception(PoolExhaustedError(reason))
        self.placed.set_result(None)


class DaemonThreadPool:
    """Runs at most `max_workers` jobs at a time, not counting abandoned ones, each on a thread that ends with it.

    Args:
        max_workers: number of places; further jobs wait in the order of their submission.
        max_abandoned: maximum number of abandoned jobs whose places are given to others (default: 8 times
            `max_workers`). It bounds the number of threads of a process whose tools hang.
    """

    def __init__(self, max_workers: int, *, max_abandoned: int | None = None) -> None:
        check_value("max_workers", max_workers, Count)
        self.max_workers = max_workers
        self.max_abandoned = 8 * max_workers if max_abandoned is None else max_abandoned
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        """Jobs that hold a place."""
        self._num_abandoned = 0
        """Others that run."""

    async def run(
        self,
        fn: Callable[[], T],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        thread: OwnThread | None = None,
    ) -> T:
        """Run `fn` on a thread and return its value.

        The context variables that `fn` sets are set here as well when it has ended, unless it was abandoned.
        `timeout_s` is the longest that it may run, `queue_timeout_s` that it may wait for a place before; None for no
        limit. `thread` is an environment's, which takes a place of the pool while it works.

        Raises:
            JobTimeoutError: the job ran for longer than `timeout_s` and was abandoned.
            PoolExhaustedError: no place became free in time, or none ever will.
            BaseException: whatever `fn` raised.
        """
        job = Job(fn, thread)
        finished = asyncio.wrap_future(job.finished)
        try:
            await self._wait_for_place(job, queue_timeout_s)
            done, _ = await asyncio.wait({finished}, timeout=timeout_s)
            # A function that keeps the interpreter's lock keeps its own timeout from being noticed.
            if not done or (timeout_s is not None and job.seconds > timeout_s):
                raise JobTimeoutError
            set_all(job.changes)
            value: T = finished.result()
            return value
        finally:
            if not job.finished.done():
                self._abandon(job)
            if not finished.cancel():
                finished.exception()  # marks it as retrieved

    async def _wait_for_place(self, job: Job, queue_timeout_s: float | None) -> None:
        with self._lock:
            self._queue.append(job)
            self._serve()
        if job.placed.done():
            return
        end = math.inf if queue_timeout_s is None else time.monotonic() + queue_timeout_s
        placed = asyncio.wrap_future(job.placed)
        try:
            while not job.placed.done():
                await asyncio.wait({placed}, timeout=min(POKE_S, max(0.0, end - time.monotonic())))
                if not job.placed.done() and time.monotonic() >= end:
                    raise PoolExhaustedError(f"no thread was free for {queue_timeout_s:g} s")
                with self._lock:
                    self._serve()
        finally:
            placed.cancel()

    def _serve(self) -> None:
        """Start jobs that wait, while places are free; where the system has no more threads, they wait on.

        If each place is held by a job that was abandoned, the jobs that wait are refused.
        """
        while self._queue and len(self._running) < self.max_workers:
            job = self._queue[0]
            work = functools.partial(self._work, job)
            try:
                if job.thread is None or not job.thread.take(job, work):
                    threading.Thread(target=work, name="tool-worker", daemon=True).start()
            except (RuntimeError, MemoryError):  # can't start new thread
                return
            self._running.add(self._queue.popleft())
            job.thread = None  # which holds the job, and ends when nobody holds it
            job.placed.set_result(None)
        if all(job.is_abandoned for job in self._running):
            while self._queue:
                num_hanging = self._num_abandoned + len(self._running)
                self._queue.popleft().refuse(f"{num_hanging} earlier calls hang and never returned")

    def _work(self, job: Job) -> None:
        job.run()
        with self._lock:
            if job in self._running:
                self._running.discard(job)
            else:  # another job has its place
                self._num_abandoned -= 1
            self._serve()

    def _abandon(self, job: Job) -> None:
        """Stop waiting for a job: a queued job never runs, a running one gives up its place if a spare is left."""
        with self._lock:
            if job in self._queue:
                self._queue.remove(job)
            elif job in self._running:
                job.is_abandoned = True
                if self._num_abandoned < self.max_abandoned:
                    self._running.discard(job)
                    self._num_abandoned += 1
                self._serve()


_pools: dict[int, DaemonThreadPool] = {}
_pools_lock = threading.Lock()


def shared_pool(max_workers: int) -> DaemonThreadPool:
    """The process's pool with this number of places, shared by all trajectories."""
    with _pools_lock:
        if max_workers not in _pools:
            _pools[max_workers] = DaemonThreadPool(max_workers)
        return _pools[max_workers]


def _forget_pools() -> None:
    # Threads do not survive a fork, and the lock may have been held by one of them.
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_pools)


# -------------------------------------------------------------------- one thread for one environment


class OwnThread:
    """The thread of one environment, as SQLite connections and browsers demand of their users.

    It is started by the first call, and ends with `end` or with this object.

    A call holds a place of a pool while it runs, so the pool's limits hold for all environments together. If a call is
    given up, the thread is left to it, and the next call gets a fresh one.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        """In which async methods of the environment run, all on one event loop; None: it has none of its own."""
        self._context: Context | None = None
        """In which the calls on the thread run, one after another: a token of one of them is good in the next."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls that wait for the thread; None ends it."""
        self._last: Job | None = None
        self._end: Callable[[], Any] = lambda: None

    def take(self, job: Job, work: Callable[[], None]) -> bool:
        """Have the thread do the work of a job; False if it waits for this very job, which a call on it asked for.

        Raises:
            RuntimeError: the system has no more threads.
        """
        with self._lock:
            busy = self._last if self._last is not None and not self._last.finished.done() else None
            if busy is not None and not busy.is_abandoned:
                return False
            if busy is not None or self._context is None:
                self._context = job.context
            job.context = self._context
            if busy is not None or self._thread is None or not self._thread.is_alive():
                self._start()
            self._last = job
            self._inbox.put(work)
            return True

    def end(self) -> None:
        """Let the thread end after the call that it runs."""
        with self._lock:
            self._end()
            self._thread = self._context = self.context = None  # the contexts hold this object

    def _start(self) -> None:
        self._end()
        self._inbox = queue.SimpleQueue()
        self._thread = None
        thread = threading.Thread(target=_serve, args=(self._inbox,), name="environment", daemon=True)
        thread.start()
        self._thread = thread
        self._end = weakref.finalize(self, self._inbox.put, None)


def _serve(inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := inbox.get()) is not None:
        work()
        del work  # it holds the environment


own_thread: ContextVar[OwnThread | None] = ContextVar("own_thread", default=None)
"""The thread of the environment whose code this is, if there is one; for `DaemonThreadPool.run`."""


def own_context() -> Context | None:
    """The context of that environment's async methods, for a task that is one of them; None: a copy of this one."""
    own = own_thread.get()
    return None if own is None else own.context
