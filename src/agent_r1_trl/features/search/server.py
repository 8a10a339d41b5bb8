"""Serves a retriever in Search-R1's protocol (see `http.py`), so that a corpus lives on one machine.

POST /retrieve   one query or several
GET /health      {"status": "ok", "num_passages": ...}
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_r1_trl.tools.faults import InfrastructureError
from agent_r1_trl.tools.search import Passage, Retriever
from agent_r1_trl.tools.search_corpus import join_contents

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 16 * 2**20
MAX_QUERIES = 4096
MAX_K = 1000
USUAL = '{"queries": [...], "topk": 3}'


class RetrieveRequest(BaseModel):
    """The queries of a request, one or several, and how many passages each gets (3 unless it says otherwise)."""

    model_config = ConfigDict(strict=True)
    queries: Annotated[list[str], Field(min_length=1, max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_K)] | None = None
    return_scores: bool = False

    @model_validator(mode="before")
    @classmethod
    def _take_one_query(cls, body: Any) -> Any:
        return {"queries": [body["query"]], **body} if isinstance(body, dict) and "query" in body else body


def make_app(retriever: Retriever) -> web.Application:
    """The server as an application of aiohttp; searches from two threads for each processor."""
    from aiohttp import web

    pool = ThreadPoolExecutor(2 * (os.cpu_count() or 1), thread_name_prefix="search")

    async def retrieve(request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        try:
            asked = RetrieveRequest.model_validate(await request.json())
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            return web.json_response({"error": f"a request is {USUAL}; {wrong}"}, status=422)
        except ValueError:
            return web.json_response({"error": "the body is not JSON"}, status=400)
        try:
            jobs = [loop.run_in_executor(pool, retriever.search, query, asked.topk or 3) for query in asked.queries]
            found = await asyncio.gather(*jobs)
        except InfrastructureError as error:  # the retriever asks another server itself
            return web.json_response({"error": str(error)}, status=503)
        hits = [[write_hit(passage, with_score=asked.return_scores) for passage in passages] for passages in found]
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


def write_hit(passage: Passage, *, with_score: bool) -> dict[str, Any]:
    """One search result as JSON."""
    contents = join_contents(passage.title, passage.text)
    document = {"id": passage.id, "title": passage.title, "contents": contents}
    return {"document": document, "score": passage.score} if with_score else document
