"""JSON schemas of tools, made from type hints and a Google docstring, for prompts and for checking arguments.

The schema that the model reads is made by transformers' own helper, so prompts equal TRL's. The helper takes long to
import, so `build_schema` imports it on first use.
"""

from __future__ import annotations

import collections.abc
import copy
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SCALARS = (str, int, float, bool, type(None), Any)


class ToolSchemaError(ValueError):
    """A function cannot be described to a model; the message gives the reason and the cure."""


def unwrap_partial(fn: Any) -> Any:
    """The function inside a `functools.partial`; any other callable is returned as it is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def function_name(fn: Any) -> str:
    """The name of a function, or of the class of a callable object."""
    fn = unwrap_partial(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def check_name(name: Any) -> str:
    """Check that chat templates and models can write a tool's name, and return it.

    Raises:
        ToolSchemaError: the name has other characters, or is empty or too long.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"Tool name {name!r}: must be 1 to 64 of the characters a-z, A-Z, 0-9, '_', '-' and '.'. "
            "Define the tool with `def`, or pass name=..."
        )
    return name


def function_parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters for the model to fill in: all but `self` or `cls` and those that a `functools.partial` binds."""
    try:
        parameters = dict(inspect.signature(fn).parameters)
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"Tool {function_name(fn)!r}: its signature cannot be read ({error}).") from error
    first = next(iter(parameters), None)
    if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty:
        del parameters[first]
    if isinstance(fn, functools.partial):
        for name in fn.keywords:
            parameters.pop(name, None)
    return parameters


def build_schema(fn: Callable[..., Any], name: str | None = None, description: str | None = None) -> Schema:
    """Describe a function in the OpenAI form `{"type": "function", "function": {name, description, parameters}}`.

    Args:
        fn: a function, method, partial or callable object with type hints and a Google docstring.
        name: name of the tool, by default the function's own.
        description: description of the tool, by default the first part of the docstring.

    Raises:
        ToolSchemaError: the docstring, a hint or the description of an argument is missing, a hint cannot be expressed
            in JSON, or a default contradicts its hint.
    """
    tool_name = check_name(name or function_name(fn))
    parameters = function_parameters(fn)
    hints = _hints(fn, tool_name)
    annotations = {parameter.name: _parameter_hint(parameter, hints, tool_name) for parameter in parameters.values()}
    doc = _doc(fn, description)
    try:
        returned = {"return": hints["return"]} if "return" in hints else {}
        schema = _json_schema(tool_name, doc, parameters, {**annotations, **returned})
    except Exception:  # perhaps because of the return type, which most templates ignore
        try:
            schema = _json_schema(tool_name, doc, parameters, annotations)
        except Exception as error:
            raise _explain(tool_name, error) from error
    if not schema["function"]["description"]:
        raise ToolSchemaError(f"Tool {tool_name!r}: its docstring does not say what it does before 'Args:'.")
    check_schema(schema)
    _check_defaults(tool_name, parameters, schema["function"]["parameters"]["properties"])
    return schema


def _json_schema(
    name: str, doc: str | None, parameters: Mapping[str, inspect.Parameter], annotations: dict[str, Any]
) -> Schema:
    from transformers.utils import get_json_schema

    def shim() -> None: ...

    # get_json_schema reads exactly these attributes; the shim makes partials, callable objects and methods acceptable.
    shim.__name__ = name
    shim.__doc__ = doc
    shim.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter.replace(annotation=annotations[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in parameters.values()
        ]
    )
    shim.__annotations__ = annotations
    return get_json_schema(shim)


def check_schema(schema: Any) -> None:
    """Check a schema that was written by hand or comes from another system.

    Raises:
        ToolSchemaError: it does not have the OpenAI form, or its `parameters` are not the JSON schema of an object.
    """
    import jsonschema

    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), dict):
        raise ToolSchemaError(
            f"Tool schema {_shorten(schema)}: must be {{'type': 'function', 'function': {{'name', 'description', "
            "'parameters'}}."
        )
    name = check_name(function.get("name"))
    try:
        json.dumps(schema)
        jsonschema.Draft202012Validator.check_schema(argument_schema(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"Tool {name!r}: its schema is not JSON ({error}).") from error
    except jsonschema.exceptions.SchemaError as error:
        raise ToolSchemaError(f"Tool {name!r}: its parameters are not a JSON schema: {error.message}.") from error


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


# -------------------------------------------------------------------- hints


def _hints(fn: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    target: Any = inspect.unwrap(unwrap_partial(fn))
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isbuiltin(target)):
        target = type(target).__call__  # a callable object
    try:
        return typing.get_type_hints(target)
    except NameError as error:
        raise ToolSchemaError(
            f"Tool {tool_name!r}: a type hint names something that is not defined at module level ({error}). "
            "Import it at the top of the module, or use plain types."
        ) from error
    except Exception as error:
        raise ToolSchemaError(f"Tool {tool_name!r}: its type hints cannot be read ({error}).") from error


def _parameter_hint(parameter: inspect.Parameter, hints: dict[str, Any], tool_name: str) -> Any:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
        raise ToolSchemaError(
            f"Tool {tool_name!r}: {stars}{parameter.name} cannot be described to a model: give every argument a name."
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ToolSchemaError(
            f"Tool {tool_name!r}: argument '{parameter.name}' is positional-only, but tools are called by argument "
            "name: remove the '/' from the signature."
        )
    if parameter.name not in hints:
        raise ToolSchemaError(
            f"Tool {tool_name!r}: argument '{parameter.name}' has no type hint: write '{parameter.name}: str' (or "
            "int, float, bool, list[...], dict[str, ...], Literal[...])."
        )
    return _plain_hint(hints[parameter.name], parameter.name, tool_name)


def _check_defaults(tool_name: str, parameters: Mapping[str, inspect.Parameter], properties: Schema) -> None:
    import jsonschema

    for name, parameter in parameters.items():
        default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        if not isinstance(default, str | int | float | list | dict):
            continue  # None and private sentinels mean "not given" under any hint
        error = next(jsonschema.Draft202012Validator(properties[name]).iter_errors(default), None)
        if error is not None:
            raise ToolSchemaError(
                f"Tool {tool_name!r}: {name}={default!r:.100} contradicts its type hint ({error.message:.200}): "
                "correct the default or the hint."
            )


def _plain_hint(hint: Any, argument: str, tool_name: str) -> Any:
    """Rewrite a hint into the forms that the helper knows; it would take a bare `list` for an object, for example."""
    rewrite = functools.partial(_plain_hint, argument=argument, tool_name=tool_name)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return rewrite(args[0])
    if any(hint is scalar for scalar in _SCALARS) or origin is typing.Literal:
        return hint
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(rewrite(part) for part in args)]  # noqa: UP007
    sequences = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
    if hint in sequences or hint is tuple or origin in sequences:
        return list[rewrite(args[0])] if args else list[Any]  # type: ignore[misc]
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return list[rewrite(args[0])]  # type: ignore[misc]
        return hint
    if hint in (dict, collections.abc.Mapping):
        return dict
    if origin in (dict, collections.abc.Mapping):
        if args[0] not in (str, Any):
            raise ToolSchemaError(
                f"Tool {tool_name!r}: argument '{argument}' has {args[0]} keys; JSON keys are strings: "
                "write dict[str, ...]."
            )
        return dict[str, rewrite(args[1])]  # type: ignore[misc]
    raise ToolSchemaError(
        f"Tool {tool_name!r}: argument '{argument}' has the type {hint}, which JSON cannot express: use str, int, "
        "float, bool, list[...], dict[str, ...], Literal[...] or a union of these."
    )


def _explain(tool_name: str, error: Exception) -> ToolSchemaError:
    text = " ".join(str(part) for part in error.args)
    if "no docstring" in text:
        cure = 'write """What it does.""" as its first line; the model reads it.'
    elif "no description for the argument" in text:
        cure = "add a Google 'Args:' section with one 'name: meaning' line per argument."
    else:
        cure = "use str, int, float, bool, list[...], dict[str, ...] or Literal[...]."
    return ToolSchemaError(f"Tool {tool_name!r}: {text.rstrip('.!')}: {cure}")


def _doc(fn: Callable[..., Any], description: str | None) -> str | None:
    target: Any = unwrap_partial(fn)
    if inspect.isroutine(target):
        doc = inspect.getdoc(target)
    else:
        doc = inspect.getdoc(type(target).__call__) or inspect.getdoc(target)
    if description is None:
        return doc
    sections = re.search(r"\n\s*Args:\n.*", doc or "", re.DOTALL)
    return description + (sections.group(0) if sections else "")


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
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_describe_type(part) for part in schema["anyOf"])
    kind = schema.get("type", "any")
    text = " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind)
    if kind == "array" and isinstance(schema.get("items"), dict) and schema["items"]:
        text = f"array of {_describe_type(schema['items'])}"
    return text + (" | null" if schema.get("nullable") else "")


def _shorten(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
