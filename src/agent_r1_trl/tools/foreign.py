"""Tools of other libraries: LangChain and smolagents; results of MCP.

They are recognised by what they have, so none of these libraries is needed here. Each brings its schema as its
library sends it to a model, and makes its own objects of the arguments.

LangChain and MCP can hand a failure to the model as if it were a result. Here it stays a failure, of
which the model reads the text that the tool's author chose: `HandledError`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

from agent_r1_trl.tools.faults import HandledError
from agent_r1_trl.tools.schema import Schema, inline_references


def read_foreign(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    """The function behind a tool of another library, and its schema; None if `obj` is no such tool."""
    if inspect.isroutine(obj) or inspect.isclass(obj) or not isinstance(getattr(obj, "name", None), str):
        return None
    for read in (_langchain, _smolagents):
        found = read(obj)
        if found is not None:
            named = {"name": obj.name, "description": obj.description or "", **found[1]}
            named["parameters"] = inline_references(named["parameters"])  # drops definitions that nothing refers to
            return found[0], {"type": "function", "function": named}
    return None


def _langchain(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    if not hasattr(obj, "args_schema") or not callable(getattr(obj, "invoke", None)):
        return None
    convert = importlib.import_module("langchain_core.utils.function_calling").convert_to_openai_tool

    def request(arguments: dict[str, Any]) -> dict[str, Any]:
        # Only the answer to a whole call says whether the tool failed.
        return {"type": "tool_call", "id": "call", "name": obj.name, "args": arguments}

    async def call_async(**arguments: Any) -> Any:
        return _text_of_message(await obj.ainvoke(request(arguments)))

    def call(**arguments: Any) -> Any:
        try:
            return _text_of_message(obj.invoke(request(arguments)))
        except NotImplementedError:  # of the two forms a class has to have only one
            if type(obj)._arun.__module__.startswith("langchain_core."):
                raise
            return call_async(**arguments)

    return (call_async if getattr(obj, "coroutine", None) else call), convert(obj)["function"]


def _text_of_message(result: Any) -> Any:
    """The content of LangChain's `ToolMessage`; whatever else a tool may answer is returned as it is.

    Raises:
        HandledError: the tool failed, and `handle_tool_error` or `handle_validation_error` made a text of that.
    """
    status, content = getattr(result, "status", None), getattr(result, "content", result)
    if status == "error":
        raise HandledError(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return content


def _smolagents(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    inputs = getattr(obj, "inputs", None)
    if not isinstance(inputs, dict) or not callable(getattr(obj, "forward", None)):
        return None
    is_any = ("type", "any")
    shown = {name: dict(part for part in item.items() if part != is_any) for name, item in inputs.items()}
    required = [name for name, item in inputs.items() if not item.get("nullable")]
    lock = threading.Lock()

    def call(**arguments: Any) -> Any:
        with lock:  # it loads its model in the first call, and calls of one turn begin at the same time
            if not getattr(obj, "is_initialized", True):
                obj.setup()
                obj.is_initialized = True
        return obj(**arguments)

    return call, {"parameters": {"type": "object", "properties": shown, "required": required}}


def text_of_mcp(result: Any) -> Any:
    """The text of MCP's `CallToolResult`; any other value, and a result that is not all text, is returned as it is.

    Raises:
        HandledError: the result says that the tool failed.
    """
    if type(result).__name__ != "CallToolResult" or not isinstance(getattr(result, "content", None), list):
        return result
    texts = [getattr(block, "text", None) for block in result.content]
    text = "\n".join(item for item in texts if isinstance(item, str))
    if getattr(result, "is_error", getattr(result, "isError", False)):
        raise HandledError(text or "Error: the tool failed, and did not say why.")
    return text if texts and None not in texts else result
