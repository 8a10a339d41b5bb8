"""Messages as rows of a data set hold them, made into messages that templates and models can read.

Arrow, in which `datasets` keeps its rows, gives every message the keys of all messages, and the arguments of every
call the keys of all calls, with null where a row has nothing. A model that reads `{"city": "Oslo", "query": null}`
learns of arguments that nobody gave. `on_mixed_types="use_json"` keeps rows as they are.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent_r1_trl.tools.blocks import text_of_blocks
from agent_r1_trl.tools.json_schema import applied_schemas
from agent_r1_trl.trajectory import Message

logger = logging.getLogger(__name__)

Schema = dict[str, Any]
_KEEP_APART = 'make the data set by Dataset.from_list(rows, on_mixed_types="use_json")'
_MAX_DEPTH = 64
_TIMES = (datetime.datetime, datetime.date, datetime.time)


def prompt_messages(example: object, env_name: str) -> list[Message]:
    """Copy the messages of the column `prompt` (messages or a string), else of the column `question`.

    Raises:
        ValueError: the row has neither column, or the column has another form.
    """
    columns: Mapping[str, Any] = example if isinstance(example, Mapping) else {}
    prompt: Any = columns.get("question") if columns.get("prompt") is None else columns["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_chat = isinstance(prompt, (list, tuple)) and prompt
    if not is_chat or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        given = sorted(map(str, columns)) if isinstance(example, Mapping) else f"a {type(example).__name__}"
        raise ValueError(  # the same words for all rows of one kind: failures are counted by them
            f"{env_name}.reset: of the example's columns, {given}, neither 'prompt' nor 'question' is a string or a "
            "non-empty list of messages like {'role': 'user', 'content': '...'}. Rename a column, or override reset()."
        )
    return [copy.deepcopy(_without_nulls(message)) for message in prompt]


def read_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema], example: Mapping[str, Any], *, warns: bool = True
) -> list[Message]:
    """A prompt without what Arrow added to the calls in it.

    Of the arguments it drops each null that the tool's schema forbids, and in rows of Arrow's those whose key the
    schema does not know; a float that the schema wants as an integer becomes one.

    Args:
        messages: what `reset` returned.
        tools: schemas of the environment's tools.
        example: the row, which shows whether Arrow made it.
        warns: whether to say, once, what cannot be known.
    """
    is_unified = any(map(_is_unified, (messages, *example.values())))
    parameters = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters[function.get("name")] = function.get("parameters") or {}
    reader = _ArgumentReader(parameters, is_unified=is_unified, warns=warns)
    found = []
    for message in messages:
        read = _without_nulls(message)
        if isinstance(read.get("tool_calls"), list):
            read["tool_calls"] = [reader.read(call) for call in read["tool_calls"]]
        found.append(read)
    if warns:
        _check_columns(example, {str(name) for name in parameters})
    return found


def with_text(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with lists of text blocks as their text; any other content as it is."""
    read = []
    for message in messages:
        content = message.get("content")
        text = text_of_blocks(content) if isinstance(content, (list, tuple)) else None
        read.append(dict(message) if text is None else {**message, "content": text})
    return read


# -------------------------------------------------------------------- messages


def _without_nulls(message: Mapping[str, Any]) -> Message:
    """A message without the keys that only other messages have; a template may ask whether one is there."""
    read = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "tool_calls" not in read:
        return read
    calls = _from_json(read["tool_calls"])
    if isinstance(calls, Mapping):
        calls = [calls]
    if isinstance(calls, (list, tuple)):
        calls = [_read_call(_from_json(call)) for call in calls if call is not None]
    if calls:
        read["tool_calls"] = calls
    else:
        del read["tool_calls"]
    return read


def _read_call(call: object) -> object:
    """A call without empty keys; arguments that are not there are `{}`."""
    if not isinstance(call, Mapping):
        return call
    read = {key: value for key, value in call.items() if value is not None}
    function = _from_json(read.get("function"))
    if isinstance(function, Mapping):
        named = {key: value for key, value in function.items() if value is not None}
        read["function"] = {**named, "arguments": named.get("arguments", {})}
    elif "name" in read:
        read["arguments"] = read.get("arguments", {})
    return read


def _from_json(value: object) -> Any:
    """The value of a JSON text; other texts and values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _is_unified(value: object) -> bool:
    """Whether these may be messages that Arrow gave the same keys; written by hand, only some have `tool_calls`."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) and "role" in item for item in value):
        return False
    keys = {frozenset(message) for message in value}
    return len(keys) == 1 and any(message.get("tool_calls") for message in value)


# -------------------------------------------------------------------- arguments


