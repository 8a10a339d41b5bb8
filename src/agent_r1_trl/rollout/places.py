"""Places for trajectories that run at the same time, shared by all rollouts in flight: the oldest rollout comes first.

A semaphore gives its places to whoever asked first. Here the number of the rollout decides, so that a rollout that was
begun early takes no place from the one that the update waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Places:
    """A number of places, given to the smallest `order` first; used on one event loop.

    Args:
        number: of places; may be changed at any time, and counts from the next one that is given.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_taken = 0
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def taken(self, order: int) -> AsyncIterator[None]:
        """Wait for a place; it is held inside."""
        await self._take(order)
        try:
            yield
        finally:
            self.num_taken -= 1
            self._give()

    async def _take(self, order: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (order, next(self._arrivals), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it has a place and cannot use it
                self.num_taken -= 1
                self._give()
            raise

    def _give(self) -> None:
        """Give free places to those in line."""
        while self._line and self.num_taken < self.number:
            _, _, turn = heapq.heappop(self._line)
            if not turn.done():  # else its trajectory was cancelled
                self.num_taken += 1
                turn.set_result(None)
