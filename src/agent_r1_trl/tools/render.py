"""The text of what a tool returns."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from agent_r1_trl.tools.blocks import describe_blocks, describe_bytes, with_named_media

MAX_DEPTH = 100
"""How deep in lists and dicts a part is looked at."""
_LONG_ARRAY = 1000
"""Numbers above which numpy and torch leave out the middle of an array where they make text of it."""


def render_result(value: object) -> str:
    """Text of a return value: a string as it is, JSON for what JSON can express (objects by field), else `str`."""
    with whole_arrays():
        return _render(value)


@contextlib.contextmanager
def whole_arrays() -> Iterator[None]:
    """Let arrays of numpy show all their numbers, also inside the text of other objects and in cells of tables."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    with numpy.printoptions(threshold=sys.maxsize):
        yield


def _render(value: object) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return str(value)
    if value is None:
        return "(no output)"
    if (text := describe_blocks(value)) is not None:
        return text
    value = with_named_media(value)
    try:
        value = _as_json(value)
        if isinstance(value, str):
            return value
        if isinstance(value, (dict, list, tuple, bool, int, float)):
            return json.dumps(value, ensure_ascii=False, default=lambda part: _as_json(part, otherwise=spell_out))
    except (TypeError, ValueError, RecursionError):
        return str(with_readable_parts(value))
    return spell_out(value)


class NoTextError(Exception):
    """An object that has no text a model could read. No argument of a call is the cause."""


def spell_out(value: object) -> str:
    """`str` of an object that says something of its content.

    Raises:
        NoTextError: it has none (`<PIL.Image.Image ... at 0x7f...>`), or it has yet to be read: an iterator, a file, a
            response.
    """
    kind, fix = type(value).__name__, _how_to_read(value)
    try:
        text = "" if fix else str(value)
    except Exception as error:
        why = type(error).__name__
        raise NoTextError(f"an object of type {kind}, which cannot be turned into text ({why}: {error})") from error
    if fix or _is_address(value, text):
        raise NoTextError(f"an object of type {kind}, which is neither text nor JSON: {fix or 'return its content'}")
    return text


def _how_to_read(value: object) -> str:
    """A replacement for an object whose content has yet to be read; "" for any other object."""
    has_own_text = _has_own_text(value)
    if isinstance(value, io.IOBase):
        return "return what read() gives"
    if isinstance(value, (Iterator, AsyncIterator)) and not has_own_text:
        return "return a list of what it yields"
    if type(value).__name__.endswith("Response") and hasattr(value, "headers") and not has_own_text:
        return "return its text or its JSON"  # str says `<Response [200]>`
    return ""


def _is_address(value: object, text: str) -> bool:
    """Whether the text of an object names a place in memory, where its content should stand."""
    if _has_own_text(value):
        return re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", text, re.DOTALL) is not None
    return re.search(r"<[^<>]* at 0x[0-9a-fA-F]+\b", text) is not None  # a method holds the address of its object


def _has_own_text(value: object) -> bool:
    """Whether the class of an object says what its text is."""
    return getattr(type(value), "__str__", None) is not getattr(object, "__str__", None)


def with_readable_parts(value: object, *, inside: frozenset[int] = frozenset()) -> Any:
    """The value with text or plain data in place of what `str` would not show; itself if `str` shows it all.

    For results whose text is `str` of them, dicts and lists included.

    Raises:
        NoTextError: there is an object in it that has no text.
    """
    if id(value) in inside or len(inside) > MAX_DEPTH:  # it holds itself
        return value
    inside = inside | {id(value)}
    if isinstance(value, dict):
        changed = {key: with_readable_parts(part, inside=inside) for key, part in value.items()}
        is_same = all(changed[key] is part for key, part in value.items())
        return value if is_same else changed
    if isinstance(value, (list, tuple)):
        parts = [with_readable_parts(part, inside=inside) for part in value]
        is_same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if is_same else tuple(parts) if isinstance(value, tuple) else parts
    if value is None or isinstance(value, (str, int, float)):
        return value
    if _is_row(value):
        return _row(value)
    table = _table(value)
    if table is not None:
        return table
    if _has_long_text_cut(value):
        return _numbers(value)
    fields = _fields(value)
    if fields is not None:
        changed = with_readable_parts(fields, inside=inside)
        return value if changed is fields else changed
    spell_out(value)
    return value


def _has_long_text_cut(value: object) -> bool:
    """Whether this is a tensor whose `str` leaves out its middle; `whole_arrays` is for those of numpy."""
    if type(value).__module__.partition(".")[0] == "numpy" or _numbers(value) is None:
        return False
    return math.prod(getattr(value, "shape", ())) > _LONG_ARRAY


def _numbers(value: object) -> Any:
    """The numbers of an array or a tensor, in lists; None for anything else, and for those that have no list."""
    to_list = getattr(value, "tolist", None)
    if isinstance(value, type) or to_list is None or not hasattr(value, "dtype"):
        return None
    try:
        return to_list()
    except Exception:  # a sparse tensor
        return None


def _fields(value: object) -> dict[str, Any] | None:
    """The fields of a dataclass or of a pydantic model; None for anything else."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump") and isinstance(value, Iterable):
        return dict(value)
    return None


def _table(found: object) -> Any:
    """All rows of a table of pandas or polars as CSV, of pyarrow as a list of rows; None for anything else.

    Their `str` leaves out the middle, and cuts long cells.
    """
    library = type(found).__module__.partition(".")[0]
    if isinstance(found, type):
        return None
    value: Any = found
    if library == "pandas" and hasattr(value, "to_csv"):
        has_names = type(getattr(value, "index", value)).__name__ != "RangeIndex"  # else the index only counts
        return value.to_csv(index=has_names)
    if library == "polars":
        frame = value.to_frame() if hasattr(value, "to_frame") else value
        return frame.write_csv() if hasattr(frame, "write_csv") else None
    if library == "pyarrow" and hasattr(value, "to_pylist"):
        return value.to_pylist()
    return None


def _is_row(value: object) -> bool:
    return type(value).__module__ == "sqlite3" and type(value).__name__ == "Row"


def _row(row: Any) -> Any:
    """A row of SQLite by column, or as a list where two columns have one name."""
    names = row.keys()
    return dict(zip(names, row, strict=True)) if len(set(names)) == len(names) else list(row)


def _as_json(value: object, *, otherwise: Callable[[Any], Any] = lambda value: value) -> Any:
    """Plain values for a dataclass, a pydantic model, an `Enum` member, a set, bytes, a table, an array or a row."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)  # str would give another order in every process
    if hasattr(value, "model_dump") and not isinstance(value, type):
        with contextlib.suppress(Exception):  # a field that pydantic cannot write as JSON
            return value.model_dump(mode="json")
    fields = _fields(value)
    if fields is not None:
        return fields
    if _is_row(value):
        return _row(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        found = bytes(value)
        return describe_bytes(found) or found.decode("utf-8", errors="replace")
    table = _table(value)
    if table is not None:
        return table
    numbers = _numbers(value)
    return otherwise(value) if numbers is None else numbers
