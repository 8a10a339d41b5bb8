"""Waiting for what runs on an event loop of another thread, with an end in sight."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeVar

from agent_r1_trl.rollout.env_session import CLOSE_TIMEOUT_S

T = TypeVar("T")

LOOK_S = 0.2
"""Seconds between two looks at whether the run is told to end."""


def result_in_time(future: Future[T], timeout_s: float, is_cut: threading.Event) -> T:
    """The future's result.

    Args:
        future: of a coroutine that is cancelled when the run is cut.
        timeout_s: the longest wait.
        is_cut: the run is told to end; from then on the wait takes `CLOSE_TIMEOUT_S` at the longest.

    Raises:
        CancelledError: it was cancelled.
        TimeoutError: it takes longer, because it holds its event loop, say.
    """
    deadline = time.monotonic() + timeout_s
    while not is_cut.is_set() and time.monotonic() < deadline:
        if wait_for_futures([future], LOOK_S).done:
            break
    left_s = min(deadline - time.monotonic(), CLOSE_TIMEOUT_S)
    return future.result(max(0.0, left_s))


async def end_loop() -> None:
    """Cancel whatever runs on this loop, and stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
    asyncio.get_running_loop().stop()


def end_when_free(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop of another thread do `end_loop` as soon as it is free; nothing if it is closed.

    The coroutine is made on the loop: one that never gets free leaves none behind that nobody has awaited.
    """
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(lambda: loop.create_task(end_loop()))


def copy_outcome(played: Future[Any], *, to: Future[Any]) -> None:
    """Give one future what came of another, unless it has been answered."""
    if to.done():  # the loop was given up
        return
    if played.cancelled():
        to.cancel()
    elif error := played.exception():
        to.set_exception(error)
    else:
        to.set_result(played.result())
