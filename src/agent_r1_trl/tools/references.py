"""References of JSON schemas, filled in with what they refer to, because chat templates cannot follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent_r1_trl.tools.signature import ToolSchemaError

if TYPE_CHECKING:
    from referencing._core import Resolver

Schema = dict[str, Any]

MAX_PARTS = 20_000
"""Parts of a schema whose references are filled in; no prompt has room for more."""
_LITERAL = ("default", "enum", "const", "examples")
"""Keywords whose value is data and no schema."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
"""Keywords whose value has a schema for each name. A name may be that of a keyword."""
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
"""References that depend on where the validation came from, so they stay."""
_NOTES = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable",
)  # fmt: skip
"""Keywords that say nothing of which values are valid; `nullable` is OpenAPI's word, and only widens."""
_CONDITIONS = ("if", "then", "else")


def check_size(schema: Schema) -> None:
    """Refuse a schema with so many parts that each look at a call's arguments would take seconds.

    Raises:
        ToolSchemaError: it has more than `MAX_PARTS`.
    """
    num_parts = 0
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            num_parts += 1
            waiting += part.values() if isinstance(part, dict) else part
    if num_parts > MAX_PARTS:
        raise ToolSchemaError(
            f"it has {num_parts:,} parts, of which at most {MAX_PARTS:,} can be checked in each call: describe the "
            "arguments with fewer branches"
        )


def map_parts(node: Schema, change: Callable[[Any], Any]) -> Schema:
    """A schema with `change` applied to all schemas, and lists of schemas, directly inside it; data stay."""
    changed = {}
    for key, value in node.items():
        if key in _LITERAL or key.startswith("x-"):  # the author's own keywords
            changed[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            changed[key] = {name: change(item) for name, item in value.items()}
        else:
            changed[key] = change(value)
    return changed


def has_references(node: object) -> bool:
    """Whether a schema, or one inside it, refers to another."""
    if isinstance(node, list):
        return any(map(has_references, node))
    if not isinstance(node, dict):
        return False
    if any(isinstance(node.get(name), str) for name in ("$ref", *_DYNAMIC)):
        return True
    found = []
    map_parts(node, lambda part: found.append(has_references(part)))
    return any(found)


def inline_references(schema: Schema) -> Schema:
    """A JSON schema with every `$ref` replaced by what it refers to.

    What stands beside a reference holds as well; in drafts up to 7 it only describes.

    Raises:
        ToolSchemaError: a reference leads nowhere, or to a schema that contains it, or they unfold to too much.
    """
    return _Filling(schema).filled()


class _Filling:
    """One schema, and how much of it has been filled in."""

    def __init__(self, schema: Schema) -> None:
        from referencing import Registry
        from referencing.jsonschema import DRAFT3, DRAFT4, DRAFT6, DRAFT7, DRAFT202012, specification_with

        try:
            specification = specification_with(schema.get("$schema") or "", default=DRAFT202012)
        except Exception:  # a dialect of the author's own
            specification = DRAFT202012
        self._are_neighbours_notes = specification in (DRAFT3, DRAFT4, DRAFT6, DRAFT7)
        resource = specification.create_resource(schema)
        base = resource.id() or ""
        self._root = Registry().with_resource(base, resource).resolver(base)
        self._schema = schema
        self._num_parts = 0
        self._has_dynamic = False

    def filled(self) -> Schema:
        """The schema without references."""
        definitions = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        shown = {key: value for key, value in self._schema.items() if key not in definitions}
        result: Schema = self._fill(shown, self._root, (id(self._schema),))
        if self._has_dynamic:  # which lead there
            result |= self._fill(definitions, self._root, (id(self._schema),))
        return result

    def _fill(self, node: object, resolver: Resolver[Any], inside: tuple[int, ...]) -> Any:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ToolSchemaError(f"its references unfold to more than {MAX_PARTS:,} parts")
        if isinstance(node, list):
            return [self._fill(item, resolver, inside) for item in node]
        if not isinstance(node, dict):
            return node
        for name in _DYNAMIC:
            if isinstance(node.get(name), str):
                _look_up(node[name], resolver)
                self._has_dynamic = True
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return map_parts(node, lambda part: self._fill(part, resolver, inside))
        found = _look_up(reference, resolver)
        if id(found.contents) in inside:
            raise ToolSchemaError(f"{_last(reference)} refers to itself, which a prompt cannot show")
        target = self._fill(found.contents, found.resolver, (*inside, id(found.contents)))
        neighbours = {key: value for key, value in node.items() if key != "$ref"}
        beside = map_parts(neighbours, lambda part: self._fill(part, resolver, inside))
        if self._are_neighbours_notes:
            beside = {key: value for key, value in beside.items() if key in (*_NOTES, "$schema")}
        return _joined(target, beside)


def _look_up(reference: str, resolver: Resolver[Any]) -> Any:
    from referencing.exceptions import Unresolvable

    try:
        return resolver.lookup(reference)
    except Unresolvable as error:
        raise ToolSchemaError(f"{_last(reference)} is named, but not defined") from error


def _last(reference: str) -> str:
    return reference.rsplit("/", 1)[-1]


def _joined(target: object, beside: Schema) -> Any:
    """A schema that demands what both demand, as flat as that can be, for a prompt."""
    if target is True:
        return beside
    if not isinstance(target, dict):
        return target
    result, rest = dict(target), {}
    is_condition_met_twice = any(name in target and name in beside for name in _CONDITIONS)
    for key, value in beside.items():
        if key in _CONDITIONS and is_condition_met_twice:
            rest[key] = value  # these three belong together
        elif key not in result or key in _NOTES or result[key] == value:
            result[key] = value
        elif key == "properties" and isinstance(value, dict) and isinstance(result[key], dict):
            result[key] = {**result[key], **{name: _both(result[key].get(name), part) for name, part in value.items()}}
        elif key in ("required", "allOf") and isinstance(value, list) and isinstance(result[key], list):
            result[key] = [*result[key], *(item for item in value if item not in result[key])]
        else:
            rest[key] = value
    if rest:
        others = result.get("allOf")
        result["allOf"] = [*(others if isinstance(others, list) else []), rest]
    return result


def _both(one: object, other: object) -> Any:
    """The joint demand of two descriptions of one argument."""
    if one is None or one is True:
        return other
    if other is True:
        return one
    return _joined(one, other) if isinstance(other, dict) else other
