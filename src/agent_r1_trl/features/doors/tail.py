"""The end of what a program writes, however much it writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TextIO

LAST_WORDS_S = 1.0
"""Seconds that a pipe has to end when its program has; who has inherited it may hold it longer."""


class Tail(asyncio.Protocol):
    """Reads a pipe on the event loop, and keeps its last bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kept = bytearray()
        self._has_ended = asyncio.Event()
        self.file: TextIO
        """The end that the program writes to."""

    def data_received(self, data: bytes) -> None:
        """Forget what stands before the last bytes."""
        self.kept += data
        del self.kept[: -self.max_bytes]

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody can write any more."""
        self._has_ended.set()

    async def text(self) -> str:
        """The last output of a program that has ended."""
        self.file.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._has_ended.wait()
        return self.kept.decode(errors="replace").strip()


@contextlib.asynccontextmanager
async def tail_of(max_bytes: int) -> AsyncIterator[Tail]:
    """A pipe whose last bytes are kept while it lasts."""
    tail = Tail(max_bytes)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read_from, os.fdopen(writing, "w") as tail.file:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, read_from)
        try:
            yield tail
        finally:
            transport.close()
