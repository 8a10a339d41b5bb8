"""Running a user's code with a time limit, without ever being stopped by it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.doctor.report import describe_error
from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.rollout import EnvironmentFailure
from agent_r1_trl.rollout.waiting import end_when_free

_GRACE_S = 2.0


@dataclass
class Outcome:
    """How a call went."""

    value: Any = None
    failure: str | None = None
    """Text of the exception or of the timeout; None if the call went well."""
    blocked_s: float = 0.0
    """Longest time for which the event loop could not run anything else."""


class Caller:
    """Awaits coroutines on an event loop in a thread of its own.

    Args:
        timeout_s: seconds each call may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = _start_loop()

    def call(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> Outcome:
        """Wait for a coroutine; never raises. `name` is what a timeout calls it."""
        too_slow = f"{name} did not come back within {self.timeout_s:g} s"
        future = asyncio.run_coroutine_threadsafe(self._call(coroutine, too_slow), self._loop)
        try:
            return future.result(timeout=self.timeout_s + _GRACE_S)
        except concurrent.futures.TimeoutError:
            # It blocks and may never let go of the loop: leave that loop to it and go on with another.
            end_when_free(self._loop)
            self._loop = _start_loop()
            return Outcome(failure=too_slow, blocked_s=self.timeout_s + _GRACE_S)

    def close(self) -> None:
        """End what still runs, and the thread of the event loop."""
        end_when_free(self._loop)

    async def _call(self, coroutine: Coroutine[Any, Any, Any], too_slow: str) -> Outcome:
        async def guarded() -> Outcome:
            try:
                return Outcome(value=await coroutine)
            except (EnvironmentFailure, RewardError) as error:  # their text names the method and its exception
                return Outcome(failure=str(error).rstrip("."))
            except BaseException as error:  # SystemExit as well: it would end the loop
                return Outcome(failure=describe_error(error))

        pauses = [0.0]
        heartbeat = asyncio.ensure_future(_measure_pauses(pauses))
        task = asyncio.ensure_future(guarded())
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        await asyncio.sleep(0)  # lets the heartbeat notice a pause that has just ended
        heartbeat.cancel()
        task.cancel()
        outcome = task.result() if done else Outcome(failure=too_slow)
        outcome.blocked_s = max(pauses)
        return outcome


async def _measure_pauses(pauses: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.005)
        pauses.append(time.perf_counter() - started)


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_loop, args=(loop,), name="check-loop", daemon=True).start()
    return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
