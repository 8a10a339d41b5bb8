"""The tools of a server of MCP as `Tool`s of an environment, and the sessions that their calls use.

A session has to end in the task that began it, and rollouts and their event loops come and go. So one thread of the
process has a loop that holds all sessions, each in a task. Calls come from any loop or thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import json
import logging
import re
import shlex
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv
from agent_r1_trl.features.doors.methods import select_names
from agent_r1_trl.features.doors.tail import tail_of
from agent_r1_trl.settings import OneOf, Seconds, check_value
from agent_r1_trl.tools import InfrastructureError, Tool, ToolSchemaError
from agent_r1_trl.tools.blocks import describe_blocks, media_in, warn_of_media
from agent_r1_trl.tools.event_loop import shared_loop
from agent_r1_trl.tools.executor import check_names
from agent_r1_trl.tools.faults import HandledError, ServerError
from agent_r1_trl.tools.foreign import text_of_mcp
from agent_r1_trl.tools.pool import JobTimeoutError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

logger = logging.getLogger(__name__)


class MCPToolset(Sequence[Tool]):
    """The tools of a server of MCP: `tools = MCPToolset(...)`, or `tools = [*MCPToolset(...), other]`.

    It connects when it is made, to list them.

    Args:
        server: a URL (streamable HTTP), a command line (text or a list), an entry of `mcpServers` (a mapping with
            `command`, `args`, `env`, `cwd`, or with `url`, `headers`), a server object of the package `mcp`, or a
            function that makes what `mcp.Client` takes, for each session.
        include: names of tools, or patterns such as "read_*"; None for all.
        exclude: tools that are not offered.
        prefix: stands before every name.
        names: what the model calls some tools, by the server's name, such as {"get-file": "get_file"}; or a function
            that renames each, such as `lambda name: name.replace("-", "_")`.
        session: "shared": one for all trajectories of the process. "trajectory": one for each, and for a command a
            process, from its first call to its end.
        timeout_s: maximum seconds of a call, once the session is open.
        connect_timeout_s: maximum seconds until a session is open.
        **settings: of `Tool`, such as `max_result_chars`, `attempts` or `backend`.

    Raises:
        ImportError: the package `mcp` is missing.
        InfrastructureError: the server cannot be reached.
        JobTimeoutError: it has not listed its tools in `connect_timeout_s`.
        ToolSchemaError: a tool cannot be shown to a model.
        ValueError: an argument is none of its values, or `include` or `exclude` fits no tool.
    """

    def __init__(
        self,
        server: object,
        *,
        include: Iterable[str] | str | None = None,
        exclude: Iterable[str] | str = (),
        prefix: str = "",
        names: Mapping[str, str] | Callable[[str], str] | None = None,
        session: str = "shared",
        timeout_s: float = 30.0,
        connect_timeout_s: float = 60.0,
        **settings: object,
    ) -> None:
        check_value("MCPToolset: session", session, Annotated[str, OneOf("shared", "trajectory")])
        check_value("MCPToolset: timeout_s", timeout_s, Seconds)
        check_value("MCPToolset: connect_timeout_s", connect_timeout_s, Seconds)
        self.is_shared, self.timeout_s = session == "shared", timeout_s
        name, connect = _read_server(server, self.is_shared)
        self.new_session = functools.partial(ServerSession, name, connect, connect_timeout_s, self.is_shared)
        self.session = self.new_session()
        what = f"MCPToolset({name}): listing the tools"
        try:
            asked = self.session.ask(what, _list_tools, connect_timeout_s)
            listed = {item.name: item for item in asyncio.run_coroutine_threadsafe(asked, session_loop()).result()}
        finally:
            if not self.is_shared:
                self.session.close()
        chosen = select_names(f"MCPToolset({name})", list(listed), include, exclude)
        # A session may have to open before a call, and a server that refused one is asked whether it is there.
        settings = {"attempts": 3, "timeout_s": timeout_s + connect_timeout_s + 2 * ANSWER_S} | settings
        rename = _renaming(names, list(listed), f"MCPToolset({name})")
        self._tools, refused = [], {}
        for tool_name in chosen:
            try:
                self._tools.append(MCPTool(self, listed[tool_name], prefix + rename(tool_name), **settings))
            except ToolSchemaError as error:
                refused[tool_name] = str(error)
        if refused:
            raise ToolSchemaError(
                f"MCPToolset({name}): {len(refused)} of {len(chosen)} tools cannot be shown to a model. Pass "
                f"exclude={list(refused)}, or correct them on the server:\n" + "\n".join(refused.values())
            )
        check_names(self._tools)

    def __getitem__(self, index: Any) -> Any:
        return self._tools[index]

    def __len__(self) -> int:
        return len(self._tools)


class MCPTool(Tool):
    """A tool of a server: how the server describes it (`listed`), and the session that its calls use."""

    def __init__(self, toolset: MCPToolset, listed: Any, name: str, **settings: Any) -> None:
        self._toolset = toolset
        self._listed_name = listed.name
        self._session = toolset.session
        super().__init__(self._make_function(), name=name, schema=listed, sequential=not toolset.is_shared, **settings)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """The tool with the session of an environment instance."""
        if instance is None or self._toolset.is_shared:
            return self
        sessions: dict[MCPToolset, ServerSession] = vars(instance).setdefault("_mcp_sessions", {})
        made = copy.copy(self)
        made._session = sessions.setdefault(self._toolset, self._toolset.new_session())
        made.fn = made._make_function()
        return made

    def close(self) -> None:
        """End the session of the trajectory."""
        if not self._toolset.is_shared:
            self._session.close()

    def _make_function(self) -> Callable[..., Awaitable[str]]:
        session = self._session
        name = self._listed_name
        timeout_s = self._toolset.timeout_s

        async def call(**arguments: object) -> str:
            asked = session.ask(repr(name), lambda client: _call_tool(client, name, arguments), timeout_s)
            # Cancelling it cancels the request.
            result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, session_loop()))
            return _text_of(result, name)

        return call


class MCPEnv(FunctionToolsEnv):
    """The tools of a server of MCP, for recipes; the reward comes from `reward_funcs`.

    For a reward of your own subclass `ToolEnv`, with `tools = MCPToolset(...)`.

    Args:
        server: a URL, a command line or an entry of `mcpServers`.
        toolset: further arguments of `MCPToolset`.
        **settings: settings of `ToolEnv`; process rewards are 0 unless set here.
    """

    def __init__(self, server: object, *, toolset: Mapping[str, Any] | None = None, **settings: object) -> None:
        with _toolsets_lock:  # one for all environments of the process
            tools = _toolset_of(json.dumps([server, dict(toolset or {})]))
        super().__init__(tools, **settings)


_toolsets_lock = threading.Lock()


@functools.cache
def _toolset_of(arguments: str) -> MCPToolset:
    server, options = json.loads(arguments)
    return MCPToolset(server, **options)


def _renaming(
    names: Mapping[str, str] | Callable[[str], str] | None, known: Sequence[str], owner: str
) -> Callable[[str], str]:
    """A function from a server's name to the one that the model reads.

    Raises:
        ValueError: `names` has a tool that the server does not have, or is neither a mapping nor a function.
    """
    if callable(names):
        return names
    if names is not None and not isinstance(names, Mapping):
        raise ValueError(f"{owner}: names={names!r:.200} must be a mapping or a function. Pass {{'old': 'new'}}.")
    renamed = dict(names or {})
    if unknown := sorted(set(renamed) - set(known)):
        raise ValueError(f"{owner}: names={names!r}: {unknown} fits none of {list(known)}. Correct it.")
    # Servers may use characters that no function call has.
    return lambda name: renamed.get(name) or re.sub(r"[^A-Za-z0-9_.-]", "_", name)


async def _list_tools(client: Client) -> list[Any]:
    listed, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        if not (cursor := page.next_cursor):
            return listed


def _text_of(result: CallToolResult, tool: str) -> str:
    """The text of a `CallToolResult` for a model: its texts, and what else it holds by name."""
    shown = text_of_mcp(result)
    if isinstance(shown, str):
        return shown
    if media_in(result):
        warn_of_media(tool)
    return describe_blocks(result) or "(no output)"


async def _call_tool(client: Client, name: str, arguments: dict[str, Any]) -> Any:
    """The result of a call, also where the server breaks the `outputSchema` that it published itself.

    mcp's client raises then, and the answer would be lost. It is no mistake of the model's.

    Raises:
        ServerError: it answers something that is no result.
    """
    from pydantic import ValidationError

    session: Any = client.session
    strict = getattr(session, "validate_tool_result", None)
    if strict is not None and not isinstance(strict, _Lenient):
        session.validate_tool_result = _Lenient(strict)
    try:
        return await client.call_tool(name, arguments)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}"
        raise ServerError(f"{name!r} failed: the server's answer is no result of MCP ({why})") from None


class _Lenient:
    """A check of results that warns once for each tool, and lets the result through."""

    def __init__(self, strict: Callable[..., Awaitable[None]]) -> None:
        self._strict = strict

    async def __call__(self, name: str, result: object) -> None:
        try:
            await self._strict(name, result)
        except Exception as error:  # mcp's RuntimeError; those of jsonschema and referencing where a `$ref` is dead
            _warn_of_output(name, str(error).partition("\n")[0])


@functools.cache
def _warn_of_output(name: str, why: str) -> None:
    logger.warning("MCP tool %r: its result does not fit its own outputSchema (%s). It is read as it is.", name, why)


# -------------------------------------------------------------------- how a server is named


def _read_server(server: Any, is_shared: bool) -> tuple[str, Callable[[Any], Any]]:
    """The name of a server in messages, and a function that makes the `mcp.Client` of a session."""
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.server import MCPServer, Server
    except ImportError as error:
        raise ImportError("MCPToolset needs the package mcp>=2.0: pip install 'agent-r1-trl[mcp]'.") from error
    if isinstance(server, (Server, MCPServer)):
        return server.name, lambda errors: Client(server)
    if callable(server):
        return getattr(server, "__name__", repr(server)), lambda errors: Client(server())
    if isinstance(server, str):
        server = {"url": server} if server.startswith(("http://", "https://")) else shlex.split(server)
    if isinstance(server, (list, tuple)) and server and all(isinstance(part, str) for part in server):
        server = {"command": server[0], "args": list(server[1:])}
    parts = {key: value for key, value in server.items() if key != "type"} if isinstance(server, Mapping) else {}
    if "url" in parts and set(parts) <= {"url", "headers"} and server.get("type") != "sse":
        mode = "auto" if is_shared else "legacy"  # over HTTP only these sessions have an id, and so a state
        return parts["url"], lambda errors: Client(_http(**parts), mode=mode)
    if "command" in parts and set(parts) <= {"command", "args", "env", "cwd"}:
        # A single byte that is no UTF-8, in a line of its log, would end the session.
        command = StdioServerParameters(**parts, encoding_error_handler="replace")
        return shlex.join([command.command, *command.args]), lambda errors: Client(stdio_client(command, errors))
    raise ValueError(
        f"MCPToolset: server={server!r:.200}: must be a URL, a command line, a mapping with command, args, env, cwd "
        "or url, headers, a server object of mcp, or a function that makes what mcp.Client takes. Name it so."
    )


@contextlib.asynccontextmanager
async def _http(url: str, headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with create_mcp_http_client(headers=headers) as client:
        client.timeout.read = None  # a call has a limit of its own, which may be above mcp's 300 s
        async with streamable_http_client(url, http_client=client) as streams:
            yield streams


# -------------------------------------------------------------------- sessions

T = TypeVar("T")

CONNECTION_CLOSED, LOST = -32000, ("Connection closed", "SSE stream ")
"""The code of requests that were in flight when their connection ended, and how mcp's messages of them begin: servers
give errors of their own the same code."""
INVALID_PARAMS = -32602
"""The only code with which a server says that a call was wrong; with all others it failed itself."""
ANSWER_S = 10.0
"""Seconds in which a server that has refused a call has to list its tools; else it is gone."""
MAX_ERROR_CHARS = 800


def session_loop() -> asyncio.AbstractEventLoop:
    """The loop that holds the sessions of this process; a toolset that is made on the rollout's loop waits for it."""
    return shared_loop("mcp sessions").loop