class _ArgumentReader:
    """Reads the arguments of the calls in one prompt by the schemas of the tools."""

    def __init__(self, parameters: Mapping[object, Schema], *, is_unified: bool, warns: bool) -> None:
        self._parameters = parameters
        self._is_unified = is_unified
        self._warns = warns and is_unified

    def read(self, call: object) -> object:
        """A call with the arguments that somebody gave it."""
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
            return call
        name = str(function.get("name"))
        schemas = [self._parameters[name]] if name in self._parameters else None
        if schemas is None and self._warns and _has_null(arguments):
            _warn_of_unknown_tool(name)
        function = {**function, "arguments": self._object(arguments, schemas, name, depth=0)}
        return {**call, "function": function} if "function" in call else function

    def _object(
        self, value: Mapping[str, Any], schemas: Sequence[object] | None, where: str, *, depth: int
    ) -> dict[str, Any]:
        """The members of an object that somebody wrote.

        Args:
            value: the object.
            schemas: those that describe it, of which any may hold; None if it has none.
            where: names it in warnings.
            depth: 0 for the arguments themselves, of which those that the schema does not name are forbidden.
        """
        read = {}
        for key, item in value.items():
            described = None if schemas is None else list(_schemas_of(key, schemas))
            if described:
                is_filler = item is None and not any(map(_allows_null, described))
            else:
                is_nothing = _is_empty(item) if self._is_unified else item is None and depth == 0
                is_filler = described is not None and is_nothing
            if is_filler:
                continue
            if item is None and described and self._warns:
                _warn_of_nullable(where, key)
            read[key] = self._value(item, described, f"{where}: {key}", depth=depth + 1)
        return read

    def _value(self, value: object, schemas: Sequence[object] | None, where: str, *, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return value
        types = {kind for schema in schemas or () for kind in _types(schema)}
        if self._is_unified and types == {"string"} and value is not None and not isinstance(value, (str, *_TIMES)):
            return json.dumps(
                value, ensure_ascii=False, default=str
            )  # `datasets` takes text for JSON in a mixed column
        if isinstance(value, Mapping):
            return self._object(value, schemas, where, depth=depth)
        if isinstance(value, (list, tuple)):
            items = None
            if schemas is not None:
                items = [part["items"] for schema in schemas for part in applied_schemas(schema) if "items" in part]
            return [self._value(item, items, where, depth=depth + 1) for item in value]
        if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
            return int(value)  # Arrow keeps one type in a column
        if isinstance(value, _TIMES):
            _warn_of_times(where)
            if isinstance(value, datetime.datetime) and any(map(_is_date, schemas or ())):
                value = value.date()
            return value.isoformat()
        return value


def _schemas_of(key: str, schemas: Sequence[object]) -> Iterator[object]:
    """The schemas of one of an object's keys."""
    for schema in schemas:
        for part in applied_schemas(schema):
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                yield properties[key]
            elif isinstance(part.get("additionalProperties"), Mapping) and part["additionalProperties"]:
                yield part["additionalProperties"]


def _allows_null(schema: object) -> bool:
    """Whether null fits a schema, as far as its types and choices say."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if schema.get("nullable") is True:
        return True
    kinds = schema.get("type")
    if kinds is not None and "null" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        return False
    if "const" in schema and schema["const"] is not None:
        return False
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and not any(map(_allows_null, schema[name])):
            return False
    return all(map(_allows_null, schema.get("allOf") or ()))


def _types(schema: object) -> Iterator[str]:
    for part in applied_schemas(schema):
        kinds = part.get("type")
        if isinstance(kinds, list):
            yield from kinds
        elif kinds:
            yield kinds


def _is_date(schema: object) -> bool:
    return any(part.get("format") == "date" for part in applied_schemas(schema))


def _is_empty(value: object) -> bool:
    """Whether nothing but nulls is in it."""
    return value is None or (isinstance(value, Mapping) and bool(value) and all(map(_is_empty, value.values())))


def _has_null(value: object, depth: int = 0) -> bool:
    """Whether a key of an object, or of one in it, holds null."""
    if isinstance(value, (list, tuple)):
        return depth < _MAX_DEPTH and any(_has_null(item, depth + 1) for item in value if item is not None)
    if isinstance(value, Mapping):
        return depth < _MAX_DEPTH and any(_has_null(item, depth + 1) for item in value.values())
    return value is None


# -------------------------------------------------------------------- warnings, each once


def _check_columns(example: Mapping[str, Any], offered: set[str]) -> None:
    """Warn of contents that are no text, and of a column `tools`, as TRL's data have it, that is not offered."""
    prompt = example.get("prompt")
    for message in prompt if isinstance(prompt, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (bool, int, float)):
            _warn_of_content()
    listed = _from_json(example.get("tools"))
    names = set()
    for tool in map(_from_json, listed if isinstance(listed, (list, tuple)) else ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            names.add(function["name"])
    if names and names != offered:
        _warn_of_tools()


@functools.cache
def _warn_of_nullable(where: str, key: str) -> None:
    logger.warning(
        "A call of %s in a prompt of the data has %r = null, which the schema allows. datasets gives every call the "
        "arguments of all calls, with null for those that it did not have, so nobody can tell which this is: the "
        "model reads null. To keep them apart %s. Reported once for each argument.",
        where,
        key,
        _KEEP_APART,
    )


@functools.cache
def _warn_of_unknown_tool(tool: str) -> None:
    logger.warning(
        "A call of %s in a prompt of the data has arguments that are null. datasets gives every call the arguments of "
        "all calls, with null for those that it did not have. The environment has no tool of this name, whose schema "
        "would tell: the model reads null. To keep them apart %s, or offer the tool. Reported once for each tool.",
        tool,
        _KEEP_APART,
    )


@functools.cache
def _warn_of_times(where: str) -> None:
    logger.warning(
        "A call in a prompt of the data has a point in time as an argument (%s), which the model reads in ISO's form. "
        "datasets takes such texts in a JSON file for times, and does not keep how they were written. To keep texts "
        "as they are %s. Reported once for each argument.",
        where,
        _KEEP_APART,
    )


@functools.cache
def _warn_of_content() -> None:
    logger.warning(
        "A message in a prompt of the data has a content that is a number, which the model reads as JSON. Where "
        "some contents are texts and others blocks, datasets reads texts such as '1e3' as JSON. Write all contents as "
        "text, or all as blocks. Reported once."
    )


@functools.cache
def _warn_of_tools() -> None:
    logger.warning(
        "The data has a column 'tools' with other tools than the environment: no prompt shows them, and the model is "
        "offered the environment's own. Choose them in reset, by self.tools = [...], or remove the column. Reported "
        "once."
    )
