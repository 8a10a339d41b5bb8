"""A function's description of itself: the names, type hints, defaults and descriptions of its arguments."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_origin

from agent_r1_trl.errors import RunError

REQUIRED = inspect.Parameter.empty
"""The default of an argument that has none."""

STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolSchemaError(RunError, ValueError):
    """A function cannot be described to a model; the message gives the reason and the fix."""

    exit_code = 2


@dataclass(frozen=True)
class Argument:
    """One argument of a tool."""

    name: str
    hint: Any
    default: Any
    """`REQUIRED` if there is none."""
    told: str
    """The description in the docstring, else `Annotated[int, "How many."]` or `Field(description=...)`; else ""."""
    field: Any
    """Pydantic's `Field(...)` if it stands in place of the default."""


def unwrap_partial(fn: object) -> Any:
    """The function inside a `functools.partial`; any other callable is returned as it is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def function_name(fn: object) -> str:
    """The name of a function, or of the class of a callable object."""
    fn = unwrap_partial(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def check_name(name: object) -> str:
    """Check that chat templates and models can write a tool's name, and return it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"Tool name {name!r}: must be 1 to 64 of the characters a-z, A-Z, 0-9, '_', '-' and '.'. "
            "Define the tool with `def`, or pass name=..."
        )
    return name


def undescribed(tool_name: str, why: str) -> ToolSchemaError:
    """The error about a function, with the remedy that always works."""
    return ToolSchemaError(f"Tool {tool_name!r}: {why} Or describe it yourself: Tool(fn, schema={{...}}).")


def function_parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters for the model to fill in: all but `self` or `cls` and those that a `functools.partial` binds."""
    try:
        parameters = dict(inspect.signature(fn).parameters)
    except (TypeError, ValueError) as error:
        raise undescribed(function_name(fn), f"its signature cannot be read ({error}).") from error
    first = next(iter(parameters), None)
    if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty:
        del parameters[first]
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    return {name: parameter for name, parameter in parameters.items() if name not in bound}


def read_function(fn: Callable[..., Any], tool_name: str) -> tuple[str, list[Argument]]:
    """A function's purpose, in the words of its docstring, and its arguments in their order.

    `*args` and `**kwargs` are left out where there are others. An argument without a hint has the type that the
    docstring gives it, else that of its default.
    """
    hints, doc = _read_hints(fn, tool_name), _read_docstring(doc_text(fn))
    parameters = [item for item in function_parameters(fn).values() if not _is_left_out(item, hints, tool_name)]
    described = [item for item in parameters if item.kind not in STARS] or parameters
    return doc.description, [_argument(item, hints, doc, tool_name) for item in described]


_INJECTED = (
    "InjectedToolArg",
    "_DirectlyInjectedToolArg",
    "RunContextWrapper",
    "RunContext",
    "ToolContext",
    "RunnableConfig",
    "Depends",
    "Dependency",
    "Resolve",
)
"""Classes of LangChain, openai-agents, pydantic-ai, Google's ADK, FastAPI, FastMCP and MCP."""


def injected_kind(hint: Any) -> str:
    """Name of the class by which a hint says that another library's agent fills the argument in; "" for other hints.

    `Annotated[dict, InjectedState]` and `ToolRuntime` of LangChain, for example.
    """
    if get_origin(hint) in (Union, types.UnionType):
        return next(filter(None, map(injected_kind, typing.get_args(hint))), "")
    notes = hint.__metadata__ if get_origin(hint) is typing.Annotated else ()
    bare = typing.get_args(hint)[0] if notes else hint
    for item in (*notes, get_origin(bare) or bare):
        kind = item if isinstance(item, type) else type(item)
        is_context = kind.__name__ == "Context" and kind.__module__.partition(".")[0] in ("mcp", "fastmcp")
        if is_context or any(base.__name__ in _INJECTED for base in kind.__mro__):
            return kind.__name__
    return ""


def injected_argument(tool_name: str, name: str, kind: str) -> ToolSchemaError:
    """The error about an argument that neither the model nor anybody else would fill in."""
    return ToolSchemaError(
        f"Tool {tool_name!r}: argument {name!r} is filled in by its own library's agent ({kind}), which does not run "
        f"here, and the model does not see it: no call could work. Give it a default, or list a plain function with "
        f"the value bound: functools.partial(fn, {name}=...), or a method of the environment, which has its state."
    )


def _is_left_out(parameter: inspect.Parameter, hints: dict[str, Any], tool_name: str) -> bool:
    """Whether the model is not told of a parameter: another library's agent would fill it in, and it has a default.

    A default such as `Depends(get_db)` is none: it only says how that agent fills it in.
    """
    in_default = "" if isinstance(parameter.default, type) else injected_kind(type(parameter.default))
    kind = in_default or injected_kind(hints.get(parameter.name))
    if kind and (in_default or parameter.default is REQUIRED):
        raise injected_argument(tool_name, parameter.name, kind)
    return bool(kind)


def _read_hints(fn: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    target: Any = inspect.unwrap(unwrap_partial(fn))
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isbuiltin(target)):
        target = type(target).__call__  # a callable object
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception as error:
        why = f"its type hints cannot be read ({error}). Import or define what they name above the tool."
        raise undescribed(tool_name, why) from error


_UNUSABLE: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{} cannot be described to a model: give every argument a name.",
    inspect.Parameter.VAR_KEYWORD: "**{} cannot be described to a model: give every argument a name.",
    inspect.Parameter.POSITIONAL_ONLY: "argument {!r} is positional-only, but tools are called by argument name: "
    "remove the '/' from the signature.",
}
_NO_TYPE = (
    "argument {0!r} has no type hint: write '{0}: str' (or int, float, bool, list[...], dict[str, ...], "
    "Literal[...]), or name such a type in the docstring."
)


