"""An environment whose steps an OpenEnv server takes, and the connection of one trajectory to it.

The server keeps an environment for each connection; one that closes takes its environment with it. It is opened again,
and everything that was said is said again: if the server answers as before, the trajectory goes on; if not, the
infrastructure has failed. (`GenericEnvClient` sends the next action to a new environment, without a word.)

The protocol is spoken directly: the package `openenv` stays with the server and is not needed here.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import math
import random
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import aiohttp

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.tool_env import SecondsOrNoLimit, ToolEnv
from agent_r1_trl.settings import Flag, Number, Words
from agent_r1_trl.tools import InfrastructureError, Tool, ToolExecutor
from agent_r1_trl.tools.blocks import media_in, name_of_media, text_of_block, warn_of_media
from agent_r1_trl.tools.faults import HandledError, ReportedError, ServerError
from agent_r1_trl.trajectory import Message, ToolCall, Trajectory

_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the schemas of actions that are calls of MCP tools."""
_PROMPT_COLUMNS = ("prompt", "question")


class OpenEnv(ToolEnv):
    """Acts in an environment of an OpenEnv server. Every trajectory has a session, which ends with it.

    An action is a call of the tool `step`, whose arguments follow the server's JSON schema; with `text_field` it is
    the message itself; on a server of MCP tools, the call of one of them. A turn earns what the server pays for its
    steps, and the episode is over when the server says so. The row's columns are arguments of the server's reset.

    Args:
        base_url: of the server, as in "http://localhost:8000".
        headers: of all requests, for servers that ask for a token.
        **settings: those of this class and of `ToolEnv`.
    """

    tool_call_reward = 0.0
    tool_error_reward = 0.0
    tool_timeout_s: SecondsOrNoLimit | None = 60.0
    text_field: Words | None = None
    """Field of the action that a message becomes as a whole, in place of a tool call."""
    ends_on_answer: Flag | None = None
    """Whether a message without an action ends the episode; None: with MCP tools. Else the model is told to act."""
    capacity_wait_s: Annotated[float, Number(minimum=0, may_be_infinite=True)] = 600.0
    """Maximum seconds to wait for a place on a server that is full."""
    _seed = 0
    _is_mcp = False
    _session: OpenEnvSession | None = None
    _text_executor: ToolExecutor

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"base_url={base_url!r:.200}: must be an address. Write it as in http://localhost:8000.")
        self.base_url, self.headers = base_url, dict(headers or {})

    def observation_text(self, observation: dict[str, Any]) -> str:
        """The text of an observation for the model, without metadata: the text of its only field, else its JSON."""
        fields = {key: value for key, value in observation.items() if key != "metadata"}
        if not fields:
            return ""
        shown = next(iter(fields.values())) if len(fields) == 1 else fields
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    def outcome_reward(self, trajectory: Trajectory) -> Any:
        """Always 0: the server pays for steps. A subclass may score the trajectory."""
        trajectory.info["openenv/reconnects"] = self._session.num_reconnects if self._session else 0
        return 0.0

    def is_done(self, message: Message) -> bool:
        """Whether the server has ended the episode, or an answer does."""
        ends = self._is_mcp if self.ends_on_answer is None else self.ends_on_answer
        return bool(self._session and self._session.is_done) or (ends and super().is_done(message))

    def seed(self, *, reset_seed: int, dynamics_seed: int) -> None:
        """Seed of rows that have no column `seed`: all trajectories of a group begin alike."""
        self._seed = reset_seed % 2**31

    async def reset(self, example: dict[str, Any]) -> list[Message]:  # type: ignore[override]
        """Open a session; returns the row's prompt, if it has one, followed by the first observation.

        Raises:
            InfrastructureError: there is no server, or no place.
            RuntimeError: the server cannot reset the environment, or there is nothing to do in it.
        """
        self._session = session = OpenEnvSession(self.base_url, self.headers, self.capacity_wait_s)
        columns = {name: value for name, value in example.items() if value is not None and name not in _PROMPT_COLUMNS}
        action = await session.schema()
        first = await session.ask("reset", json.loads(json.dumps({"seed": self._seed, **columns}, default=str)))
        if first["type"] == "error" or session.is_done:
            raise RuntimeError(f"OpenEnv: a reset of {self.base_url} with {columns!r:.200} answered {first!r:.500}")
        text = self.observation_text(first["data"]["observation"])
        await self._choose_tools(action)
        session.unread_reward = 0.0
        if not text or all(example.get(name) is None for name in _PROMPT_COLUMNS):
            return super().reset({**example, "prompt": text} if text else example)
        *before, last = super().reset(example)
        content = last.get("content") or ""
        joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        return [*before, {**last, "content": joined}]

    async def step(self, message: Message) -> StepResult:
        """Take the actions of a message; the turn earns what the server pays for them."""
        assert self._session is not None
        step = await super().step(message)
        paid, self._session.unread_reward = self._session.unread_reward, 0.0
        info = {**step.info, "reward_parts": {**step.info["reward_parts"], "openenv": paid}}
        return step._replace(reward=step.reward + paid, info=info)

    async def next_user_message(self, message: Message) -> str | None:  # type: ignore[override]
        """With `text_field`, the observation that follows the message as an action."""
        if self.text_field is None:
            return None
        action = ToolCall(name="step", arguments={self.text_field: message.get("content") or ""})
        (result,) = await self._text_executor.execute([action])
        if result.is_infrastructure_failure:
            raise InfrastructureError(result.content)
        return None if self.is_done(message) else result.content

    async def close(self) -> None:  # type: ignore[override]
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _choose_tools(self, action: dict[str, Any]) -> None:
        """Tools from the schema of an action, or the server's own."""
        assert self._session is not None
        fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
        self._is_mcp = action.get("title") in _MCP_ACTIONS and self.text_field is None
        if self._is_mcp:
            listed = (await self._session.ask("step", {"type": "list_tools"}))["data"].get("observation", {})
            self.tools = [
                Tool(functools.partial(self._call_mcp, item["name"]), schema=item) for item in listed.get("tools", ())
            ]
        elif self.text_field in (None, *fields):
            schema = {"parameters": {**action, "properties": fields}, "description": action.get("description", "Act.")}
            tool = Tool(self._act, schema={"name": "step", **schema})
            self.tools = [tool] if self.text_field is None else []
            limit_s = None if self.tool_timeout_s == math.inf else self.tool_timeout_s
            self._text_executor = ToolExecutor([tool], timeout_s=limit_s)
        if not (self.tools or self.text_field in fields):
            raise RuntimeError(
                f"text_field={self.text_field!r}: {self.base_url} has no tools, but fields {[*fields]}."
            )

    async def _call_mcp(self, tool_name: str, /, **arguments: object) -> str:
        return await self._act(type="call_tool", tool_name=tool_name, arguments=arguments)

    async def _act(self, **action: object) -> str:
        """Take one action; returns what the model reads.

        Raises:
            ReportedError, HandledError: the server refused the action, or failed in it (`ServerError`).
        """
        assert self._session is not None
        if self._session.is_done:
            raise ReportedError("Error: the episode is over, so this action was not taken.")
        reply = await self._session.ask("step", action)
        data = reply["data"]
        if reply["type"] == "error":
            reasons = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in data.get("errors", [])]
            kind = ReportedError if data.get("code") == "VALIDATION_ERROR" else ServerError
            raise kind(f"Error: {'; '.join(reasons) or data.get('message')}")
        if self._is_mcp:
            return _text_of_call(data["observation"], str(action.get("tool_name")))
        return self.observation_text(data["observation"])


def _text_of_call(observation: dict[str, Any], tool: str) -> str:
    """The text of an MCP tool's result for the model."""
    if error := observation.get("error"):
        kinds = {"transport_error": InfrastructureError, "execution_error": HandledError, "timeout": ServerError}
        raise kinds.get(error["error_type"], ReportedError)(f"Error: {error['message']}")
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        if media_in(result["content"]):
            warn_of_media(tool)
        lines = []
        for part in result["content"]:
            line = text_of_block(part)
            lines.append(name_of_media(part) or f"[{part.get('type')}]" if line is None else line)
        return "\n".join(lines)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


# -------------------------------------------------------------------- the connection

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
        self.base_url = re.sub("^ws", "http", base_url).rstrip("/")
        self.capacity_wait_s = capacity_wait_s
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


def _as_read(value: object) -> Any:
    """An observation as the policy may have read it: metadata, which may hold times and ids, are not shown to it."""
    if isinstance(value, list | tuple):
        return [_as_read(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items() if key != "metadata"}
    return value
