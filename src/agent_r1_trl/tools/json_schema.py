"""JSON schemas as they are published: drafts, compositions, patterns.

Schemas of tools come from MCP servers, from other libraries and from users. Nothing in them may charge a model with a
mistake that it did not make, or hold up the process:

- references are JSON pointers, anchors or ids, and are resolved as such (`references.py`);
- arguments are checked by the draft that a schema declares (`make_validator`);
- where branches (`anyOf`, `if` ...) describe arguments, those of every branch are known (`closed`);
- patterns run under a time limit; what one that takes too long, or that cannot be read here, would decide is left to
  the tool, whatever the pattern is part of (`find_errors`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jsonschema.protocols
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

from agent_r1_trl.tools.keywords import check_multiple_of, check_unique_items
from agent_r1_trl.tools.references import Schema, map_parts

PATTERN_TIMEOUT_S = 0.1
"""Seconds that one pattern may look at one text; after that the tool has to decide whether it fits."""
_MAX_BRANCHES = 8
"""Ways to call a tool that its signature lists; of more, all arguments are shown as optional."""
_ABOUT_NAMES = (
    "additionalProperties", "unevaluatedProperties", "$ref", "$dynamicRef", "$recursiveRef", "propertyNames",
    "minProperties", "not", "disallow", "extends",
)  # fmt: skip
"""Keywords of a schema that says itself what becomes of arguments of other names."""
_CHOICES = ("anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")


# -------------------------------------------------------------------- branches


@dataclass
class Branch:
    """One way to call a function."""

    properties: Schema = field(default_factory=dict)
    """Argument -> its schema."""
    required: list[str] = field(default_factory=list)
    """Names of the arguments that must be there."""


def branches(parameters: Schema) -> list[Branch]:
    """The ways to call a function: `allOf` joins, `anyOf` and `oneOf` choose, what conditions add is optional.

    >>> parameters = {"required": ["id"], "properties": {"id": {}}, "anyOf": [
    ...     {"properties": {"text": {}}}, {"properties": {"url": {}}}]}
    >>> [list(branch.properties) for branch in branches(parameters)]
    [['id', 'text'], ['id', 'url']]
    """
    found = _combine(parameters)
    if len(found) > _MAX_BRANCHES:
        return [Branch(known_arguments(parameters), _names(parameters.get("required")))]
    for branch in found:
        for name in branch.required:
            branch.properties.setdefault(name, {})
    return found


def _combine(node: object) -> list[Branch]:
    if not isinstance(node, dict):
        return [Branch()]
    parts = [[Branch(_mapping(node.get("properties")), _names(node.get("required")))]]
    parts += [_combine(item) for item in _items(node.get("allOf"))]
    for name in _CHOICES:
        options = [_combine(item) for item in _items(node.get(name))]
        if options:
            parts.append(list(itertools.chain(*options)))
    for name in _CONDITIONS:
        if isinstance(node.get(name), dict):
            parts.append([Branch(known_arguments(node[name]))])
    joined: list[Branch] = []
    for choice in itertools.islice(itertools.product(*parts), _MAX_BRANCHES + 1):
        branch = Branch()
        for part in choice:
            for argument, value in part.properties.items():
                branch.properties.setdefault(argument, value)
            branch.required += [argument for argument in part.required if argument not in branch.required]
        if branch not in joined:
            joined.append(branch)
    return joined


def known_arguments(parameters: Schema) -> Schema:
    """The arguments that any part of a schema names, each with its first description.

    One that is only required may be anything.
    """
    found: Schema = {}
    demanded: list[str] = []
    for node in applied_schemas(parameters):
        for name, value in _mapping(node.get("properties")).items():
            found.setdefault(name, value)
        demanded += _names(node.get("required"))
        for name, others in _mapping(node.get("dependentRequired")).items():
            demanded += [name, *_names(others)]
    for name in demanded:
        found.setdefault(name, {})
    return found


def applied_schemas(node: object) -> Iterator[Schema]:
    """A schema and all those that it applies to the same object."""
    if not isinstance(node, dict):
        return
    yield node
    for name in ("allOf", *_CHOICES):
        for item in _items(node.get(name)):
            yield from applied_schemas(item)
    for name in _CONDITIONS:
        yield from applied_schemas(node.get(name))
    for name in ("dependentSchemas", "dependencies"):
        for item in _mapping(node.get(name)).values():
            yield from applied_schemas(item)


def closed(parameters: Schema) -> Schema:
    """Parameters that refuse arguments of unknown names, unless they say themselves what becomes of these.

    An argument that only a branch describes is known: the branch checks it. Where names are described other than one
    by one (`propertyNames`, `minProperties`, `not`), they may be any.
    """
    parts = list(applied_schemas(parameters))
    if any(name in part for part in parts for name in _ABOUT_NAMES):
        return parameters
    result = dict(parameters)
    own = _mapping(parameters.get("properties"))
    result["properties"] = {**dict.fromkeys(known_arguments(parameters), True), **own}
    patterns: Schema = {}
    for part in parts:
        patterns |= dict.fromkeys(_mapping(part.get("patternProperties")), True)
    if patterns:
        result["patternProperties"] = {**patterns, **_mapping(parameters.get("patternProperties"))}
    result["additionalProperties"] = False
    return result


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Schema:
    return value if isinstance(value, dict) else {}


def _names(value: object) -> list[str]:
    return [name for name in _items(value) if isinstance(name, str)]  # draft 3 has a bool here


# -------------------------------------------------------------------- validators


def make_validator(parameters: Schema) -> jsonschema.protocols.Validator:
    """A validator of the draft that a schema declares; of the newest that it is valid in if it declares none, or not
    the one that it is written in.

    Raises:
        jsonschema.exceptions.SchemaError: it is valid in none.
    """
    import jsonschema

    drafts: list[Any] = [jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator]
    if isinstance(parameters.get("$schema"), str):
        drafts.insert(0, jsonschema.validators.validator_for(parameters, default=drafts[0]))
    for draft in drafts:
        try:
            draft.check_schema(parameters, format_checker=None)  # which would refuse patterns that Python cannot read
        except jsonschema.exceptions.SchemaError:
            continue
        return _guarded(draft)(parameters)
    drafts[0].check_schema(parameters, format_checker=None)
    raise AssertionError("a schema that was refused is accepted now")


def validator_of(parameters: Schema) -> jsonschema.protocols.Validator:
    """The validator of a function's arguments, made once for equal parameters: each trajectory has tools of its own.

    Raises:
        jsonschema.exceptions.SchemaError: as `make_validator`.
    """
    return _validator_of(json.dumps(parameters))


@functools.lru_cache(maxsize=256)
def _validator_of(parameters: str) -> jsonschema.protocols.Validator:
    return make_validator(argument_schema(json.loads(parameters)))


@dataclass
class _Check:
    """One check of arguments: what its patterns have left open."""

    slow: set[str] = field(default_factory=set)
    """Patterns that took too long; they are not tried again on further texts of the same arguments."""
    num_undecided: int = 0
    """How often a pattern was asked and could not say whether a text fits."""


_check: ContextVar[_Check | None] = ContextVar("check", default=None)


@contextlib.contextmanager
def _current_check() -> Iterator[_Check]:
    """The check that is running, or one that begins here."""
    running = _check.get()
    if running is not None:
        yield running
        return
    begun = _Check()
    token = _check.set(begun)
    try:
        yield begun
    finally:
        _check.reset(token)


def find_errors(validator: Validator, arguments: Schema, *, limit: int) -> tuple[list[ValidationError], list[str]]:
    """The first errors in the arguments, and the patterns that took too long on them, of which there is no error."""
    with _current_check() as check:
        errors = list(itertools.islice(validator.iter_errors(arguments), limit))
    return errors, sorted(check.slow)


_DECIDED_BY_PARTS = ("not", "disallow", "oneOf", "if", "contains", "unevaluatedItems", "unevaluatedProperties")
"""Keywords that may refuse a value because a part of them accepts it."""


@functools.cache
def _guarded(draft: type[jsonschema.protocols.Validator]) -> Any:
    """A validator class whose patterns can neither stop the process nor refuse what they cannot decide."""
    import jsonschema

    known = draft.VALIDATORS
    keywords = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional,
        "multipleOf": check_multiple_of,
        "uniqueItems": check_unique_items,
        **{name: _if_decided(name, known[name]) for name in _DECIDED_BY_PARTS if name in known},
    }
    return jsonschema.validators.extend(draft, keywords)


def _if_decided(
    keyword: str, find: Callable[..., Iterator[ValidationError] | None]
) -> Callable[..., Iterator[ValidationError]]:
    """A keyword that refuses nothing where one of its patterns is undecided: a text that may fit may also not fit."""

    def check_keyword(validator: Validator, value: object, instance: object, schema: Schema) -> Iterator[Any]:
        if keyword == "unevaluatedProperties" and "patternProperties" in json.dumps(schema):
            return  # jsonschema matches these by itself, without a limit and with Python's own syntax
        with _current_check() as check:
            num_before = check.num_undecided
            errors = list(find(validator, value, instance, schema) or ())
            is_decided = check.num_undecided == num_before
        if is_decided:
            yield from errors

    return check_keyword


def fits_pattern(pattern: str, text: str) -> bool | None:
    """Whether a text has a match; None for a pattern that cannot be read or takes too long.

    The tool that published the pattern checks its arguments itself.
    """
    compiled = _compiled(pattern)
    with _current_check() as check:
        if compiled is not None and pattern not in check.slow:
            try:
                return compiled.search(text, timeout=PATTERN_TIMEOUT_S) is not None
            except TimeoutError:
                check.slow.add(pattern)
        check.num_undecided += 1
        return None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    import regex  # type: ignore[import-untyped]

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError):  # ECMAScript's own syntax, say
        return None


def _check_pattern(validator: Validator, pattern: str, instance: object, schema: Schema) -> Iterator[Any]:
    import jsonschema

    if isinstance(instance, str) and fits_pattern(pattern, instance) is False:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Schema, instance: object, schema: Schema) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        for name, value in instance.items():
            if fits_pattern(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _check_additional(validator: Any, additional: object, instance: object, schema: Schema) -> Iterator[Any]:
    import jsonschema

    if not isinstance(instance, dict):
        return
    known = _mapping(schema.get("properties"))
    patterns = _mapping(schema.get("patternProperties"))
    extra = [
        name
        for name in instance
        if name not in known and all(fits_pattern(pattern, name) is False for pattern in patterns)
    ]
    if isinstance(additional, dict):
        for name in extra:
            yield from validator.descend(instance[name], additional, path=name)
    elif additional is False and extra:
        listed = ", ".join(map(repr, sorted(extra)))
        were = "was" if len(extra) == 1 else "were"
        yield jsonschema.ValidationError(f"Additional properties are not allowed ({listed} {were} unexpected)")


def spell_out_nullable(node: object) -> Any:
    """A schema with `nullable: true`, OpenAPI's word, as a union with null."""
    if isinstance(node, list):
        return [spell_out_nullable(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = map_parts(node, spell_out_nullable)
    if node.get("nullable") is True:
        node.pop("nullable")
        return {"anyOf": [node, {"type": "null"}]}
    return node


def argument_schema(parameters: Schema) -> Schema:
    """The strict form of parameters that checks arguments: an object, closed, `nullable` spelled out."""
    strict = spell_out_nullable(copy.deepcopy(parameters))
    strict.setdefault("type", "object")
    strict.setdefault("properties", {})
    if not isinstance(strict.get("$schema"), str):
        strict.pop("$schema", None)
    return closed(strict)


# -------------------------------------------------------------------- as a model reads it


def describe_signature(function: Mapping[str, Any]) -> str:
    """The signature in one line that a model can follow, such as `search(query: string, top_k?: integer)`.

    A function whose schema has branches has one after another: `attach(text: string) or attach(url: string)`.
    """
    ways = []
    for branch in branches(function["parameters"]):
        described = [
            f"{name}{'' if name in branch.required else '?'}: {describe_type(value)}"
            for name, value in branch.properties.items()
        ]
        ways.append(f"{function['name']}({', '.join(described)})")
    return " or ".join(dict.fromkeys(ways))


def describe_type(schema: object) -> str:
    """A type in a few words: `string`, `array of integer`, `"a" | "b" | null`."""
    if not isinstance(schema, dict):
        return "any"
    kind = schema.get("type", "any")
    options = next((schema[name] for name in _CHOICES if isinstance(schema.get(name), list)), None)
    if "enum" in schema:
        kinds = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
    elif "const" in schema:
        kinds = [json.dumps(schema["const"], ensure_ascii=False)]
    elif options is not None:
        kinds = [describe_type(part) for part in options]
    elif kind == "array" and isinstance(schema.get("items"), dict) and schema["items"]:
        kinds = [f"array of {describe_type(schema['items'])}"]
    else:
        kinds = list(map(str, kind)) if isinstance(kind, list) else [str(kind)]
    return " | ".join(dict.fromkeys([*kinds, *(["null"] if schema.get("nullable") else [])]))
