"""Runs the calls of one assistant turn: all at once, each within its own limits, none able to disturb another.

Every failure becomes a `ToolResult` whose text tells the model what was wrong and how to call right.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import threading
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import whole
from agent_r1_trl.settings import Seconds, check_value
from agent_r1_trl.tools.base import Tool, as_tool
from agent_r1_trl.tools.blocks import media_in, warn_of_media
from agent_r1_trl.tools.calls import read_arguments, read_call
from agent_r1_trl.tools.faults import (
    HandledError,
    InfrastructureError,
    ReportedError,
    fault_of,
    is_infrastructure_error,
    is_out_of_use,
    is_thread_error,
)
from agent_r1_trl.tools.foreign import text_of_mcp
from agent_r1_trl.tools.pool import JobTimeoutError, PoolExhaustedError, own_context, own_thread, shared_pool
from agent_r1_trl.tools.render import NoTextError
from agent_r1_trl.tools.signature import ToolSchemaError
from agent_r1_trl.tools.variables import private_context
from agent_r1_trl.trajectory import ToolCall, ToolErrorKind, ToolFault, ToolResult

MAX_DETAIL_CHARS = 500
THREAD_HINT = " (tools do not run in the main thread; see docs/tools.md, Threads and event loops)"
MAX_SCHEMA_CHARS = 1500
MAX_RETRY_WAIT_S = 30.0
DEFAULT_QUEUE_TIMEOUT_S = 600.0


def check_names(tools: Iterable[Tool]) -> dict[str, Tool]:
    """The tools by name, of which no two may be equal."""
    named: dict[str, Tool] = {}
    for item in tools:
        if item.name in named:
            raise ToolSchemaError(f"tools: two are called {item.name!r}. Give one another name with @tool(name=...).")
        named[item.name] = item
    return named


class ToolExecutor:
    """Executes calls against a set of tools.

    Args:
        tools: functions or `Tool`s with different names.
        timeout_s: maximum seconds per call of a tool that sets no limit itself; None for no limit.
        max_workers: maximum number of plain (not async) tools that run at once; the whole process shares the threads.
        queue_timeout_s: maximum seconds that a plain tool waits for a free thread, before it runs; None for no limit.
            The wait is not the tool's time, and a call that waited in vain is an infrastructure failure.

    Raises:
        ToolSchemaError: two tools have the same name.
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        tools: Iterable[Any],
        *,
        timeout_s: float | None = 30.0,
        max_workers: int = 32,
        queue_timeout_s: float | None = DEFAULT_QUEUE_TIMEOUT_S,
    ) -> None:
        self.tools = check_names(map(as_tool, tools))
        check_value("timeout_s", timeout_s, Seconds | None)
        check_value("queue_timeout_s", queue_timeout_s, Seconds | None)
        self.timeout_s, self.queue_timeout_s = timeout_s, queue_timeout_s
        self._pool = shared_pool(max_workers)

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run all calls at once and return their results in the order of the calls. Never raises.

        Sequential tools (methods of an environment or of another object) run one after another, in the order of the
        calls, while the others run beside them. Context variables that a sequential tool sets stay set; each of the
        others has a copy of its own.
        """
        read = [read_call(call) for call in calls]
        results: list[ToolResult | None] = [None] * len(read)

        async def run(indices: list[int]) -> None:
            for index in indices:
                results[index] = await self._run(read[index])

        in_order = [index for index, call in enumerate(read) if self._is_sequential(call)]
        beside = [index for index in range(len(read)) if index not in set(in_order)]
        tasks = [asyncio.create_task(run([index]), context=private_context()) for index in beside]
        try:
            await run(in_order)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [result for result in results if result is not None]

    def explain_malformed(self, reason: str) -> str:
        """Text that tells the model about a call that could not be read."""
        return whole(
            f"Error: the tool call could not be read: {_cut(reason, MAX_DETAIL_CHARS)}\n{self._how_to_call()}"
        )

    def explain_no_call(self, cut_off: object = None) -> str:
        """Text that tells the model to go on after a turn without a call, and why the turn ended if it was cut off."""
        reason = f" ({whole(str(cut_off))})" if cut_off else ""
        return f"The task is not finished{reason}. {self._how_to_call()}"

    # ---------------------------------------------------------------- one call

    def _is_sequential(self, call: ToolCall) -> bool:
        found = self._find(call.name) if isinstance(call.name, str) else None
        return bool(found and found.sequential)

    def _find(self, name: str) -> Tool | None:
        return self.tools.get(name) or self.tools.get(name.strip())

    async def _run(self, call: ToolCall) -> ToolResult:
        result = ToolResult(call=call, content="", attempts=0)
        try:
            found, arguments = self._check(call)
            text = await self._invoke(found, arguments, result)
            result.content, result.is_truncated = _limit(found, whole(text))
        except _CallError as failure:
            result.content, result.is_truncated = self._describe(failure)
            result.error, result.judged_fault = failure.kind, failure.fault
        return result

    def _check(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """The tool and the checked arguments of a call."""
        if not isinstance(call.name, str) or not call.name.strip():
            shown = _cut(_dump(call.arguments), 200)
            raise _CallError(ToolErrorKind.MALFORMED, f"the tool call has no tool name: {shown}")
        found = self._find(call.name)
        if found is None:
            hint = did_you_mean(call.name, self.tools)
            raise _CallError(ToolErrorKind.UNKNOWN_TOOL, f"there is no tool {_cut(call.name, 100)!r}.{hint}")
        arguments = read_arguments(call.arguments)
        try:
            _ = found.schema
        except Exception as error:  # it is broken, whatever the model writes
            detail = f"tool {call.name!r} cannot be used: {_describe_error(error)}"
            raise _CallError(ToolErrorKind.INFRASTRUCTURE, detail) from error
        try:
            checked, problems = found.check_arguments(arguments)
        except Exception as error:  # a bug in a validator of the user's own type
            raise _failed_call(found, error, arguments) from error
        if isinstance(arguments, str):
            detail = f"the arguments of {found.name!r} are not valid JSON: {_cut(arguments, 200)}"
            raise _CallError(ToolErrorKind.MALFORMED, detail, found)
        if problems:
            detail = f"wrong arguments for {found.name!r}: {'; '.join(problems)}."
            raise _CallError(ToolErrorKind.INVALID_ARGUMENTS, detail, found)
        return found, checked

    async def _invoke(self, found: Tool, arguments: dict[str, Any], result: ToolResult) -> str:
        """The rendered result of a tool, which is called again if its infrastructure failed."""
        if found.max_attempts == 1:
            return await self._attempt(found, arguments, result)
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

        wait_s = found.retry_wait_s
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, _CallError) and error.is_repeatable),
            stop=stop_after_attempt(found.max_attempts),
            wait=wait_exponential(wait_s, max=MAX_RETRY_WAIT_S) + wait_random(0, wait_s / 2),
            reraise=True,
        )
        return await retrying(self._attempt, found, arguments, result)

    async def _attempt(self, found: Tool, arguments: dict[str, Any], result: ToolResult) -> str:
        timeout_s = found.timeout_s if found.timeout_s is not None else self.timeout_s
        submitted = began = time.perf_counter()
        result.attempts += 1

        def work() -> Any:
            """Return the text, the failure, or what has to be awaited."""
            nonlocal began
            began = time.perf_counter()
            try:
                value = found.fn(**arguments)
                return value if inspect.isawaitable(value) else _text_of(found, value)
            except BaseException as error:  # SystemExit too; the user's Ctrl-C never arrives on a worker thread
                return _failed_call(found, error, arguments)

        try:
            if found.is_async:
                outcome = work()
            else:
                outcome = await (found.place or self._pool).run(
                    work,
                    timeout_s=timeout_s,
                    queue_timeout_s=self.queue_timeout_s,
                    thread=own_thread.get() if found.sequential else None,
                )
            if inspect.isawaitable(outcome):
                outcome = await _await_tool(found, outcome, arguments, timeout_s)
        except JobTimeoutError as error:
            detail = str(error) or f"{found.name!r} took longer than {timeout_s:g} s and was given up."
            fault = ToolFault.MODEL if isinstance(TimeoutError(), found.user_errors or ()) else ToolFault.TOOL
            is_backends = found.backend and fault is ToolFault.TOOL
            kind = ToolErrorKind.INFRASTRUCTURE if is_backends else ToolErrorKind.TIMEOUT
            raise _CallError(kind, detail, found, fault=fault) from error
        except PoolExhaustedError as error:
            result.queue_s += time.perf_counter() - submitted
            began = math.inf
            detail = f"{found.name!r} could not start: {error}."
            raise _CallError(ToolErrorKind.INFRASTRUCTURE, detail, found) from error
        finally:
            if began < math.inf:
                result.queue_s += began - submitted
                result.latency_s += time.perf_counter() - began
        if isinstance(outcome, _CallError):
            raise outcome
        return str(outcome)

    # ---------------------------------------------------------------- texts

    def _describe(self, failure: _CallError) -> tuple[str, bool]:
        """The text of a failure for the model, and whether it was cut to the tool's limits."""
        if failure.is_reported and failure.tool is not None:
            return _limit(failure.tool, whole(failure.detail))
        return whole(f"Error: {_cut(failure.detail, MAX_DETAIL_CHARS)}\n{self._advise(failure)}"), False

    def _advise(self, failure: _CallError) -> str:
        if failure.tool is None:
            return self._how_to_call()
        advice = f"Call it as {failure.tool.signature}."
        if failure.kind in (ToolErrorKind.MALFORMED, ToolErrorKind.INVALID_ARGUMENTS):
            schema = _without_descriptions(failure.tool.schema["function"]["parameters"])
            advice += f" Schema of its arguments: {_cut(_dump(schema), MAX_SCHEMA_CHARS)}"
        return advice

    def _how_to_call(self) -> str:
        if not self.tools:
            return "There are no tools: answer without a tool call."
        listed = []
        for candidate in self.tools.values():
            try:
                listed.append(candidate.signature)
            except ValueError:  # its schema is broken; the name still helps
                listed.append(candidate.name)
        return _cut(f"Call a tool by its name, with a JSON object of arguments. Tools: {'; '.join(listed)}", 2000)


