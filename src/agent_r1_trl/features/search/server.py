"""Serves a retriever in Search-R1's protocol (see `http.py`), so that a corpus lives on one machine.

POST /retrieve   one query or several
GET /health      {"status": "ok", "num_passages": ...}
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from agent_r1_trl.tools.faults import InfrastructureError
from agent_r1_trl.tools.search import Passage, Retriever
from agent_r1_trl.tools.search_corpus import join_contents

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 16 * 2**20
MAX_QUERIES = 4096
MAX_K = 1000


def make_app(retriever: Retriever) -> web.Application:
    """The server as an application of aiohttp; searches from two threads for each processor."""
    from aiohttp import web

    pool = ThreadPoolExecutor(2 * (os.cpu_count() or 1), thread_name_prefix="search")

    async def retrieve(request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"error": "the body is not JSON"}, status=400)
        try:
            queries, k = read_request(body)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=422)
        try:
            jobs = [loop.run_in_executor(pool, retriever.search, query, k) for query in queries]
            found = await asyncio.gather(*jobs)
        except InfrastructureError as error:  # the retriever asks another server itself
            return web.json_response({"error": str(error)}, status=503)
        with_score = bool(body.get("return_scores"))
        hits = [[write_hit(passage, with_score=with_score) for passage in passages] for passages in found]
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


def read_request(body: Any) -> tuple[list[str], int]:
    """The queries of a request, one or several, and how many passages each gets (3 unless it says otherwise).

    Raises:
        ValueError: the request has another form.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f'a request must be {{"queries": [...], "topk": 3}}, not {body!r:.200}')
    queries = body.get("queries", [body.get("query")])
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"'queries' must be a list of strings, not {queries!r:.200}")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"'queries' has {len(queries)} items, at most {MAX_QUERIES} are answered at once")
    k = 3 if body.get("topk") is None else body["topk"]
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ValueError(f"'topk' must be a whole number from 1 to {MAX_K}, not {k!r:.200}")
    return queries, k


def write_hit(passage: Passage, *, with_score: bool) -> dict[str, Any]:
    """One search result as JSON."""
    contents = join_contents(passage.title, passage.text)
    document = {"id": passage.id, "title": passage.title, "contents": contents}
    return {"document": document, "score": passage.score} if with_score else document
