"""What a docstring says about a function and its arguments, in Google, NumPy or Sphinx style."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

_HEADING = re.compile(r"^([ \t]*)(?:Parameters|Params|Parameter|Inputs|Input|Arguments)[ \t]*:[ \t]*$", re.MULTILINE)
_BULLET = re.compile(r"^([ \t]+)[-*+][ \t]+(?=[`*]*\w+[`*]*[ \t]*(?:\([^\n]*?\))?[ \t]*:)", re.MULTILINE)
_DASH = re.compile(r"^([ \t]+\w+)[ \t]*(?:[({]([^\n)}]*)[)}])?[ \t]+--?[ \t]+(?=\S)", re.MULTILINE)


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
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isroutine(target):
        return inspect.getdoc(target) or ""
    return inspect.getdoc(type(target).__call__) or inspect.getdoc(target) or ""


def read_docstring(text: str) -> Docstring:
    """Read a docstring in whichever style it is written; text that no style fits is all description."""
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(_usual_form(text))
    except ParseError:
        return Docstring(description=text.strip())
    doc = Docstring(description=(parsed.description or "").strip())
    for item in parsed.params:
        for name in item.arg_name.split(","):  # NumPy: "x, y : float"
            described = " ".join((item.description or "").split())
            if described:
                doc.arguments[name.strip(" *`")] = described
            if item.type_name:
                doc.types[name.strip(" *`")] = item.type_name
    return doc


# -------------------------------------------------------------------- types

_WORDS: dict[str, Any] = {
    "str": str, "string": str, "int": int, "integer": int, "float": float, "number": float, "bool": bool,
    "boolean": bool, "none": None, "any": Any, "list": list, "sequence": list, "iterable": list, "tuple": list,
    "dict": dict, "dictionary": dict, "mapping": dict, "path": str, "path-like": str, "pathlike": str,
}  # fmt: skip
_ADDED = re.compile(r"(?i)[,;]?\s*(?:\(?(?:optional|default\b[^,]*|keyword[- ]only|required)\)?|\([^()]*\))\s*$")
_COLLECTION = re.compile(r"(?i)(list|sequence|iterable|tuple|set)\s*(?:of\s+(?P<of>.+)|\[(?P<in>.+)\])", re.DOTALL)


def read_type(words: str) -> Any:
    """The type hint that a docstring words, such as `str or list of str`; None if it names a type unknown here.

    >>> read_type("int or None, optional") == int | None, read_type("{'a', 'b'}"), read_type("callable")
    (True, typing.Literal['a', 'b'], None)
    """
    text = words.strip(" `")
    while (shorter := _ADDED.sub("", text)) != text:
        text = shorter
    choices = _choices(text)
    if choices:
        return Literal[choices]
    wrapped = re.fullmatch(r"(?:typing\.)?(Optional|Union)\[(.+)\]", text, re.DOTALL)
    if wrapped:
        text = wrapped[2] + (", None" if wrapped[1] == "Optional" else "")
    parts = [part for part in _split(text) if part]
    hints = [read_type(part) if len(parts) > 1 or wrapped else _read_one(part) for part in parts]
    if not hints or any(hint is None for hint in hints):
        return None
    # A docstring's "list or str" is a union like any other; None stands for an unknown type here, not for NoneType.
    return Union[tuple(hints)]  # noqa: UP007


def _read_one(text: str) -> Any:
    word = text.removeprefix("typing.").removeprefix("os.").strip(" `").lower()
    if word in _WORDS:
        return types.NoneType if word == "none" else _WORDS[word]
    match = _COLLECTION.fullmatch(text.removeprefix("typing."))
    if match:
        inside = (match["of"] or match["in"]).removesuffix("...").rstrip(", ")
        item = read_type(inside) or read_type(inside.rstrip("s"))  # "list of strings"
        return None if item is None else list[item]  # type: ignore[valid-type]
    return dict if re.match(r"(?i)dict\b", word) else None


def _choices(text: str) -> tuple[Any, ...]:
    """The members of `{'a', 'b'}`, of `Literal['a']` or of plain quoted words."""
    inside = text.removeprefix("typing.").removeprefix("Literal").strip("{}[]")
    try:
        found = ast.literal_eval(f"({inside},)")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ()
    is_listed = text != inside or any(isinstance(item, str) for item in found)
    return found if is_listed and all(isinstance(item, (str, int, bool, type(None))) for item in found) else ()


def _split(text: str) -> list[str]:
    """The alternatives of a type, which "or", bars or commas divide outside of brackets."""
    parts, depth = [""], 0
    for piece in re.split(r"([\[\](){}]|,|\||\bor\b)", text):
        depth += (piece in ("[", "(", "{")) - (piece in ("]", ")", "}"))
        if piece in (",", "|", "or") and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _usual_form(text: str) -> str:
    """Google's form of headings and lists that people write almost like it."""
    if not _HEADING.search(text) and not re.search(r"^[ \t]*Args[ \t]*:", text, re.MULTILINE):
        return text
    text = _BULLET.sub(r"\1", _HEADING.sub(r"\1Args:", text))
    return _DASH.sub(lambda match: f"{match[1]} ({match[2]}): " if match[2] else f"{match[1]}: ", text)