@dataclass(eq=False)
class _CallError(Exception):
    """A call failed: how, what to tell the model, and the tool, if there is one whose signature helps."""

    kind: ToolErrorKind
    detail: str
    tool: Tool | None = None
    fault: ToolFault | None = None
    is_repeatable: bool = False
    is_reported: bool = False


def _text_of(found: Tool, value: object) -> str:
    """The text of what a tool returned.

    Raises:
        NoTextError: there is none, or the tool's `render` failed in another way than the tool itself may.
        HandledError: the result says that the tool failed.
    """
    value = text_of_mcp(value)
    try:
        text = str(found.render(value))
        if any(name in text for name in media_in(value)):  # else the tool's own `render` has words for it
            warn_of_media(found.name)
        return text
    except Exception as error:
        if isinstance(error, (NoTextError, InfrastructureError, ReportedError, HandledError)):
            raise
        if isinstance(error, found.user_errors or ()):  # a `render` may look at what the tool found
            raise
        kind, why = type(value).__name__, _describe_error(error)
        raise NoTextError(f"an object of type {kind}, which cannot be turned into text ({why})") from error


def _failed_call(found: Tool, error: BaseException, arguments: dict[str, Any]) -> _CallError:
    """The failure of a call whose tool raised."""
    fault = fault_of(error, found.user_errors, arguments)
    if isinstance(error, ReportedError):
        return _CallError(ToolErrorKind.EXCEPTION, str(error), found, fault=fault, is_reported=True)
    if isinstance(error, NoTextError):  # by the tool's own doing, whatever the arguments; a second call gives no other
        return _CallError(ToolErrorKind.INFRASTRUCTURE, f"{found.name!r} returned {error}", found)
    is_handled = isinstance(error, HandledError)
    is_thread = is_thread_error(error, arguments)
    text = str(error) if is_handled else f"{found.name!r} failed: {_describe_error(error)}"
    is_infrastructure = is_infrastructure_error(error, has_backend=found.backend, arguments=arguments)
    if fault is ToolFault.MODEL and not is_thread and not isinstance(error, InfrastructureError):
        is_infrastructure = False  # the tool's own word counts more than the rule for lost connections
    is_infrastructure = is_infrastructure or is_out_of_use(error, arguments)  # which no argument causes
    return _CallError(
        ToolErrorKind.INFRASTRUCTURE if is_infrastructure else ToolErrorKind.EXCEPTION,
        f"{text}{THREAD_HINT * is_thread}",
        found,
        fault=None if is_infrastructure else fault,
        is_repeatable=is_infrastructure and not is_thread,
        is_reported=is_handled,
    )


