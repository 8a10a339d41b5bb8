"""What a function says of itself: the names, type hints, defaults and descriptions of its arguments."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.tools.worded_types import read_type

REQUIRED = inspect.Parameter.empty
"""The default of an argument that has none."""

STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolSchemaError(RunError, ValueError):
    """A function cannot be described to a model; the message gives the reason and the fix."""

    exit_code = 2


class UndefinedHintError(ToolSchemaError):
    """A type hint names something that is not defined, or not yet."""


@dataclass(frozen=True)
class Argument:
    """One argument of a tool."""

    name: str
    hint: Any
    default: Any
    """`REQUIRED` if there is none."""
    note: str = ""
    """A description from `Annotated[int, "How many."]` or `Field(description=...)`; the docstring's comes first."""
    field: Any = None
    """Pydantic's `Field(...)` if it stands in place of the default."""


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


def read_arguments(fn: Callable[..., Any], tool_name: str) -> list[Argument]:
    """The arguments of a function, in their order, without `*args` and `**kwargs` where there are others.

    An argument without a hint has the type that the docstring gives it, else that of its default.

    Raises:
        ToolSchemaError: one of them cannot be passed by name, or has no type.
    """
    hints = read_hints(fn, tool_name)
    parameters = list(function_parameters(fn).values())
    named = [parameter for parameter in parameters if parameter.kind not in STARS]
    unhinted = [parameter for parameter in named if parameter.name not in hints]
    worded = read_docstring(doc_text(fn)).types if unhinted else {}
    for parameter in unhinted:
        hint = read_type(worded.get(parameter.name, ""))
        if hint is None and type(parameter.default) in (str, int, float, bool):
            hint = type(parameter.default)
        if hint is not None:
            hints[parameter.name] = hint
    return [_argument(parameter, hints, tool_name) for parameter in named or parameters]


def read_hints(fn: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    """The type hints of a function, with what `Annotated` adds to them.

    Raises:
        UndefinedHintError: a hint names something that is not defined.
        ToolSchemaError: the hints cannot be read.
    """
    target: Any = inspect.unwrap(unwrap_partial(fn))
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isbuiltin(target)):
        target = type(target).__call__  # a callable object
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise UndefinedHintError(
            f"Tool {tool_name!r}: a type hint names something that is not defined at module level ({error}). "
            "Import it at the top of the module, or use plain types."
        ) from error
    except Exception as error:
        raise ToolSchemaError(f"Tool {tool_name!r}: its type hints cannot be read ({error}).") from error


def _argument(parameter: inspect.Parameter, hints: dict[str, Any], tool_name: str) -> Argument:
    if parameter.kind in STARS:
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
            "int, float, bool, list[...], dict[str, ...], Literal[...]), or name such a type in the docstring."
        )
    hint, default = hints[parameter.name], parameter.default
    field = default if _is_field(default) else None
    if field is not None:  # pydantic's other way to write Annotated[int, Field(...)]
        hint = typing.Annotated[hint, field]
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
    return Argument(name=parameter.name, hint=hint, default=default, note=_note(hint), field=field)


def _note(hint: Any) -> str:
    if typing.get_origin(hint) is not typing.Annotated:
        return ""
    for item in hint.__metadata__:
        text = item if isinstance(item, str) else getattr(item, "description", None)
        text = text or getattr(item, "documentation", None)  # typing_extensions.Doc
        if isinstance(text, str) and text.strip():
            return " ".join(text.split())
    return ""


def _is_field(value: Any) -> bool:
    """Whether a default is pydantic's `Field(...)`, without importing pydantic."""
    return type(value).__module__ == "pydantic.fields" and type(value).__name__ == "FieldInfo"


# -------------------------------------------------------------------- docstrings


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring that a model reads."""

    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    """Descriptions by argument; an argument without one is absent."""
    types: dict[str, str] = field(default_factory=dict)
    """Types by argument, as the docstring words them."""


def doc_text(fn: Callable[..., Any]) -> str:
    """The docstring of a function or callable object; empty if there is none."""
    target = unwrap_partial(fn)
    if inspect.isroutine(target):
        return inspect.getdoc(target) or ""
    return inspect.getdoc(type(target).__call__) or inspect.getdoc(target) or ""


def read_docstring(text: str) -> Docstring:
    """Read a docstring in Google, NumPy or Sphinx style; text that no style fits is all description."""
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:
        return Docstring(description=text.strip())
    doc = Docstring(description=(parsed.description or "").strip())
    for item in parsed.params:
        described = " ".join((item.description or "").split())
        for name in item.arg_name.split(","):  # NumPy: "x, y : float"
            if described:
                doc.arguments[name.strip(" *`")] = described
            doc.types[name.strip(" *`")] = item.type_name or ""
    return doc
