"""JSON schemas of tools, made from type hints and docstrings, for prompts and for checking arguments.

The schema that the model reads is made by transformers' own helper, so prompts equal TRL's. The helper takes long to
import, so `build_schema` imports it on first use; `check_function` finds mistakes without it. What the helper cannot
read is read here: docstrings in other styles (`docstrings.py`) and types beyond JSON's (`hints.py`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.tools.docstrings import Docstring, doc_text, read_docstring
from agent_r1_trl.tools.hints import Schema, describe_argument, inline_references, plain_hint
from agent_r1_trl.tools.signature import (
    REQUIRED,
    STARS,
    Argument,
    ToolSchemaError,
    UndefinedHintError,
    check_name,
    function_name,
    function_parameters,
    read_arguments,
)

OWN_SCHEMA = "Or describe it yourself: Tool(fn, schema={...})."
"""The cure that always works; it ends every message about a function."""

logger = logging.getLogger(__name__)


def check_function(fn: Callable[..., Any], name: str | None = None, description: str | None = None) -> None:
    """Check that `build_schema` can describe a function, without importing transformers.

    Hints that are not defined yet, as in a class body that names its own class, are left to `build_schema`.

    Raises:
        ToolSchemaError: as `build_schema`.
    """
    tool_name = check_name(name or function_name(fn))
    try:
        arguments = read_arguments(fn, tool_name)
        for argument in arguments:
            describe_argument(argument, tool_name)
        doc = _read_descriptions(tool_name, doc_text(fn), description, arguments)
    except UndefinedHintError:
        return
    except ToolSchemaError as error:
        raise ToolSchemaError(f"{error} {OWN_SCHEMA}") from error
    parameters = function_parameters(fn).values()
    # An argument with a line of its own counts: transformers' helper reads forms that `read_docstring` does not.
    bare = [repr(name) for name, words in doc.arguments.items() if not words and not _has_line(name, doc_text(fn))]
    gaps = [f"no description of {', '.join(bare)} (add 'name: meaning' to a section 'Args:')"] if bare else []
    stars = [f"no {'*' * STARS.index(item.kind)}*{item.name}" for item in parameters if item.kind in STARS]
    if gaps + stars:
        _warn_once(f"Tool {tool_name!r}: a model sees {' and '.join(gaps + stars)}.")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _has_line(name: str, text: str) -> bool:
    return re.search(rf"^\s*{re.escape(name)}\s*:\s*\S", text, re.MULTILINE) is not None


def build_schema(fn: Callable[..., Any], name: str | None = None, description: str | None = None) -> Schema:
    """Describe a function in the OpenAI form `{"type": "function", "function": {name, description, parameters}}`.

    Args:
        fn: a function, method, partial or callable object with type hints and a docstring.
        name: name of the tool, by default the function's own.
        description: description of the tool, by default the first part of the docstring.

    Raises:
        ToolSchemaError: the docstring or a hint is missing, a hint cannot be expressed in JSON, or a default
            contradicts its hint.
    """
    tool_name = check_name(name or function_name(fn))
    try:
        arguments = read_arguments(fn, tool_name)
        schema = _json_schema(fn, tool_name, description, arguments)
        check_schema(schema)
        _check_defaults(tool_name, arguments, schema["function"]["parameters"]["properties"])
    except ToolSchemaError as error:
        raise type(error)(f"{error} {OWN_SCHEMA}") from error
    return schema


def _json_schema(
    fn: Callable[..., Any], tool_name: str, description: str | None, arguments: Sequence[Argument]
) -> Schema:
    described = {argument.name: describe_argument(argument, tool_name) for argument in arguments}
    hints = {
        argument.name: plain_hint(argument.hint) if described[argument.name] is None else Any for argument in arguments
    }
    text = doc_text(fn)
    if description is not None:
        sections = re.search(r"\n\s*Args:\n.*", text, re.DOTALL)
        text = description + (sections.group(0) if sections else "")
    schema = _ask_helper(tool_name, text, arguments, hints)
    if schema is None:  # the helper cannot read the docstring, or finds something missing
        doc = _read_descriptions(tool_name, doc_text(fn), description, arguments)
        lines = [f"    {argument.name}: -" for argument in arguments]
        text = "\n".join(["-", "", "Args:", *lines])
        schema = _ask_helper(tool_name, text, arguments, hints)
        if schema is None:
            raise ToolSchemaError(f"Tool {tool_name!r}: its type hints cannot be described.")
        function = schema["function"]
        function["description"] = doc.description
        for name, item in function["parameters"]["properties"].items():
            item["description"] = doc.arguments[name]
            if not item["description"]:
                del item["description"]
    if not schema["function"]["description"]:
        raise ToolSchemaError(f"Tool {tool_name!r}: its docstring does not say what it does before its arguments.")
    properties = schema["function"]["parameters"]["properties"]
    for name, item in described.items():
        if item is not None:
            told = properties[name].get("description")
            properties[name] = item | ({"description": told} if told else {})
    return schema


def _ask_helper(name: str, doc: str, arguments: Sequence[Argument], hints: dict[str, Any]) -> Schema | None:
    """The schema that transformers makes; None if it cannot read the docstring.

    It gets no return type: OpenAI's protocol has none, and servers drop it, so that a served model would read another
    prompt than in training.
    """
    from transformers.utils import get_json_schema

    def shim() -> None: ...

    # get_json_schema reads exactly these attributes; the shim makes partials, callable objects and methods acceptable.
    shim.__name__ = name
    shim.__doc__ = doc
    shim.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=argument.default,
                annotation=hints[argument.name],
            )
            for argument in arguments
        ]
    )
    shim.__annotations__ = hints
    with contextlib.suppress(Exception):
        return get_json_schema(shim)
    return None


def _read_descriptions(tool_name: str, text: str, description: str | None, arguments: Sequence[Argument]) -> Docstring:
    """What the docstring, in any style, and `Annotated` say; an argument of which they say nothing has "".

    Raises:
        ToolSchemaError: there is no docstring.
    """
    if not text.strip() and description is None:
        raise ToolSchemaError(
            f'Tool {tool_name!r}: it has no docstring: write """What it does.""" as its first line; the model '
            "reads it."
        )
    doc = read_docstring(text)
    described = {argument.name: doc.arguments.get(argument.name) or argument.note for argument in arguments}
    return Docstring(doc.description if description is None else description, described)


def read_schema(schema: Any, name: str | None = None) -> Schema:
    """A schema that was written by hand or comes from another system, in the OpenAI form and without references.

    Args:
        schema: the OpenAI form, or `name`, `description` and `parameters` alone; MCP calls the last `inputSchema`, and
            Anthropic `input_schema`.
        name: name of the tool, by default the schema's own.

    Raises:
        ToolSchemaError: it has none of these forms, or its `parameters` are not the JSON schema of an object.
    """
    if hasattr(schema, "model_dump"):  # MCP's own class
        schema = schema.model_dump(exclude_none=True)
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    parts = function if isinstance(function, dict) else {}
    parameters = next((parts[key] for key in ("parameters", "inputSchema", "input_schema") if key in parts), None)
    if not isinstance(parameters, dict):
        raise ToolSchemaError(
            f"Tool schema {_shorten(schema)}: must be {{'type': 'function', 'function': {{'name', 'description', "
            "'parameters'}}."
        )
    name = check_name(name or parts.get("name"))
    try:
        json.dumps(parameters)
        if "$ref" in json.dumps(parameters):
            parameters = inline_references(parameters)
    except ToolSchemaError as error:
        raise ToolSchemaError(f"Tool {name!r}: {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"Tool {name!r}: its schema is not JSON ({error}).") from error
    kept: dict[str, Any] = {"name": name, "description": parts.get("description") or "", "parameters": parameters}
    if parts.get("strict") is not None and function is not schema:
        kept["strict"] = parts["strict"]
    read = {"type": "function", "function": kept}  # the keys, and their order, that servers hand to a template
    check_schema(read)
    return read


def check_schema(schema: Schema) -> None:
    """Check that the `parameters` of a schema in the OpenAI form are the JSON schema of an object.

    Raises:
        ToolSchemaError: they are not.
    """
    import jsonschema

    name = schema["function"]["name"]
    try:
        json.dumps(schema)
        jsonschema.Draft202012Validator.check_schema(argument_schema(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"Tool {name!r}: its schema is not JSON ({error}).") from error
    except jsonschema.exceptions.SchemaError as error:
        raise ToolSchemaError(f"Tool {name!r}: its parameters are not a JSON schema: {error.message}.") from error


def check_fit(fn: Callable[..., Any], schema: Schema) -> None:
    """Check that a function can be called with the arguments that a given schema promises.

    Raises:
        ToolSchemaError: one of them lacks an argument that the other has.
    """
    name = schema["function"]["name"]
    try:
        parameters = function_parameters(fn).values()
    except ToolSchemaError:  # a builtin whose signature cannot be read
        return
    promised = set(schema["function"]["parameters"].get("properties", {}))
    by_name = {item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
    needed = {item.name for item in parameters if item.default is REQUIRED and item.kind not in STARS}
    unknown, missing = sorted(promised - by_name) if not takes_any else [], sorted(needed - promised)
    if unknown or missing:
        raise ToolSchemaError(
            f"Tool {name!r}: its schema has the arguments {sorted(promised)}, and its function "
            f"{f'does not take {unknown}' if unknown else f'needs {missing}'}: give both the same arguments."
        )


def argument_schema(schema: Schema) -> Schema:
    """The strict form that checks arguments: with `nullable` spelled out, and without arguments of unknown names."""
    parameters = _spell_out_nullable(copy.deepcopy(schema["function"]["parameters"]))
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    parameters.setdefault("additionalProperties", False)
    return parameters


def describe_signature(schema: Schema) -> str:
    """The signature in one line that a model can follow, such as `search(query: string, top_k?: integer)`."""
    function = schema["function"]
    parameters = function["parameters"]
    required = parameters.get("required", [])
    described = [
        f"{name}{'' if name in required else '?'}: {_describe_type(value)}"
        for name, value in parameters.get("properties", {}).items()
    ]
    return f"{function['name']}({', '.join(described)})"


# -------------------------------------------------------------------- internal


def _check_defaults(tool_name: str, arguments: Sequence[Argument], properties: Schema) -> None:
    import jsonschema

    for argument in arguments:
        name, value = argument.name, argument.default
        default = list(value) if type(value) is tuple else value
        if type(default) not in (str, int, float, bool, list, dict):
            continue  # None and private sentinels mean "not given" under any hint
        error = next(jsonschema.Draft202012Validator(properties[name]).iter_errors(default), None)
        if error is not None:
            raise ToolSchemaError(
                f"Tool {tool_name!r}: {name}={default!r:.100} contradicts its type hint ({error.message:.200}): "
                "correct the default or the hint."
            )


def _spell_out_nullable(node: Any) -> Any:
    if isinstance(node, list):
        return [_spell_out_nullable(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _spell_out_nullable(value) for key, value in node.items()}
    if node.get("nullable") is True:
        node.pop("nullable")
        return {"anyOf": [node, {"type": "null"}]}
    return node


def _describe_type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    kind = schema.get("type", "any")
    if "enum" in schema:
        kinds = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
    elif "anyOf" in schema:
        kinds = [_describe_type(part) for part in schema["anyOf"]]
    elif kind == "array" and isinstance(schema.get("items"), dict) and schema["items"]:
        kinds = [f"array of {_describe_type(schema['items'])}"]
    else:
        kinds = list(map(str, kind)) if isinstance(kind, list) else [str(kind)]
    return " | ".join(dict.fromkeys([*kinds, *(["null"] if schema.get("nullable") else [])]))


def _shorten(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