async def _await_tool(found: Tool, value: Awaitable[Any], arguments: dict[str, Any], timeout_s: float | None) -> Any:
    async def guarded() -> Any:
        try:
            return _text_of(found, await value)
        except (JobTimeoutError, PoolExhaustedError):  # of a tool that keeps its own time, or waits for its turn
            raise
        except BaseException as error:  # SystemExit too: a tool must not end the training
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's; on any other thread the tool raised it itself
            return _failed_call(found, error, arguments)

    context = own_context() if found.sequential else None
    task = asyncio.get_running_loop().create_task(guarded(), context=context)
    try:
        # asyncio.wait_for would wait until the cancelled tool agrees to stop, and a tool may swallow cancellation.
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
    if not done:
        raise JobTimeoutError
    return task.result()


def _describe_error(error: BaseException) -> str:
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _without_descriptions(node: object, *, is_properties: bool = False) -> Any:
    """Drop the descriptions, which the prompt contains already; an argument called `description` stays."""
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_descriptions(value, is_properties=key == "properties" and not is_properties)
        for key, value in node.items()
        if is_properties or key != "description"
    }


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # nested too deeply, numbers too long to print, keys that are not strings
        return f"({type(value).__name__})"


def _limit(found: Tool, text: str) -> tuple[str, bool]:
    cut = text[: found.max_result_chars]
    if len(cut) >= len(text):
        return text, False
    return f"{cut}\n[truncated: the first {len(cut)} of {len(text)} characters are shown]", True


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... [truncated]"
