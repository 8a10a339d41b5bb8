"""Serves a retriever in Search-R1's protocol (see `protocol.py`), so that a corpus lives on one machine.

POST /retrieve   one query or several
GET /health      {"status": "ok", "num_passages": ...}
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agent_r1_trl.tools.faults import InfrastructureError
from agent_r1_trl.tools.retrieval.opening import Retriever
from agent_r1_trl.tools.retrieval.protocol import ProtocolError, Request, read_request, write_hit
from agent_r1_trl.tools.search import Passage

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 16 * 2**20


def make_app(retriever: Retriever, *, max_workers: int | None = None) -> web.Application:
    """The server as an application of aiohttp.

    Args:
        retriever: is searched from several threads at once.
        max_workers: number of these threads; None: two for each processor.
    """
    from aiohttp import web

    pool = ThreadPoolExecutor(max_workers or 2 * (os.cpu_count() or 1), thread_name_prefix="search")

    async def retrieve(request: web.Request) -> web.Response:
        try:
            asked = read_request(await request.json())
        except ProtocolError as error:
            return web.json_response({"error": str(error)}, status=422)
        except ValueError:
            return web.json_response({"error": "the body is not JSON"}, status=400)
        try:
            found = await _search(retriever, asked, pool)
        except InfrastructureError as error:  # the retriever asks another server itself
            return web.json_response({"error": str(error)}, status=503)
        hits = [[write_hit(passage, with_score=asked.with_scores) for passage in passages] for passages in found]
        return web.json_response({"result": hits})

    async def health(request: web.Request) -> web.Response:
        size = len(retriever) if isinstance(retriever, Sized) else None
        return web.json_response({"status": "ok", "num_passages": size})

    async def close(app: web.Application) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    app.on_cleanup.append(close)
    return app


async def _search(retriever: Retriever, asked: Request, pool: ThreadPoolExecutor) -> list[list[Passage]]:
    loop = asyncio.get_running_loop()
    together: Callable[[list[str], int], list[list[Passage]]] | None = getattr(retriever, "search_many", None)
    if together is not None and len(asked.queries) > 1:
        return await loop.run_in_executor(pool, together, asked.queries, asked.k)
    # Futures first, so that all threads are busy.
    jobs = [loop.run_in_executor(pool, retriever.search, query, asked.k) for query in asked.queries]
    return list(await asyncio.gather(*jobs))


def serve(
    retriever: Retriever,
    *,
    host: str = "127.0.0.1",
    port: int = 8010,
    max_workers: int | None = None,
    on_start: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Serve until the process is told to end (SIGINT, SIGTERM).

    Args:
        retriever: what is searched.
        host: address to listen at; "0.0.0.0" for other machines to reach it.
        port: to listen at; 0 for a free one.
        max_workers: searches at the same time; None: two for each processor.
        on_start: is told `host` and `port` when the server answers.

    Raises:
        OSError: nothing can listen there.
    """
    asyncio.run(serve_app(make_app(retriever, max_workers=max_workers), host, port, on_start))


async def serve_app(
    app: web.Application, host: str, port: int, on_start: Callable[..., None] | None, **options: Any
) -> None:
    """Serve an application until the process is told to end; see `serve`.

    Args:
        app: the application.
        host: address to listen at.
        port: to listen at; 0 for a free one.
        on_start: is told `host` and `port`.
        **options: of aiohttp's `AppRunner`.

    Raises:
        OSError: nothing can listen there.
    """
    import signal

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
        await site.start()
        if on_start is not None:
            on_start({"host": host, "port": runner.addresses[0][1]})
        await stopped.wait()
    finally:
        await runner.cleanup()
