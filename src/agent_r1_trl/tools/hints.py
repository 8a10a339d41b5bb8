"""Type hints: their JSON schemas, and the Python objects that a function with such hints expects.

transformers' helper describes plain hints, so that prompts equal TRL's. Pydantic describes all others (enums,
dataclasses, dates, sets, `Annotated[int, Field(ge=0)]`, ...) and makes their objects from JSON values.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from agent_r1_trl.tools.signature import REQUIRED, Argument, ToolSchemaError

Schema = dict[str, Any]

_SCALARS = (str, int, float, bool, type(None), Any)
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping)


def plain_hint(hint: Any) -> Any:
    """A hint in the form that transformers' helper knows (it would take a bare `list` for an object, for example).

    Raises:
        TypeError: the helper cannot describe such a hint.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated and all(map(_is_note, hint.__metadata__)):
        return plain_hint(args[0])
    if any(hint is scalar for scalar in _SCALARS):
        return hint
    if origin is typing.Literal and all(type(value) in (str, int, float, bool, type(None)) for value in args):
        return hint
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(plain_hint(part) for part in args)]  # noqa: UP007
    if any(hint is known or origin is known for known in (*_SEQUENCES, tuple)):
        if origin is not tuple or (len(args) == 2 and args[1] is Ellipsis):
            return list[plain_hint(args[0])] if args else list[Any]  # type: ignore[misc]
        if len(args) > 1:
            return tuple[tuple(plain_hint(part) for part in args)]  # type: ignore[misc]
    if any(hint is known for known in _MAPPINGS):
        return dict
    if origin in _MAPPINGS and args[0] in (str, Any):
        return dict[str, plain_hint(args[1])]  # type: ignore[misc]
    raise TypeError(f"{hint} is no plain hint")


def describe_argument(argument: Argument, tool_name: str) -> Schema | None:
    """The JSON schema of an argument whose hint is not plain, its default included; None for plain ones.

    Raises:
        ToolSchemaError: JSON cannot express the hint.
    """
    try:
        plain_hint(argument.hint)
    except TypeError:
        pass
    else:
        return None
    try:
        adapter = _adapter(argument.hint)
        schema = inline_references(adapter.json_schema())
    except Exception as error:  # pydantic's errors of types share no base class
        raise ToolSchemaError(
            f"Tool {tool_name!r}: argument '{argument.name}' has the type {_type_name(argument.hint)}, which JSON "
            f"cannot express ({_first_line(error)}): use str, int, float, bool, list[...], dict[str, ...], "
            "Literal[...], a dataclass or an Enum."
        ) from error
    schema = as_helper_writes(schema)
    if argument.default is not REQUIRED and argument.default is not None:
        default = _json_default(adapter, argument.default)
        if default is not None:
            schema["default"] = default
    return schema


def make_converter(hint: Any) -> Callable[[Any], Any] | None:
    """A function from a JSON value to an object of the hint's type; None where the JSON value is that object already.

    The function raises pydantic's `ValidationError` for values that do not fit.
    """
    if not _needs_conversion(hint):
        return None
    adapter = _adapter(hint)
    return lambda value: adapter.validate_json(json.dumps(value))


def inline_references(schema: Any, definitions: Schema | None = None, inside: tuple[str, ...] = ()) -> Any:
    """A JSON schema with every `$ref` replaced by what it refers to, because chat templates cannot follow them.

    Raises:
        ToolSchemaError: a type refers to itself, or a reference leads nowhere.
    """
    if isinstance(schema, list):
        return [inline_references(item, definitions, inside) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if definitions is None:
        definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
        schema = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return {key: inline_references(value, definitions, inside) for key, value in schema.items()}
    name = reference.rsplit("/", 1)[-1]
    if name in inside:
        raise ToolSchemaError(f"{name} refers to itself, which a prompt cannot show")
    if name not in definitions:
        raise ToolSchemaError(f"its schema refers to {reference}, which it does not define")
    target = inline_references(definitions[name], definitions, (*inside, name))
    beside = {key: inline_references(value, definitions, inside) for key, value in schema.items() if key != "$ref"}
    return {**target, **beside}


# -------------------------------------------------------------------- pydantic


@functools.lru_cache(maxsize=4096)
def _cached_adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_for_pydantic(hint))


def _adapter(hint: Any) -> Any:
    try:
        return _cached_adapter(hint)
    except TypeError:  # metadata that cannot be hashed
        return _cached_adapter.__wrapped__(hint)


