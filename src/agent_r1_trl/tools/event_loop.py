"""Event loops on daemon threads that the whole process shares, so that a client in a module meets one loop.

Connections, locks and queues of asyncio belong to the loop on which they were first used. So the checks of an
environment, all rollouts and all evaluations run on one loop, which lives as long as the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from agent_r1_trl.tools.pool import prepare_thread

T = TypeVar("T")
logger = logging.getLogger(__name__)

ROLLOUT = "rollout"
"""Name of the loop on which environments and tools run."""
END_TIMEOUT_S = 60.0
"""Seconds that what runs on a loop has to end when it is cancelled."""
EXIT_S = 10.0
"""Seconds that it has when the process ends; mcp gives a command 4 of them."""
ANSWER_S = 1.0
"""Seconds in which a loop that no call holds answers."""


class LoopThread(threading.Thread):
    """An event loop, and the thread on which it runs."""

    def __init__(self, name: str = ROLLOUT) -> None:
        super().__init__(name=name, daemon=True)
        self.loop, self._is_over = asyncio.new_event_loop(), False
        self.runs: set[asyncio.Task[Any]] = set()
        """Tasks on it that `retire` lets end by themselves."""
        self.start()

    def run(self) -> None:
        """The thread's own."""
        prepare_thread()
        self.loop.run_forever()
        while not self._is_over:
            logger.warning("A tool or environment stopped the event loop of the rollout; it goes on.")
            self.loop.run_forever()
        self.loop.close()

    def answers(self) -> bool:
        """Whether no call holds the loop."""
        has_answered = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(has_answered.set)
            return has_answered.wait(ANSWER_S)
        return False

    def end(self) -> None:
        """Cancel what runs on it, once a call that may hold it lets go of it, and end it; from any thread."""
        if self._is_over:  # a second task would come to a loop that has stopped
            return
        self._is_over = True

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
            await self.loop.shutdown_asyncgens()
            self.loop.stop()

        with contextlib.suppress(RuntimeError):  # it is closed
            # The coroutine is made on the loop: one that never gets free leaves none behind that nobody has awaited.
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(end()))

    def retire(self, own: Collection[asyncio.Task[Any]] = ()) -> None:
        """Once a call lets go of it, cancel `own` tasks, let the runs of others end, and end it; from any thread."""

        async def retire() -> None:
            for task in own:
                task.cancel()
            while self.runs:
                await asyncio.wait(set(self.runs))
            self.end()

        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(lambda: None if self._is_over else self._keep(retire()))

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._retiring = self.loop.create_task(coroutine)  # asyncio holds its tasks weakly


_threads: dict[str, LoopThread] = {}
_given_up = weakref.WeakSet[asyncio.AbstractEventLoop]()
_lock = threading.Lock()


def shared_loop(name: str = ROLLOUT) -> LoopThread:
    """The loop of this process that has this name. It is made when it is first needed, and anew after a fork.

    Code on that loop itself, which would wait for itself, gets another one.
    """
    if threading.current_thread().name == name:
        name += " (nested)"
    with _lock:
        thread = _threads.get(name)
        if thread is None or not thread.is_alive():
            thread = _threads[name] = LoopThread(name)
        return thread


def give_up_loop(thread: LoopThread, own: Collection[asyncio.Task[Any]] = ()) -> None:
    """Let others have a fresh loop, since a call holds this one or its thread has ended; `own` tasks are cancelled."""
    with _lock:
        _given_up.add(thread.loop)
        is_shared = _threads.get(thread.name) is thread
        if is_shared:
            del _threads[thread.name]
    if is_shared:
        logger.warning(
            "The event loop %r is given up, and what follows runs on a fresh one. Clients, locks and queues that a "
            "module keeps belong to the old one and may fail ('Event loop is closed'). Make them anew, or per call.",
            thread.name,
        )
    thread.retire(own)


def is_given_up(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether nobody waits any more for what runs on it."""
    return loop in _given_up


def run_on_loop(coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """The result of a coroutine on the loop of the rollouts, for code that is not on it. Ctrl-C cancels it.

    Raises:
        TimeoutError: it took longer, and was cancelled.
        BaseException: what it raised.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, shared_loop().loop)
    try:
        return future.result(timeout_s)
    except BaseException:
        future.cancel()
        raise


@atexit.register
def _end_all() -> None:
    """End what runs, with the processes that it has started; a loop that a call holds is left to it."""
    with _lock:
        threads = list(_threads.values())
        _threads.clear()
    threads = [thread for thread in threads if thread.is_alive() and thread.answers()]
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.join(EXIT_S)


def _forget_all() -> None:
    # Threads do not survive a fork, and the lock may have been held by one of them.
    global _lock
    _lock = threading.Lock()
    _threads.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_all)
