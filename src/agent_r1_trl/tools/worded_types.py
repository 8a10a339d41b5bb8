"""Types of arguments in the words of docstrings, such as `str or list of str`, for functions without type hints."""

from __future__ import annotations

import ast
import re
import types
from typing import Any, Literal, Union, get_origin

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
    """The hint of an expression.

    Raises:
        ValueError: it is no type that is known here.
    """
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
