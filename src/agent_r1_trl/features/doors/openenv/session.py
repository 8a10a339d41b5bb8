"""The connection of one trajectory to an OpenEnv server, which keeps an environment for each connection.

A connection that closes takes its environment with it. It is opened again, and everything that was said is said again:
if the server answers as before, the trajectory goes on; if not, the infrastructure has failed. (`GenericEnvClient`
sends the next action to a new environment, without a word.)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import re
import time
from typing import Any

import aiohttp

from agent_r1_trl.tools import InfrastructureError

MAX_MESSAGE_BYTES = 100 * 2**20
"""Maximum size of one reply, as in the client of OpenEnv."""
CLOSE_WAIT_S = 2.0
"""Seconds that the server has to hear that the session is over."""
MAX_WAIT_S = 5.0
"""Seconds between two attempts to get a place."""


class _ConnectionClosed(Exception):
    """The connection is closed, and with it the server's environment."""


class OpenEnvSession:
    """A session; it is made on the event loop that uses it.

    Args:
        base_url: of the server: http, https, ws or wss.
        headers: of all requests.
        capacity_wait_s: maximum seconds to wait for a place on a server that is full.
    """

    def __init__(self, base_url: str, headers: dict[str, str], capacity_wait_s: float) -> None:
        self.base_url, self.capacity_wait_s = re.sub("^ws", "http", base_url).rstrip("/"), capacity_wait_s
        self.unread_reward = 0.0
        """Sum of the rewards since it was last set to 0."""
        self.is_done = False
        self.num_reconnects = 0
        self._http = aiohttp.ClientSession(headers=headers)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._replies: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._unanswered: collections.deque[dict[str, Any]] = collections.deque()
        self._said: list[tuple[dict[str, Any], dict[str, Any]]] = []

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message ("reset" or "step"); returns the reply: `type` ("observation" or "error") and `data`.

        Raises:
            InfrastructureError: there is no server, no place, or no going on after the connection was closed.
        """
        message = {"type": kind, "data": data}
        try:
            if self._socket is None:
                return await self._connect(message)
            with contextlib.suppress(_ConnectionClosed):
                return await self._exchange(message)
            await self._repeat()
            return await self._exchange(message)
        except (_ConnectionClosed, aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"OpenEnv: the connection to {self.base_url} failed ({error!r})") from error

    async def schema(self) -> dict[str, Any]:
        """JSON schema of an action."""
        try:
            async with self._http.get(f"{self.base_url}/schema") as answer:
                return (await answer.json())["action"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            raise InfrastructureError(f"OpenEnv: {self.base_url}/schema names no action ({error!r})") from error

    async def close(self) -> None:
        """End the session, and with it the server's environment."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._disconnect(), CLOSE_WAIT_S)
        await self._http.close()

    async def _connect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Open the connection as soon as the server has a place, and send the first message."""
        began, wait_s = time.monotonic(), 0.1
        while True:
            self._socket = await self._http.ws_connect(f"{self.base_url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
            self._reader = asyncio.create_task(self._read(self._socket, self._replies))
            reply = await self._exchange(message)
            if reply["data"].get("code") != "CAPACITY_REACHED":
                return reply
            self._said.clear()
            await self._disconnect()
            if time.monotonic() - began > self.capacity_wait_s:
                raise InfrastructureError(
                    f"OpenEnv: {self.base_url} was full for capacity_wait_s={self.capacity_wait_s:g} s. Set the "
                    f"server's max_concurrent_envs to the number of trajectories at once ({reply['data']})."
                )
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _disconnect(self) -> None:
        if self._socket is not None and self._reader is not None:
            await self._socket.close()  # the server ends the environment of a connection that closes
            self._reader.cancel()
        self._replies = asyncio.Queue()
        self._unanswered.clear()

    @staticmethod
    async def _read(socket: aiohttp.ClientWebSocketResponse, replies: asyncio.Queue[Any]) -> None:
        """Reads all the time, because reading answers the server's pings, also while the model writes."""
        with contextlib.suppress(Exception):  # the connection, or a reply that is no JSON
            async for item in socket:
                replies.put_nowait(json.loads(item.data))
        replies.put_nowait(None)

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return its reply. Those to earlier ones that were given up come first, and count."""
        assert self._socket is not None
        self._unanswered.append(message)
        with contextlib.suppress(ConnectionError):  # that there is no place was said before the connection closed
            await self._socket.send_json(message)
        while True:
            reply = await self._replies.get()
            if reply is None or reply["data"].get("code") in ("FACTORY_ERROR", "SESSION_ERROR"):
                self._replies.put_nowait(None)
                raise _ConnectionClosed(reply or "closed by the server")
            self._said.append((self._unanswered.popleft(), reply))
            if reply["type"] == "observation":
                self.unread_reward += float(reply["data"].get("reward") or 0.0)
                self.is_done = bool(reply["data"].get("done"))
            if not self._unanswered:
                return reply

    async def _repeat(self) -> None:
        """Bring a new connection to where the closed one was."""
        said, reward, self._said = self._said, self.unread_reward, []
        self.num_reconnects += 1
        try:
            await self._disconnect()
            await self._connect(said[0][0])
            for message, _ in said[1:]:
                await self._exchange(message)
            if _as_read(self._said) != _as_read(said):
                raise _ConnectionClosed("and an environment that does not repeat what it did. Give its rows a seed")
        except BaseException:  # it may be given up, too: the next message repeats it
            self._replies.put_nowait(None)
            raise
        finally:
            self._said, self.unread_reward = said, reward


def _as_read(value: Any) -> Any:
    """What the policy may have read: metadata, which may hold times and ids, are not shown to it."""
    if isinstance(value, list | tuple):
        return [_as_read(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items() if key != "metadata"}
    return value