def _for_pydantic(hint: Any) -> Any:
    """A hint with abstract containers made concrete, and with `typing.TypedDict` in the form that pydantic takes."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return typing.Annotated[(_for_pydantic(args[0]), *hint.__metadata__)]  # type: ignore[misc]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_for_pydantic(part) for part in args)]  # noqa: UP007
    if origin is type:
        raise TypeError("a class is no value")
    if origin is typing.Literal and any(isinstance(value, enum.Enum) for value in args):
        from pydantic import BeforeValidator  # pydantic describes such a Literal by values, but does not accept them

        members = [value for value in args if isinstance(value, enum.Enum)]
        return typing.Annotated[
            hint, BeforeValidator(lambda given: next((item for item in members if item.value == given), given))
        ]
    if origin in (typing.Required, typing.NotRequired):
        return origin[_for_pydantic(args[0])]
    if any(hint is known or origin is known for known in _SEQUENCES):
        return list[_for_pydantic(args[0])] if args else list  # type: ignore[misc]
    if origin in (tuple, set, frozenset) and args:
        parts = tuple(part if part is Ellipsis else _for_pydantic(part) for part in args)
        return origin[parts]
    if origin in _MAPPINGS:
        return dict[_for_pydantic(args[0]), _for_pydantic(args[1])]  # type: ignore[misc]
    if typing.is_typeddict(hint):
        from typing_extensions import TypedDict

        items = typing.get_type_hints(hint, include_extras=True)
        fields = {name: _for_pydantic(item) for name, item in items.items()}
        for name in hint.__optional_keys__:
            if typing.get_origin(fields[name]) is not typing.NotRequired:
                fields[name] = typing.NotRequired[fields[name]]
        made = TypedDict(hint.__name__, fields)  # type: ignore[misc, operator]
        made.__module__, made.__doc__ = hint.__module__, hint.__doc__
        return made
    return hint


def _needs_conversion(hint: Any, *, is_inside: bool = False) -> bool:
    """Whether a valid JSON value may differ from the object that the hint promises.

    5.0 is a JSON integer. Directly in an argument the schema turns it into 5; inside of a list this does.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return not all(map(_is_note, hint.__metadata__)) or _needs_conversion(args[0], is_inside=is_inside)
    if hint is int:
        return is_inside
    if any(hint is known for known in (*_SCALARS, *_SEQUENCES, *_MAPPINGS)):
        return False
    if origin is typing.Literal:
        return not all(type(value) in (str, int, bool, type(None)) for value in args)
    if origin in (typing.Union, types.UnionType):
        return any(_needs_conversion(part, is_inside=is_inside) for part in args)
    if origin in _SEQUENCES:
        return _needs_conversion(args[0], is_inside=True)
    if origin in _MAPPINGS:
        return args[0] not in (str, Any) or _needs_conversion(args[1], is_inside=True)
    return True


def _json_default(adapter: Any, default: Any) -> Any:
    """A default as JSON; None if it cannot be written so."""
    try:
        value = adapter.dump_python(default, mode="json", warnings=False)
        json.dumps(value, allow_nan=False)
    except Exception:  # a private sentinel, say, which means "not given"
        return None
    return value


def as_helper_writes(schema: Any, *, is_properties: bool = False) -> Any:
    """Pydantic's schema in the manner of transformers' helper: no titles, and `nullable` for a union with None."""
    if isinstance(schema, list):
        return [as_helper_writes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_properties:
        return {name: as_helper_writes(item) for name, item in schema.items()}
    written = {
        key: value
        if key in ("default", "enum", "const", "examples")
        else as_helper_writes(value, is_properties=key == "properties")
        for key, value in schema.items()
        if key not in ("title", "discriminator") and not (key == "default" and value is None)
    }
    options = written.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        others = [option for option in options if option != {"type": "null"}]
        del written["anyOf"]
        written = {**(others[0] if len(others) == 1 else {"anyOf": others}), **written, "nullable": True}
    return written


def _is_note(item: Any) -> bool:
    """Whether metadata of `Annotated` says nothing about the values: text, or a `Field` with only a description."""
    if type(item).__module__.startswith("pydantic.fields"):
        return not item.metadata and set(item._attributes_set) <= {"description", "default", "annotation"}
    return not type(item).__module__.startswith(("pydantic", "annotated_types", "pydantic_core"))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(". Set `arbitrary_types_allowed")[0].rstrip(".")
