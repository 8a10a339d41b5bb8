"""Checks of tools: can a model be told about them, and is what they return worth reading?"""

from __future__ import annotations

import collections
import re
from typing import Any

from agent_r1_trl.doctor.report import Report, describe_error
from agent_r1_trl.tools import Tool, as_tool
from agent_r1_trl.tools.executor import THREAD_HINT
from agent_r1_trl.trajectory import ToolErrorKind, ToolResult

# These point to a mistake in the tool itself, whatever its arguments were.
_BUGS = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "NotImplementedError", "SystemExit")
_EMPTY = ("None", "null", "nan", "NaN", "(no output)")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\d{7,}")


DESCRIBE = (
    "Give the function type hints and a docstring that says what it does and what each argument means; or describe it "
    "yourself: Tool(fn, schema={...})."
)


def check_tools(report: Report, declared: Any) -> list[Tool]:
    """Check the list of tools, their names, schemas and descriptions; returns the tools that a model can call."""
    if isinstance(declared, (str, bytes)) or not hasattr(declared, "__iter__"):
        message = f"`tools` is {declared!r:.100}, not a list."
        report.error("tools", message, "Set tools = [function, ...] on the class; [] where there are none.")
        return []
    usable: list[Tool] = []
    for item in declared:
        try:
            found = as_tool(item)
            description = found.description
        except Exception as error:  # a user's hints, docstring or schema may fail in any way
            report.error(
                "tools",
                f"{describe_error(error, 500)}.",
                DESCRIBE,
            )
            continue
        usable.append(found)
        properties = found.schema["function"]["parameters"].get("properties", {})
        bare = [name for name, item in properties.items() if isinstance(item, dict) and _says_nothing(item)]
        if bare:
            message = f"Tool {found.name!r} has no description of {', '.join(map(repr, bare))}: a model has to guess."
            report.warning("tools", message, "Describe every argument in the docstring's 'Args:'.")
        if len(description.split()) < 2:
            message = f"Tool {found.name!r}: {description!r} is too short for a model to know when to call it."
            report.warning("tools", message, "Say in the docstring's first line what the tool does and returns.")
    for name, count in collections.Counter(found.name for found in usable).items():
        if count > 1:
            message = f"{count} tools are called {name!r}: the model can reach only one of them."
            report.error("tools", message, "Give each its own name with @tool(name=...).")
    return usable


def list_tools(tools: list[Tool]) -> str:
    """The message of a check of tools that found nothing."""
    if not tools:
        return "No tools."
    in_order = ", ".join(found.name for found in tools if found.sequential)
    beside = f" Calls of one turn run one after another (sequential=False lifts that): {in_order}." if in_order else ""
    return f"Schemas that a model can read: {', '.join(found.name for found in tools)}.{beside}"


def check_result(report: Report, result: ToolResult) -> None:
    """What the model reads after a call that the tool's schema allows; other calls never reach the tool."""
    name, text = result.call.name, _ADDRESS.sub("...", result.content[:300])  # else no two findings are the same
    if result.error is ToolErrorKind.TIMEOUT:
        report.error("tools", f"Tool {name!r} hangs: {text}", "Give its inner calls a timeout.")
    elif result.error is ToolErrorKind.INFRASTRUCTURE and THREAD_HINT in result.content:
        cure = "Open what it uses in each call, in reset, or with sqlite3.connect(..., check_same_thread=False)."
        report.error("tools", f"Tool {name!r} is bound to a thread. {text}".splitlines()[0], cure)
    elif result.error is ToolErrorKind.EXCEPTION:
        error = "".join(re.findall(r"failed: (\w+)", text)[:1])
        if error == "ValueError":  # how a tool tells the model that an argument makes no sense
            return
        cure = "Correct it, or describe the allowed arguments more exactly (Literal[...], 'Args:')."
        add = report.error if error in _BUGS else report.warning
        message = f"Tool {name!r} failed on {result.call.arguments!r:.200}, which its schema allows. {text}"
        add("tools", message.splitlines()[0], cure)
    elif result.error is None and (not text.strip() or text in _EMPTY or re.search(r"<.+ at \.\.\.>", text)):
        message = f"Tool {name!r} returned {text!r}, which tells the model nothing."
        report.warning("tools", message, "Return text or plain JSON values; say in words that nothing was found.")


def _says_nothing(schema: dict[str, Any]) -> bool:
    """Whether the schema of an argument has no word of what it may be: neither a description nor a set of values."""
    is_free = schema.get("type") != "boolean" and not schema.keys() & {
        "enum",
        "const",
        "minimum",
        "maximum",
        "pattern",
    }
    return is_free and not schema.get("description")
