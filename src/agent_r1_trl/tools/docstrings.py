"""What a docstring says about a function and its arguments, in Google, NumPy or Sphinx style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.tools.signature import unwrap_partial

_HEADING = re.compile(r"^([ \t]*)(?:Parameters|Params|Parameter|Inputs|Input|Arguments)[ \t]*:[ \t]*$", re.MULTILINE)
_BULLET = re.compile(r"^([ \t]+)[-*+][ \t]+(?=[`*]*\w+[`*]*[ \t]*(?:\([^\n]*?\))?[ \t]*:)", re.MULTILINE)
_DASH = re.compile(r"^([ \t]+\w+)[ \t]*(?:[({]([^\n)}]*)[)}])?[ \t]+--?[ \t]+(?=\S)", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring that a model reads."""

    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    """Descriptions by argument; an argument without one is absent."""


def doc_text(fn: Callable[..., Any]) -> str:
    """The docstring of a function or callable object; empty if there is none."""
    target: Any = unwrap_partial(fn)
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
    arguments: dict[str, str] = {}
    for item in parsed.params:
        for name in item.arg_name.split(","):  # NumPy: "x, y : float"
            described = " ".join((item.description or "").split())
            if described:
                arguments[name.strip(" *`")] = described
    return Docstring(description=(parsed.description or "").strip(), arguments=arguments)


def _usual_form(text: str) -> str:
    """Google's form of headings and lists that people write almost like it."""
    if not _HEADING.search(text) and not re.search(r"^[ \t]*Args[ \t]*:", text, re.MULTILINE):
        return text
    text = _BULLET.sub(r"\1", _HEADING.sub(r"\1Args:", text))
    return _DASH.sub(lambda match: f"{match[1]} ({match[2]}): " if match[2] else f"{match[1]}: ", text)
