"""Tools of other libraries: LangChain and smolagents; results of MCP.

They are recognised by what they have, so none of these libraries is needed here. Each brings its schema as its
library sends it to a model, and makes its own objects of the arguments.

LangChain and MCP can hand a failure to the model as if it were a result. Here it stays a failure, of
which the model reads the text that the tool's author chose: `HandledError`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import threading
import typing
from collections.abc import Callable
from typing import Annotated, Any

from agent_r1_trl.tools.blocks import describe_blocks, is_mcp_result, part_of_mcp, text_of_blocks
from agent_r1_trl.tools.faults import HandledError, ServerError
from agent_r1_trl.tools.references import Schema, inline_references
from agent_r1_trl.tools.signature import REQUIRED, injected_argument, injected_kind


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
    _check_injected(obj)

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


def _check_injected(obj: Any) -> None:
    """Check that LangChain's agent, which does not run here, has nothing to fill in.

    The id of the call and the configuration of the run are there without it.

    Raises:
        ToolSchemaError: there is such an argument without a default.
    """
    hints: dict[str, Any] = {}
    required = []
    for name, field in (getattr(obj.args_schema, "model_fields", None) or {}).items():
        hints[name] = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        if field.is_required():
            required.append(name)
    functions: list[Any] = [getattr(obj, name, None) for name in ("func", "coroutine", "_run", "_arun")]
    for fn in functions:
        with contextlib.suppress(TypeError, ValueError, NameError):  # there is none, or it cannot be read
            told = typing.get_type_hints(fn, include_extras=True)
            for name, parameter in inspect.signature(fn).parameters.items():
                if name in hints:  # the schema's word counts
                    continue
                hints[name] = told.get(name)
                if parameter.default is REQUIRED:
                    required.append(name)
    for name in required:
        kind = injected_kind(hints[name])
        if kind and kind not in ("InjectedToolCallId", "RunnableConfig"):
            raise injected_argument(obj.name, name, kind)


def _text_of_message(result: object) -> Any:
    """The content of LangChain's `ToolMessage`; whatever else a tool may answer is returned as it is.

    Raises:
        HandledError: the tool failed, and `handle_tool_error` or `handle_validation_error` made a text of that.
    """
    content = getattr(result, "content", result)
    if getattr(result, "status", None) != "error":
        return content
    text = content if isinstance(content, str) else describe_blocks(content)
    if text is None:
        text = json.dumps(content, ensure_ascii=False)
    raise HandledError(text)


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


def _is_servers_own(told: str) -> bool:
    """Whether MCP's own library failed in a server, and its words became the tool's answer."""
    found = re.match(r"(?:MCP error (-\d+): )?(Output validation error)?", told)
    code, is_output = found.groups() if found else (None, None)
    return is_output is not None or code not in (None, "-32602")


def text_of_mcp(result: Any) -> Any:
    """The text of MCP's `CallToolResult`, or of the dict that it is sent as.

    Any other value, and a result that is not all text, is returned as it is. A result whose texts are empty has its
    structured content instead, as JSON.

    Raises:
        HandledError: the result says that the tool failed.
        ServerError: it says that the server did, whatever the arguments.
    """
    if not is_mcp_result(result):
        return result
    content = part_of_mcp(result, "content")
    text = text_of_blocks(content)
    structured = part_of_mcp(result, "structured_content", "structuredContent")
    if text is not None and not text.strip() and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    if part_of_mcp(result, "is_error", "isError"):
        told = (describe_blocks(result) if text is None else text) or "Error: the tool failed, and did not say why."
        raise (ServerError if _is_servers_own(told) else HandledError)(told)
    return text or result if text is None or not content else text