def _argument(parameter: inspect.Parameter, hints: dict[str, Any], doc: _Docstring, tool_name: str) -> Argument:
    name, default = parameter.name, parameter.default
    hint = hints[name] if name in hints else read_type(doc.types.get(name, ""))
    if hint is None and name not in hints and type(default) in (str, int, float, bool):
        hint = type(default)
    has_type = name in hints or hint is not None
    if parameter.kind in _UNUSABLE or not has_type:
        raise undescribed(tool_name, _UNUSABLE.get(parameter.kind, _NO_TYPE).format(name))
    field = default if _is_field(default) else None
    if field is not None:  # pydantic's other way to write Annotated[int, Field(...)]
        hint = typing.Annotated[hint, field]
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
    return Argument(name, hint, default, doc.arguments.get(name) or _note(hint), field)


def _note(hint: Any) -> str:
    if typing.get_origin(hint) is not typing.Annotated:
        return ""
    for item in hint.__metadata__:
        text = item if isinstance(item, str) else getattr(item, "description", None)
        text = text or getattr(item, "documentation", None)  # typing_extensions.Doc
        if isinstance(text, str) and text.strip():
            return " ".join(text.split())
    return ""


def _is_field(value: object) -> bool:
    """Whether a default is pydantic's `Field(...)`, without importing pydantic."""
    return type(value).__module__ == "pydantic.fields" and type(value).__name__ == "FieldInfo"


# -------------------------------------------------------------------- docstrings


@dataclass(frozen=True)
class _Docstring:
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


def _read_docstring(text: str) -> _Docstring:
    """Read a docstring in Google, NumPy or Sphinx style; text that no style fits is all description."""
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:
        return _Docstring(description=text.strip())
    doc = _Docstring(description=(parsed.description or "").strip())
    for item in parsed.params:
        described = " ".join((item.description or "").split())
        for name in item.arg_name.split(","):  # NumPy: "x, y : float"
            if described:
                doc.arguments[name.strip(" *`")] = described
            doc.types[name.strip(" *`")] = item.type_name or ""
    return doc


_WORDS: dict[str, Any] = {
    "str": str, "string": str, "int": int, "integer": int, "float": float, "number": float, "bool": bool,
    "boolean": bool, "none": types.NoneType, "any": Any, "list": list, "sequence": list, "iterable": list,
    "tuple": list, "set": list, "dict": dict, "dictionary": dict, "mapping": dict, "path": str, "pathlike": str,
}  # fmt: skip
_ADDED = re.compile(r"(?i)[,;]?\s*(?:\(?(?:optional|default\b[^,]*|keyword[- ]only|required)\)?|\([^()]*\))\s*$")
_OF = re.compile(r"(?i)\b(list|sequence|iterable|tuple|set)s?\s+of\s+(\w+(?:\[[^\]]*\]+)?)(?![\w\[]|\s+of\b)")


def read_type(words: str) -> Any:
    """The type hint that a docstring words; None if it names a type unknown here.

    >>> read_type("int or None, optional") == int | None, read_type("{'a', 'b'}"), read_type("callable")
    (True, typing.Literal['a', 'b'], None)
    """
    text = words.strip(" `")
    while (shorter := _ADDED.sub("", text)) != text:
        text = shorter
    text = re.sub(r"(?i)\b(?:typing|os)\.|(?<=\bpath)-(?=like\b)", "", text)
    while (shorter := _OF.sub(r"\1[\2]", text)) != text:  # the rest is the syntax of Python, "or" and commas included
        text = shorter
    try:
        return _hint(ast.parse(" ".join(text.split()), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _hint(node: ast.expr) -> Any:
    """The hint of an expression."""
    match node:
        case ast.Name(name) if name.lower() in _WORDS or name.lower()[:-1] in _WORDS:  # "list of strings"
            return _WORDS.get(name.lower()) or _WORDS[name.lower()[:-1]]
        case ast.Constant(None):
            return types.NoneType
        case ast.Constant(str(value)):
            return Literal[value]
        case ast.Set(parts) | ast.List(parts) | ast.Subscript(ast.Name("Literal"), ast.Tuple(parts)):
            values = tuple(ast.literal_eval(part) for part in parts)
            if values and all(isinstance(value, (str, int, types.NoneType)) for value in values):
                return Literal[values]
        case ast.BoolOp(ast.Or(), parts) | ast.Tuple(parts) if parts:
            hints = tuple(map(_hint, parts))
            is_choice = all(get_origin(hint) is Literal for hint in hints)  # "'a', 'b' or 'c'"
            return Literal[hints] if is_choice else Union[hints]  # noqa: UP007
        case ast.BinOp(left, ast.BitOr(), right):
            return _hint(left) | _hint(right)
        case ast.Subscript(ast.Name("Optional"), part):
            return _hint(part) | None
        case ast.Subscript(ast.Name("Union" | "Literal"), part):
            return _hint(part)
        case ast.Subscript(base) if _hint(base) is dict:
            return dict
        case ast.Subscript(base, part) if _hint(base) is list:
            if isinstance(part, ast.Tuple):  # tuple[int, ...]
                part.elts = [item for item in part.elts if ast.unparse(item) != "..."]
            return list[_hint(part)]  # type: ignore[misc]
    raise ValueError(ast.unparse(node))
