"""The text of what a tool returns."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable
from typing import Any


def render_result(value: Any) -> str:
    """Text of a return value: a string as it is, JSON for what JSON can express (objects by field), else `str`."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return str(value)
    if value is None:
        return "(no output)"
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    try:
        value = _as_json(value)
        if isinstance(value, (dict, list, tuple, bool, int, float)):
            return json.dumps(value, ensure_ascii=False, default=lambda part: _as_json(part, otherwise=spell_out))
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return spell_out(value)


class NoTextError(Exception):
    """An object that has no text a model could read."""


def spell_out(value: Any) -> str:
    """`str` of an object, unless that is only its address in memory (`<PIL.Image.Image ... at 0x7f...>`)."""
    text = str(value)
    if re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", text, re.DOTALL):
        raise NoTextError(f"an object of type {type(value).__name__}, which is neither text nor JSON")
    return text


def _as_json(value: Any, *, otherwise: Callable[[Any], Any] = lambda value: value) -> Any:
    """Plain values for a dataclass, a pydantic model, an `Enum` member, a set or an array."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)  # str would give another order in every process
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not hasattr(value, "index"):  # numpy's, torch's
        return value.tolist()  # str leaves out the middle of a long array
    return otherwise(value)
