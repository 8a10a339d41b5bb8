"""A safe way to run code under suspicion.

Not part of the data flow: a linter's plumbing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.doctor.environment.report import describe_error
from agent_r1_trl.tools import DaemonThreadPool
from agent_r1_trl.tools.pool import JobTimeoutError

BLOCKING_S = 0.5


@dataclass
class CallOutcome:
    """How a call under suspicion went."""

    value: Any = None
    error: BaseException | None = None
    is_timeout: bool = False
    blocked_s: float = 0.0
    """Longest time an async call kept the event loop from doing anything else."""
    duration_s: float = 0.0

    @property
    def failure(self) -> str | None:
        """In words; None if it went well."""
        if self.is_timeout:
            return "did not come back in time"
        if self.error is not None:
            return f"raised {describe_error(self.error)}"
        return None


class SafeCaller:
    """Runs methods as the rollout does: async ones on an event loop in a thread, plain ones on worker threads.

    Nothing that is called can hang, stop or kill the caller.

    Args:
        timeout_s: seconds each call may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pool = DaemonThreadPool(4, name="check")
        self._loop = self._start_loop()

    def call(self, function: Callable[..., Any], *args: Any) -> CallOutcome:
        """Call and, where it is async, await; never raises except for the user's own Ctrl-C."""
        started = time.perf_counter()
        future = asyncio.run_coroutine_threadsafe(self._call(function, args), self._loop)
        try:
            outcome = future.result(timeout=self.timeout_s + 2.0)
        except concurrent.futures.TimeoutError:
            # The loop itself is stuck: an async function that blocks. It is lost; go on with another.
            self._loop = self._start_loop()
            outcome = CallOutcome(is_timeout=True, blocked_s=self.timeout_s + 2.0)
        outcome.duration_s = time.perf_counter() - started
        return outcome

    def close(self) -> None:
        """Stop the loop's thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> CallOutcome:
        async def guarded() -> CallOutcome:
            try:
                if inspect.iscoroutinefunction(function):
                    return CallOutcome(value=await function(*args))

                def work() -> CallOutcome:
                    try:
                        return CallOutcome(value=function(*args))
                    except BaseException as error:
                        return CallOutcome(error=error)

                outcome = await self._pool.run(work, timeout_s=self.timeout_s)
                if inspect.isawaitable(outcome.value):
                    outcome = CallOutcome(value=await outcome.value)
                return outcome
            except JobTimeoutError:
                return CallOutcome(is_timeout=True)
            except BaseException as error:  # SystemExit included: raised inside a task it would end the loop
                return CallOutcome(error=error)

        heartbeat = _Heartbeat()
        beat = asyncio.ensure_future(heartbeat.run())
        task = asyncio.ensure_future(guarded())
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        beat.cancel()
        outcome = task.result() if done else CallOutcome(is_timeout=True)
        if not done:
            task.cancel()
        if inspect.iscoroutinefunction(function):
            outcome.blocked_s = heartbeat.longest_pause_s()
        return outcome

    @staticmethod
    def _start_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="check-loop", daemon=True).start()
        return loop


class _Heartbeat:
    """Measures how long an event loop stood still."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._longest = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            self._beat()

    def longest_pause_s(self) -> float:
        self._beat()
        return self._longest

    def _beat(self) -> None:
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last)
        self._last = now
