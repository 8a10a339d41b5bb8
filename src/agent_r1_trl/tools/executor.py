"""Running the calls of one assistant turn: all at once, each with its own limits, none able to hurt another.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

Every failure becomes a `ToolResult` whose text tells the model what was wrong and how to call right.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.tools.base import Tool, as_tool, check_timeout
from agent_r1_trl.tools.calls import read_arguments, read_call
from agent_r1_trl.tools.pool import JobTimeoutError, PoolExhaustedError, shared_pool
from agent_r1_trl.trajectory import ToolCall, ToolErrorKind, ToolResult

MAX_DETAIL_CHARS = 500
MAX_SCHEMA_CHARS = 1500
CHARS_PER_TOKEN = 4


class ToolExecutor:
    """Executes calls against a set of tools.

    Args:
        tools: functions or `Tool`s; names must differ.
        timeout_s: seconds a call may take if its tool does not say; None: no limit.
        max_workers: most plain (not async) tools that run at once; the threads are shared by the whole process.
        truncate: `(text, max_tokens) -> text`, exact in the model's tokens; without it 4 characters count as one.

    Raises:
        ValueError: two tools of one name, or a value out of range.
    """

    def __init__(
        self,
        tools: Iterable[Any],
        *,
        timeout_s: float | None = 30.0,
        max_workers: int = 32,
        truncate: Callable[[str, int], str] | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        for item in tools:
            candidate = as_tool(item)
            if candidate.name in self.tools:
                raise ValueError(f"tools: two are called {candidate.name!r}: rename one with @tool(name=...).")
            self.tools[candidate.name] = candidate
        self.timeout_s = check_timeout(timeout_s)
        self.truncate = truncate
        self._pool = shared_pool(max_workers)

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run all calls at once and return their results in the order of the calls. Never raises.

        Sequential tools (methods of an environment) wait for each other, in the order of the calls, not for the rest.
        """
        read = [read_call(call) for call in calls]
        results: list[ToolResult | None] = [None] * len(read)

        async def run(indices: list[int]) -> None:
            for index in indices:
                results[index] = await self._run(read[index])

        in_order = [index for index, call in enumerate(read) if self._is_sequential(call)]
        groups = [[index] for index in range(len(read)) if index not in set(in_order)]
        tasks = [asyncio.create_task(run(group)) for group in ([*groups, in_order] if in_order else groups)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [result for result in results if result is not None]

    def explain_malformed(self, reason: str) -> str:
        """What the model is told about a call that could not be read."""
        return _clean(
            f"Error: the tool call could not be read: {_cut(reason, MAX_DETAIL_CHARS)}\n{self._how_to_call()}"
        )

    def explain_no_call(self) -> str:
        """What the model is told when it should have gone on and did not call."""
        return f"The task is not finished. {self._how_to_call()}"

    # ---------------------------------------------------------------- one call

    def _is_sequential(self, call: ToolCall) -> bool:
        found = self.tools.get(call.name) if isinstance(call.name, str) else None
        return bool(found and found.sequential)

    async def _run(self, call: ToolCall) -> ToolResult:
        try:
            found, arguments, failure = self._check(call)
        except Exception as error:  # the tool's own schema is broken
            failure = (ToolErrorKind.EXCEPTION, f"tool {call.name!r} cannot be used: {_describe_error(error)}")
            found, arguments = None, {}
        started = time.perf_counter()
        if failure is None and found is not None:
            text, failure = await self._invoke(found, arguments)
            if failure is None:
                content, is_cut = self._limit(found, _clean(text))
                return ToolResult(
                    call=call, content=content, latency_s=time.perf_counter() - started, is_truncated=is_cut
                )
        kind, detail = failure or (ToolErrorKind.EXCEPTION, "unknown failure")
        content = _clean(f"Error: {_cut(detail, MAX_DETAIL_CHARS)}\n{self._advise(found, kind)}")
        return ToolResult(call=call, content=content, error=kind, latency_s=time.perf_counter() - started)

    def _check(self, call: ToolCall) -> tuple[Tool | None, dict[str, Any], tuple[ToolErrorKind, str] | None]:
        if not isinstance(call.name, str) or not call.name.strip():
            shown = _cut(_dump(call.arguments), 200)
            return None, {}, (ToolErrorKind.MALFORMED, f"the tool call has no tool name: {shown}")
        found = self.tools.get(call.name) or self.tools.get(call.name.strip())
        if found is None:
            close = difflib.get_close_matches(call.name[:100], self.tools, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            return None, {}, (ToolErrorKind.UNKNOWN_TOOL, f"there is no tool {_cut(call.name, 100)!r}.{hint}")
        arguments = read_arguments(call.arguments)
        if isinstance(arguments, str):
            detail = f"the arguments of {found.name!r} are not valid JSON: {_cut(arguments, 200)}"
            return found, {}, (ToolErrorKind.MALFORMED, detail)
        checked, problems = found.check_arguments(arguments)
        if problems:
            detail = f"wrong arguments for {found.name!r}: {'; '.join(problems)}."
            return found, {}, (ToolErrorKind.INVALID_ARGUMENTS, detail)
        return found, checked, None

    async def _invoke(self, found: Tool, arguments: dict[str, Any]) -> tuple[str, tuple[ToolErrorKind, str] | None]:
        timeout_s = found.timeout_s if found.timeout_s is not None else self.timeout_s

        def work() -> _Outcome:
            try:
                value = found.fn(**arguments)
                return _Outcome(value=value) if inspect.isawaitable(value) else _Outcome(text=found.render(value))
            except BaseException as error:  # SystemExit too; no user's Ctrl-C arrives on a worker thread
                return _Outcome(error=error)

        try:
            if found.is_async:
                outcome = await _await_tool(found, work(), timeout_s)
            else:
                outcome = await self._pool.run(work, timeout_s=timeout_s)
                if outcome.value is not None:  # a plain function that returned a coroutine
                    outcome = await _await_tool(found, outcome, timeout_s)
        except JobTimeoutError:
            return "", (ToolErrorKind.TIMEOUT, f"{found.name!r} took longer than {timeout_s:g} s and was given up.")
        except PoolExhaustedError as error:
            return "", (ToolErrorKind.TIMEOUT, f"{found.name!r} could not start: {error}.")
        if outcome.error is not None:
            return "", (ToolErrorKind.EXCEPTION, f"{found.name!r} failed: {_describe_error(outcome.error)}")
        return str(outcome.text), None

    # ---------------------------------------------------------------- texts

    def _advise(self, found: Tool | None, kind: ToolErrorKind) -> str:
        if found is None:
            return self._how_to_call()
        try:
            advice = f"Call it as {found.signature}."
            if kind in (ToolErrorKind.MALFORMED, ToolErrorKind.INVALID_ARGUMENTS):
                schema = _without_descriptions(found.schema["function"]["parameters"])
                advice += f" Schema of its arguments: {_cut(_dump(schema), MAX_SCHEMA_CHARS)}"
        except ValueError:  # its schema is broken, which the user was told when the prompt was made
            return self._how_to_call()
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

    def _limit(self, found: Tool, text: str) -> tuple[str, bool]:
        cut = text
        if found.max_result_chars is not None:
            cut = cut[: found.max_result_chars]
        if found.max_result_tokens is not None:
            if self.truncate is not None:
                # No token spans this many characters in practice; the bound keeps a tokenizer from reading megabytes.
                cut = self.truncate(cut[: 64 * found.max_result_tokens], found.max_result_tokens)
            else:
                cut = cut[: CHARS_PER_TOKEN * found.max_result_tokens]
        if len(cut) >= len(text):
            return text, False
        return f"{cut}\n[truncated: the first {len(cut)} of {len(text)} characters are shown]", True


@dataclass
class _Outcome:
    """How a function call went; `value` is set only where there is something left to await."""

    text: str = ""
    value: Any = None
    error: BaseException | None = None


async def _await_tool(found: Tool, outcome: _Outcome, timeout_s: float | None) -> _Outcome:
    if outcome.value is None:
        return outcome

    async def guarded() -> _Outcome:
        try:
            return _Outcome(text=found.render(await outcome.value))
        except asyncio.CancelledError as error:
            return _Outcome(error=error)
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                raise  # the user's; on any other thread the tool made it up
            return _Outcome(error=error)
        except BaseException as error:  # SystemExit as well: a tool must not end the training
            return _Outcome(error=error)

    task = asyncio.ensure_future(guarded())
    try:
        # asyncio.wait_for would wait until the cancelled tool agrees to stop, and a tool may swallow cancellation.
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except BaseException:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise JobTimeoutError
    return task.result()


def _describe_error(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{name}: {text}" if text else name


def _without_descriptions(node: Any, *, is_properties: bool = False) -> Any:
    """The prompt has them already; an argument may itself be called `description`."""
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_descriptions(value, is_properties=key == "properties" and not is_properties)
        for key, value in node.items()
        if is_properties or key != "description"
    }


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # nested too deep, numbers too long to print, keys that are no strings
        return f"({type(value).__name__})"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... [truncated]"


def _clean(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
