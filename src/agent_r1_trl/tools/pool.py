"""A pool of daemon threads for code that may never return.

`concurrent.futures` joins its threads when the interpreter exits, and a hanging job occupies its worker for ever. Here
a job that took too long is *abandoned*: its thread goes on (Python cannot stop it), but it no longer holds one of the
`max_workers` places and does not keep the process alive. A job that runs for long while others wait for a place lends
its place to them, so jobs without a timeout cannot hold up the others either.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from agent_r1_trl.settings import Count, check_value

T = TypeVar("T")

POKE_S = 1.0
"""Seconds after which a job that waits for a place looks whether one can be made."""
PATIENCE_S = 30.0
"""Seconds that a job may hold its place while others wait."""


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


class Job(Generic[T]):
    """One function call in the pool. Its two futures belong to the event loop that submitted it."""

    def __init__(self, fn: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.started: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[T] = loop.create_future()
        self.is_running = False
        self.is_abandoned = False
        self.holds_place = False
        self.start_time = math.inf
        self.seconds = 0.0
        """How long the function ran."""
        self._fn = fn
        self._loop = loop
        self._context = contextvars.copy_context()

    def run(self) -> None:
        """Run the function; called by the worker thread."""
        self._notify(_resolve, self.started, None)
        began = time.monotonic()
        try:
            try:
                prepare_thread()
                value = self._context.run(self._fn)
            finally:
                self.seconds = time.monotonic() - began
        except BaseException as error:  # SystemExit too: it would end the worker and leave the caller waiting
            self.fail(error)
        else:
            self._notify(_resolve, self.finished, value)

    def fail(self, error: BaseException) -> None:
        """Pass an error to the caller that waits for the job."""
        if isinstance(error, StopIteration):  # a future does not accept it
            error = RuntimeError("the function raised StopIteration")
        self._notify(_reject, self.started, error)
        self._notify(_reject, self.finished, error)

    def _notify(self, action: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits any more
            self._loop.call_soon_threadsafe(action, *args)


class DaemonThreadPool:
    """Runs at most `max_workers` jobs at a time, not counting abandoned ones, on threads created when needed.

    Args:
        max_workers: number of places; further jobs wait in the order of their submission.
        max_abandoned: maximum number of running jobs, abandoned or slow, whose places are given to others (default: 8
            times `max_workers`). It bounds the number of threads of a process whose tools hang.
        name: prefix of the threads' names.

    Raises:
        ValueError: `max_workers` is not an integer >= 1.
    """

    def __init__(self, max_workers: int, *, max_abandoned: int | None = None, name: str = "tool") -> None:
        check_value("max_workers", max_workers, Count)
        self.max_workers = max_workers
        self.max_abandoned = 8 * max_workers if max_abandoned is None else max_abandoned
        self._name = name
        self._condition = threading.Condition()
        self._queue: deque[Job[Any]] = deque()
        self._running: set[Job[Any]] = set()  # jobs that hold a place
        self._num_idle = 0
        self._num_places = 0  # worker threads that hold a place, idle ones included
        self._num_abandoned = 0

    async def run(
        self, fn: Callable[[], T], *, timeout_s: float | None = None, queue_timeout_s: float | None = None
    ) -> T:
        """Run `fn` on a thread and return its value.

        Args:
            fn: function to call.
            timeout_s: maximum seconds that it may run, not counting its wait for a place; None for no limit.
            queue_timeout_s: maximum seconds that it may wait for a place; None for no limit.

        Raises:
            JobTimeoutError: the job ran for longer than `timeout_s` and was abandoned.
            PoolExhaustedError: no place became free in time, or none ever will.
            BaseException: whatever `fn` raised.
        """
        job = self.submit(fn)
        try:
            await self._wait_for_place(job, queue_timeout_s)
            done, _ = await asyncio.wait({job.finished}, timeout=timeout_s)
            # A function that keeps the interpreter's lock keeps its own timeout from being noticed.
            if not done or (timeout_s is not None and job.seconds > timeout_s):
                raise JobTimeoutError
            return job.finished.result()
        finally:
            if not job.finished.done():
                self.abandon(job)
            elif not job.finished.cancelled():
                job.finished.exception()  # marks the exception as retrieved
            if job.started.done() and not job.started.cancelled():
                job.started.exception()

    async def _wait_for_place(self, job: Job[Any], queue_timeout_s: float | None) -> None:
        end = math.inf if queue_timeout_s is None else time.monotonic() + queue_timeout_s
        while not job.started.done():
            wait_s = min(POKE_S, max(0.0, end - time.monotonic()))
            await asyncio.wait({job.started}, timeout=wait_s)
            if job.started.done():
                break
            if time.monotonic() >= end:
                raise PoolExhaustedError(f"no thread was free for {queue_timeout_s:g} s")
            self._make_room()
        job.started.result()

    def _make_room(self) -> None:
        """Start a thread that could not be started before, and lend the place of a job that has run for long."""
        with self._condition:
            if self._num_places >= self.max_workers:
                slow = [job for job in self._running if time.monotonic() - job.start_time >= PATIENCE_S]
                for job in slow[: len(self._queue) - self._num_idle]:
                    self._give_place_away(job)
            self._start_worker()

    def submit(self, fn: Callable[[], T]) -> Job[T]:
        """Queue `fn`; must be called from a running event loop."""
        job = Job(fn, asyncio.get_running_loop())
        with self._condition:
            if self._is_exhausted():
                job.fail(PoolExhaustedError(self._exhausted_message()))
                return job
            self._queue.append(job)
            if self._num_idle >= len(self._queue):
                self._condition.notify()
            else:
                self._start_worker()
        return job

    def abandon(self, job: Job[Any]) -> None:
        """Stop waiting for a job: a queued job never runs, a running one gives up its place if a spare is left."""
        with self._condition:
            if job.is_abandoned:
                return
            job.is_abandoned = True
            if not job.is_running:
                if job in self._queue:
                    self._queue.remove(job)
                return
            if not self._give_place_away(job) and self._is_exhausted():
                waiting, self._queue = list(self._queue), deque()
                for other in waiting:
                    other.fail(PoolExhaustedError(self._exhausted_message()))

    def _give_place_away(self, job: Job[Any]) -> bool:
        """Let another job have the place of one that goes on running; False if no spare thread is left."""
        if job not in self._running or self._num_abandoned >= self.max_abandoned:
            return False
        self._running.discard(job)
        job.holds_place = False
        self._num_abandoned += 1
        self._num_places -= 1
        self._start_worker()
        return True

    def _start_worker(self) -> None:
        """Start a thread if a job waits for one and a place is free.

        Where the system has no more threads, the job stays in the queue: for a thread that becomes idle, or for
        `_make_room`.
        """
        if self._num_idle >= len(self._queue) or self._num_places >= self.max_workers:
            return
        try:
            threading.Thread(target=self._work, name=f"{self._name}-worker", daemon=True).start()
        except (RuntimeError, MemoryError):  # can't start new thread
            return
        self._num_places += 1  # after the start: the new thread waits for the lock that is held here

    def _is_exhausted(self) -> bool:
        return len(self._running) >= self.max_workers and all(job.is_abandoned for job in self._running)

    def _exhausted_message(self) -> str:
        return f"{self._num_abandoned + len(self._running)} earlier calls hang and never returned"

    def _work(self) -> None:
        while True:
            with self._condition:
                self._num_idle += 1
                while not self._queue:
                    self._condition.wait()
                self._num_idle -= 1
                job = self._queue.popleft()
                job.is_running = job.holds_place = True
                job.start_time = time.monotonic()
                self._running.add(job)
            job.run()
            with self._condition:
                self._running.discard(job)
                if not job.holds_place:  # another thread has taken the place of this one
                    self._num_abandoned -= 1
                    return
            del job  # it holds the environment, and the next one may be long in coming


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
