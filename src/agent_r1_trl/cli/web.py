"""An application of aiohttp, served until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.cli.errors import DependencyError
from agent_r1_trl.settings import Number

if TYPE_CHECKING:
    from aiohttp import web


Port = Annotated[int, Number(minimum=0, maximum=65535)]
"""0: a free one."""


def cannot_listen(host: str, port: int, error: OSError) -> DependencyError:
    """What is raised where an address is taken, or not this machine's."""
    problem = f"cannot listen there ({error.strerror or error})"
    return DependencyError(f"--host {host} --port {port}: {problem}. Pass another port.")


async def serve_app(
    app: web.Application, host: str, port: int, on_start: Callable[..., None] | None, **options: Any
) -> None:
    """Serve an application until the process is told to end (SIGINT, SIGTERM).

    `on_start` is told `host` and `port` (0: a free one) when it answers; `options` are those of aiohttp's `AppRunner`.
    """
    from aiohttp import web

    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        if on_start is not None:
            on_start({"host": host, "port": runner.addresses[0][1]})
        await stopped.wait()
    finally:
        await runner.cleanup()
