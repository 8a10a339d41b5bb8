"""The page of a run that goes on, for browsers of this machine: built anew when the record has changed."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.recording.lines import FOLDER, run_folder
from agent_r1_trl.safe_text import shown

if TYPE_CHECKING:
    from aiohttp import web

HOSTS = ("127.0.0.1", "localhost")
"""Another name may be that of a stranger's site, which leads it here to read the page."""
PAUSE = 4.0
"""Between two builds lies so many times what the last one took: the rest of the processor is for the training."""


class LivePage:
    """Keeps the page up to date.

    Args:
        runs: see `write_page`; their records are watched.
        path: of the page, in a folder of its own.
        write: writes the page of a version there.
    """

    def __init__(self, runs: Sequence[Path], path: Path, write: Callable[[str], Any]) -> None:
        self.runs, self.path, self._write = runs, path, write
        self.version = ""
        """The state of the record that the page shows; empty before there is a page."""
        self._lock, self._next_build = asyncio.Lock(), 0.0

    def app(self) -> web.Application:
        """An application of aiohttp with the page at `/` and its version at `/version`."""
        from aiohttp import web

        async def get_page(request: web.Request) -> web.StreamResponse:
            return web.FileResponse(self.path)

        async def get_version(request: web.Request) -> web.StreamResponse:
            return web.Response(text=self.version)

        @web.middleware
        async def refresh(request: web.Request, handler: Callable[[web.Request], Any]) -> Any:
            if request.host.partition(":")[0] not in HOSTS:
                raise web.HTTPForbidden(text=f"The page is shown under {' and '.join(HOSTS)} alone.")
            try:
                await self.refresh()
            except (OSError, ValueError) as error:  # nothing is recorded yet, or a file was just put aside
                raise web.HTTPServiceUnavailable(text=shown(str(error)), headers={"Refresh": "2"}) from error
            response = await handler(request)
            response.headers["Cache-Control"] = "no-store"
            return response

        app = web.Application(middlewares=[refresh])
        app.add_routes([web.get("/", get_page), web.get("/version", get_version)])
        return app

    async def refresh(self) -> None:
        """Build the page if its record has changed, and the last build is long enough ago.

        Raises:
            OSError, ValueError: see `write_page`.
        """
        async with self._lock:
            state = record_state(self.runs)  # before the build: what is written meanwhile is news
            if state == self.version or (self.version and time.monotonic() < self._next_build):
                return
            began, is_first = time.monotonic(), not self.version
            try:
                await asyncio.to_thread(self._write, state)
                self.version = state
            finally:
                now = time.monotonic()
                self._next_build = now + (0.0 if is_first else PAUSE * (now - began))  # the first one loads torch


def record_state(runs: Sequence[Path]) -> str:
    """A text that changes with the files of the records."""
    found = []
    for run in runs:
        folder = run_folder(run)
        files = sorted([*folder.glob("*.jsonl"), *(folder / FOLDER).glob("*.jsonl")])
        found += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