class HeldSession:
    """An open session, and the task in which it begins and ends."""

    def __init__(self, name: str, connect: Callable[[TextIO], Any], timeout_s: float) -> None:
        self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.client: asyncio.Future[Any] = self.loop.create_future()
        """The `mcp.Client`, or the `InfrastructureError` that says why there is none."""
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())  # nobody may look
        self.is_lost = False
        # It outlives the call that begins it, and has none of its variables.
        holding = self._hold(name, connect, timeout_s)
        self._task = self.loop.create_task(holding, context=contextvars.Context())

    def end(self) -> None:
        """End it; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._over.set)

    def lose(self, error: InfrastructureError) -> HeldSession:
        """Let further requests hear why there is none."""
        self.is_lost, self.client = True, self.loop.create_future()
        self.client.set_exception(error)
        return self

    async def _hold(self, name: str, connect: Callable[[TextIO], Any], timeout_s: float) -> None:
        async with tail_of(MAX_ERROR_CHARS) as errors:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    async with asyncio.timeout(timeout_s):
                        client = await stack.enter_async_context(connect(errors.file))
                    errors.file.close()  # the command has it
                    self.client.set_result(client)
                    await self._over.wait()
            except BaseException as error:  # the ends of broken connections too
                if not self.client.done():
                    said = await errors.text()
                    told = f"MCP server {name} cannot be reached (connect_timeout_s={timeout_s:g}): {_told(error)}"
                    told += f"; it wrote: {said}." if said else "."
                    self.client.set_exception(InfrastructureError(f"{told} Start it, or correct server=..."))


class ServerSession:
    """One session with a server at a time, which begins with the first request.

    Args:
        name: of the server, in messages.
        connect: makes the `mcp.Client`, from a file for what a command writes to its error output.
        connect_timeout_s: maximum seconds until it is connected.
        is_renewed: whether another session follows one that was lost; False if sessions have state.
    """

    def __init__(
        self, name: str, connect: Callable[[TextIO], Any], connect_timeout_s: float, is_renewed: bool
    ) -> None:
        self._name = name
        self._connect = connect
        self._is_renewed = is_renewed
        self._connect_timeout_s = connect_timeout_s
        self._held: HeldSession | None = None

    async def ask(self, what: str, request: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """The answer to a request, which is a function of the `mcp.Client`. Runs on the session loop.

        Raises:
            InfrastructureError: the server cannot be reached, or went away.
            JobTimeoutError: it has not answered in time.
            HandledError: it refused the request, or failed in it (`ServerError`).
            Exception: what else the request raised while the server is well.
        """
        held = self._open()
        opened = held.client
        try:
            client = await asyncio.shield(opened)
            async with asyncio.timeout(timeout_s) as limit:
                return await request(client)
        except Exception as error:
            if opened.exception() is not None:
                self._drop(held)
                failure: Exception = error
            elif limit.expired():
                if self._is_renewed:  # one that hangs as a whole gets another session
                    self._checking = asyncio.create_task(self._is_gone(held, self._connect_timeout_s))
                failure = JobTimeoutError(f"{what} took longer than {timeout_s:g} s and was given up.")
            else:
                failure = await self._explain(held, what, error)
            failure.__cause__ = error if failure is not error else error.__cause__
        raise failure

    def close(self) -> None:
        """End the session; a further request begins another one. From any thread."""
        held, self._held = self._held, None
        if held is not None:
            held.end()

    def _open(self) -> HeldSession:
        if self._held is None or self._held.loop is not asyncio.get_running_loop():  # of a parent process
            self._held = HeldSession(self._name, self._connect, self._connect_timeout_s)
            weakref.finalize(self, self._held.end).atexit = False
        return self._held

    async def _explain(self, held: HeldSession, what: str, error: Exception) -> Exception:
        """The exception of a request that failed in time."""
        is_lost = getattr(error, "code", None) == CONNECTION_CLOSED and str(error).startswith(LOST)
        if is_lost or await self._is_gone(held, ANSWER_S):
            self._drop(held)
            told = f"MCP server {self._name} went away ({_told(error)})."
            if self._is_renewed:
                return InfrastructureError(told)
            lost = InfrastructureError(f"{told} The state of the trajectory went with it.")
            self._held = held.lose(lost)
            return lost
        if type(error).__name__ != "MCPError":
            return error
        kind = HandledError if getattr(error, "code", None) == INVALID_PARAMS else ServerError
        return kind(f"{what} failed: {error}")

    async def _is_gone(self, held: HeldSession, timeout_s: float) -> bool:
        """Whether a server no longer lists its tools; its session is left then."""
        try:
            async with asyncio.timeout(timeout_s):
                await held.client.result().session.list_tools()
                return False
        except Exception:
            self._drop(held)
            return True

    def _drop(self, held: HeldSession) -> None:
        held.end()
        if self._held is held and not held.is_lost:
            self._held = None


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
