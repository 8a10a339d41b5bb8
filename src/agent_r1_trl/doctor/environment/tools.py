"""Checks of an environment's tools: can a model be told about them, and do they answer?

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
from typing import Any

from agent_r1_trl.doctor.environment.report import Report, describe_error
from agent_r1_trl.tools import Tool, as_tool

MAX_SCHEMA_CHARS = 4000
_BUGS = (NameError, ImportError, SyntaxError, NotImplementedError, SystemExit, KeyboardInterrupt)


def read_tools(report: Report, declared: Any) -> list[Tool]:
    """The usable tools, in order; the others become errors."""
    if isinstance(declared, (str, bytes)) or not hasattr(declared, "__iter__"):
        report.error(
            "tools",
            f"`tools` is {declared!r:.100}, not a list.",
            "Set tools = [function, ...] on the class; [] where there are none.",
        )
        return []
    tools: list[Tool] = []
    for item in declared:
        try:
            tools.append(as_tool(item))
        except Exception as error:
            report.error("tools", describe_error(error), "Pass functions with type hints and a docstring, or Tools.")
    return tools


def check_tools(report: Report, tools: list[Tool]) -> list[Tool]:
    """Check names, schemas and descriptions; returns the tools a model can call."""
    usable: list[Tool] = []
    names: dict[str, int] = {}
    for tool in tools:
        names[tool.name] = names.get(tool.name, 0) + 1
        if check_tool(report, tool):
            usable.append(tool)
    for name, count in names.items():
        if count > 1:
            report.error(
                "tools",
                f"{count} tools are called {name!r}: the model can reach only one of them.",
                "Give each its own name with @tool(name=...).",
            )
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.lower().replace("-", "_"), name)
        if other != name:
            report.warning(
                "tools", f"The tool names {other!r} and {name!r} are easily mistaken for each other.", "Rename one."
            )
    return usable


def check_tool(report: Report, tool: Tool) -> bool:
    """Check one tool's schema; False if a model cannot be told about it."""
    try:
        schema = tool.schema
        text = json.dumps(schema, ensure_ascii=False)
        problems = tool.check_arguments({})[1]
    except Exception as error:
        report.error(
            "tools",
            describe_error(error, 500),
            "Give it type hints and a Google docstring: what it does, then 'Args:' with a line per argument.",
        )
        return False
    if any("cannot be checked" in problem for problem in problems):
        report.error("tools", f"Tool {tool.name!r}: arguments cannot be checked against its schema.", "Simplify it.")
        return False
    if len(tool.description.split()) < 2:
        report.warning(
            "tools",
            f"Tool {tool.name!r}: the description {tool.description!r} is too short for a model to know when to call.",
            "Say in the docstring's first line what the tool does and returns.",
        )
    for name, spec in schema["function"]["parameters"].get("properties", {}).items():
        if isinstance(spec, dict) and not str(spec.get("description") or "").strip():
            report.warning(
                "tools",
                f"Tool {tool.name!r}: the argument {name!r} has no description.",
                "Add it to 'Args:' in the docstring.",
            )
    if len(text) > MAX_SCHEMA_CHARS:
        report.warning(
            "tools",
            f"Tool {tool.name!r}: its schema has {len(text)} characters, which every prompt carries.",
            "Shorten the docstring.",
        )
    return True


def watch_results(report: Report, tool: Tool) -> Tool:
    """A copy of a tool that reports strange return values and exceptions."""
    with contextlib.suppress(Exception):
        _ = tool.schema  # made (and kept) before the function is wrapped
    watched = copy.copy(tool)
    function = tool.fn

    def render(value: Any) -> str:
        problem = describe_strange_result(value)
        if problem:
            report.warning(
                "tools", f"Tool {tool.name!r} returned {problem}.", "Return a string: it is what the model reads."
            )
        return tool.render(value)

    def complain(error: BaseException, arguments: dict[str, Any]) -> None:
        # A ValueError is how a tool tells the model that an argument makes no sense.
        if isinstance(error, (ValueError, asyncio.CancelledError)) or not report.is_first((tool.name, type(error))):
            return
        call = f"{tool.name}({', '.join(f'{name}={value!r:.60}' for name, value in arguments.items())})"
        text = describe_error(error)
        is_thread_bound = "thread" in text and type(error).__name__ == "ProgrammingError"
        cure = "Mend it, or describe the allowed arguments more exactly (Literal[...], 'Args:')."
        if is_thread_bound:
            cure = "Tools run on worker threads: open it with sqlite3.connect(..., check_same_thread=False)."
        add = report.error if is_thread_bound or isinstance(error, _BUGS) else report.warning
        add("tools", f"{call}, which its schema allows, raised {text}.", cure)

    def run(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except BaseException as error:
            complain(error, arguments)
            raise

    async def run_async(**arguments: Any) -> Any:
        try:
            return await function(**arguments)
        except BaseException as error:
            complain(error, arguments)
            raise

    watched.render = render
    watched.fn = run_async if tool.is_async else run
    return watched


def describe_strange_result(value: Any) -> str | None:
    """Why a return value makes poor reading; None if it does not."""
    if value is None:
        return "None, which tells the model nothing"
    if isinstance(value, (bytes, bytearray)):
        return "bytes"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no JSON"
    if isinstance(value, (str, int, float, bool)):
        return None
    if isinstance(value, (dict, list, tuple)):
        items = list(value.values() if isinstance(value, dict) else value)[:20]
        return next((found for item in items if item is not None and (found := describe_strange_result(item))), None)
    if hasattr(value, "__next__") or hasattr(value, "__anext__"):
        return "a generator, of which the model reads only the address"
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        return f"a {kind.__name__} object, of which the model reads only the address"
    return None
