"""The endpoint that agents talk to: one server for each event loop and address, shared by all sessions."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.errors import APIError
from agent_r1_trl.features.doors.agent.session import GONE, MODEL, AgentSession
from agent_r1_trl.features.doors.agent.wire import NO_RETRY, stream_lines
from agent_r1_trl.safe_text import shown_all

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 8 * 2**20
"""A limit for every request: a million tokens fit, most of them escaped."""
MAX_ENDED = 4096
"""How many keys of ended sessions are remembered."""
logger = logging.getLogger(__name__)


LOOPBACK = "127.0.0.1"
"""The address at which no other machine reaches the door."""


class DoorServer:
    """Answers agents with their sessions.

    Args:
        host: the address of this machine at which it listens, and by which agents reach it.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self.host = host
        self.sessions: dict[str, AgentSession] = {}
        self._ended: dict[str, None] = {}
        self._clients: dict[str, Any] = {}
        self._thread = threading.get_ident()
        self._socket = socket.create_server((host, 0))
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"

    async def start(self) -> DoorServer:
        """Listen."""
        from aiohttp import web

        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[web.middleware(functools.partial(self._answer))]
        )
        for session in ("", "/sessions/{key}"):
            for mode in ("", "/untrained"):
                app.add_routes([web.get(f"{session}{mode}/v1/models", self._list_models)])
                complete = functools.partial(self._complete, is_trained=not mode)
                app.add_routes([web.post(f"{session}{mode}/v1/chat/completions", complete)])
        # Bodies stay as they come: a small one that unfolds to gigabytes would hold up all sessions.
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        return self

    def close(self) -> None:
        """Stop listening, once the loop is gone."""
        self._socket.close()

    def open(self) -> AgentSession:
        """A new session."""
        session = AgentSession()
        self.sessions[session.key] = session
        return session

    def end(self, session: AgentSession) -> None:
        """End a session; the last one takes the connections along."""
        session.end()
        if self.sessions.pop(session.key, None) is None:
            return
        self._ended[session.key] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        if not self.sessions and self._runner.server is not None:
            for connection in self._runner.server.connections:
                connection.force_close()

    def client(self, kind: str) -> Any:
        """A client of OpenAI's ("OpenAI" or "AsyncOpenAI") without a key; it takes 20 ms to make, so all share one.

        An async one of another thread is its own, since connections belong to an event loop.
        """
        import openai

        is_shared = kind == "OpenAI" or threading.get_ident() == self._thread
        if is_shared and kind in self._clients:
            return self._clients[kind]
        connections = openai.DefaultHttpxClient if kind == "OpenAI" else openai.DefaultAsyncHttpxClient
        direct = connections(trust_env=False)  # no proxy leads to this machine
        made = getattr(openai, kind)(base_url=f"{self.address}/v1", api_key="none", http_client=direct)
        return self._clients.setdefault(kind, made) if is_shared else made

    async def _answer(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        from aiohttp import web

        try:
            encoding = request.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise APIError(415, f"Content-Encoding {encoding!r:.40} is not read. Send the body uncompressed.")
            return await handler(request)
        except ConnectionResetError:  # nobody is there to hear it
            return web.Response(status=499)
        except web.HTTPException as error:
            hint = " Only chat completions are served." if error.status == 404 else ""
            failure = APIError(error.status, f"{request.method} {request.path}: {error.reason}.{hint}")
        except APIError as error:
            failure = error
        except ChatFormatError as error:
            failure = APIError(400, str(error), param="messages")
        except Exception as error:
            logger.error("A request of an agent failed: %s: %s", type(error).__name__, error, exc_info=error)
            failure = APIError(500, f"{type(error).__name__}: {error}")
        response = web.json_response(shown_all(failure.body), status=failure.status, headers=NO_RETRY)
        if not self.sessions:
            response.force_close()
        return response

    def _session(self, request: web.Request) -> AgentSession:
        key, _, _ = _key_of(request).partition(".")
        if (session := self.sessions.get(key)) is not None:
            return session
        unknown = 401, "This key opens no session. Use the api_key that the agent was given."
        raise APIError(*((410, GONE) if key in self._ended else unknown))

    async def _list_models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._session(request)
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agent-r1-trl"}
        return web.json_response({"object": "list", "data": [card]})

    async def _complete(self, request: web.Request, *, is_trained: bool) -> web.StreamResponse:
        from aiohttp import web

        session, transport = self._session(request), request.transport
        if transport is None:
            raise ConnectionResetError
        try:
            text = await request.text()
            body = json.loads(text)
        except web.HTTPRequestEntityTooLarge as error:
            raise session.too_large(f"a request may have {MAX_BODY_BYTES} bytes", is_trained=is_trained) from error
        except (ValueError, LookupError, RecursionError) as error:
            raise APIError(400, f"The body is not JSON that can be read: {error}.") from error
        asked = await session.read(body, len(text), transport, is_trained=is_trained)
        repeats = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        _, _, seat = _key_of(request).partition(".")
        answer = await session.complete(asked, transport, is_retry=repeats, is_trained=is_trained, seat=seat or None)
        if not asked.is_streamed:
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for line in stream_lines(answer, has_usage=asked.has_usage):
            await response.write(line)
        return response


def _key_of(request: web.Request) -> str:
    """The key of a session, and behind a dot the seat."""
    return request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


@functools.cache
def check_host(host: str) -> None:
    """Look whether the door can listen at an address that agents can be told.

    Raises:
        ValueError: it cannot.
    """
    fix = "Set door_host to an address of this machine that the agents' machines reach (`hostname -I` lists them)"
    if host in ("0.0.0.0", "::", ""):
        raise ValueError(f"door_host={host!r} is not an address that an agent can reach. {fix}.")
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        raise ValueError(
            f"door_host={host!r}: the agent door cannot listen there ({error}). {fix}, or remove it."
        ) from error


_servers: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[DoorServer]] = {}


async def server_here(host: str = LOOPBACK) -> DoorServer:
    """The server of the running loop at this address, which starts with the first session."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _servers if other[0].is_closed()]:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            _servers.pop(other).result().close()
    if (loop, host) not in _servers:
        # Not a part of the trajectory that comes first: neither its variables nor its end.
        _servers[loop, host] = loop.create_task(DoorServer(host).start(), context=contextvars.Context())
    return await asyncio.shield(_servers[loop, host])
