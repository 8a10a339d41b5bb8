"""JSON over HTTP with pooled connections and timeouts, on an event loop of its own.

A loop of its own lets one pool of connections serve every caller: the trajectories of a rollout, each rollout perhaps
on another loop, and the trainer's thread, which has none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_BUSY = (408, 425, 429, 500, 502, 503, 504)
_CONNECT_S = 10.0
_SPARE_CONNECTIONS = 4  # for checks of a server whose other connections all wait for it


class HTTPError(RuntimeError):
    """An answer that is not 2xx, or none at all; the message names the URL and what the server said."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
        """The answer's; None without one."""

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.status is None or self.status in _BUSY


class HTTPClient:
    """POST and GET of JSON.

    Args:
        max_connections: maximum number of open connections to each server.
        timeout_s: seconds to wait for one answer.
    """

    def __init__(self, *, max_connections: int = 256, timeout_s: float = 600.0):
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Any = None

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run on the client's loop; from any thread. `asyncio.wrap_future` makes it awaitable on another loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_until_stopped, args=(self._loop,), name="http", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """`start` and wait."""
        return self.start(coroutine).result()

    async def request(self, method: str, url: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON (None if it is empty or, as from vLLM's LoRA routes, a plain sentence).

        Raises:
            HTTPError: no answer in time, none at all, or one that is not 2xx.
        """
        import aiohttp

        if self._session is None:
            limit = self._max_connections + _SPARE_CONNECTIONS
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=limit))
        seconds = self._timeout_s if timeout_s is None else timeout_s
        connect_s = min(_CONNECT_S, seconds)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_s)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as answer:
                if answer.status >= 300:
                    text = (await answer.text())[:500]
                    raise HTTPError(f"{method} {url} was answered with {answer.status}: {text}", answer.status)
                return await answer.json() if answer.content_type == "application/json" else None
        except TimeoutError as error:
            is_deaf = isinstance(error, aiohttp.ConnectionTimeoutError)
            missing = f"no connection within {connect_s:g} s" if is_deaf else f"no answer within {seconds:g} s"
            raise HTTPError(f"{method} {url} had {missing}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: what should be JSON is not
            raise HTTPError(f"{method} {url} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections; requests that are in flight are cancelled."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
