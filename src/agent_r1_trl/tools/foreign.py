"""Tools of other libraries: LangChain, smolagents, the OpenAI Agents SDK.

They are recognised by what they have, so none of these libraries is needed here. Each brings its own schema and makes
its own objects of the arguments.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from agent_r1_trl.tools.faults import raised_inside
from agent_r1_trl.tools.hints import Schema, as_helper_writes, inline_references


def read_foreign(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    """The function behind a tool of another library, and its schema; None if `obj` is no such tool.

    Raises:
        ToolSchemaError: its schema cannot be shown to a model.
    """
    if inspect.isroutine(obj) or inspect.isclass(obj) or not isinstance(getattr(obj, "name", None), str):
        return None
    for read in (_langchain, _smolagents, _openai_agents):
        found = read(obj)
        if found is not None:
            function, parameters = found
            parameters = as_helper_writes(inline_references(parameters))
            return function, {"name": obj.name, "description": obj.description or "", "parameters": parameters}
    return None


def _langchain(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    if not hasattr(obj, "args_schema") or not callable(getattr(obj, "invoke", None)):
        return None
    # Without the arguments that LangChain itself fills in.
    described = getattr(obj, "tool_call_schema", None) or obj.args_schema
    parameters = described if isinstance(described, dict) else described.model_json_schema()
    parameters = {key: value for key, value in parameters.items() if key != "description"}

    async def call_async(**arguments: Any) -> Any:
        return await obj.ainvoke(arguments)

    return (call_async if getattr(obj, "coroutine", None) else lambda **arguments: obj.invoke(arguments)), parameters


def _smolagents(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    inputs = getattr(obj, "inputs", None)
    if not isinstance(inputs, dict) or not callable(getattr(obj, "forward", None)):
        return None
    properties = {
        name: {key: value for key, value in item.items() if (key, value) != ("type", "any")}
        for name, item in inputs.items()
    }
    required = [name for name, item in inputs.items() if not item.get("nullable")]
    return lambda **arguments: obj(**arguments), {"type": "object", "properties": properties, "required": required}


def _openai_agents(obj: Any) -> tuple[Callable[..., Any], Schema] | None:
    parameters = getattr(obj, "params_json_schema", None)
    if not isinstance(parameters, dict) or not callable(getattr(obj, "on_invoke_tool", None)):
        return None

    async def call(**arguments: Any) -> Any:
        text = json.dumps(arguments)
        made_by = importlib.import_module("agents.tool_context").ToolContext
        context = made_by(context=None, tool_name=obj.name, tool_call_id=obj.name, tool_arguments=text)
        with raised_inside() as raised:
            result = await obj.on_invoke_tool(context, text)
        for error in raised:  # by default that library makes a text of every error
            if str(error) in str(result):
                raise error
        return result

    return call, parameters
