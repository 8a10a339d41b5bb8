"""JSON schemas of tools, made from type hints and docstrings, for prompts and for checking arguments.

A function that TRL can show to a model has the schema that TRL shows, made by transformers' own helper, so that the
prompts are equal; its import takes long, so it waits for a prompt. Pydantic describes all other functions, finds
mistakes when a tool is made, and makes the objects that the hints name out of what the model writes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agent_r1_trl.tools.faults import fault_of
from agent_r1_trl.tools.json_schema import (
    PATTERN_TIMEOUT_S,
    Schema,
    find_errors,
    known_arguments,
    make_validator,
    validator_of,
)
from agent_r1_trl.tools.references import check_size, has_references, inline_references
from agent_r1_trl.tools.signature import (
    REQUIRED,
    STARS,
    Argument,
    ToolSchemaError,
    check_name,
    doc_text,
    function_parameters,
    read_function,
    undescribed,
)
from agent_r1_trl.trajectory import ToolFault

_SCALARS = (str, int, float, bool, types.NoneType)

logger = logging.getLogger(__name__)


class Interface:
    """A function's schema for a model, and the function's arguments out of the model's text.

    The arguments are those of `Tool`; a `schema` is in the OpenAI form.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, description: str | None = None, schema: Schema | None = None
    ) -> None:
        # It outlives the function's environment, so it keeps what the function says, and not the function.
        self._name, self._description = name, description
        self._arguments: list[Argument] = []
        if schema is not None:
            self.schema = schema
            return
        first_part, self._arguments = read_function(fn, self._name)
        self._text = doc_text(fn)
        if not (self._description or first_part):
            raise undescribed(
                self._name,
                'it has no docstring that says what it does: write """What it does.""" as its first line; the model '
                "reads it.",
            )
        described = first_part if self._description is None else self._description
        self._own_schema = _as_pydantic_sees(self._name, described, self._arguments)
        bare = [repr(argument.name) for argument in self._arguments if not argument.told]
        gaps = [f"no description of {', '.join(bare)} (add 'name: meaning' to a section 'Args:')"] if bare else []
        parameters = function_parameters(fn).values()
        gaps += [f"no {'*' * (1 + STARS.index(item.kind))}{item.name}" for item in parameters if item.kind in STARS]
        if gaps:
            _warn_once(f"Tool {self._name!r}: a model sees {' and '.join(gaps)}.")

    @functools.cached_property
    def schema(self) -> Schema:
        """See `Tool.schema`."""
        shown = _as_trl_shows(self._name, self._text, self._description, self._arguments) or self._own_schema
        found = complete_schema(shown)
        _check_defaults(self._name, self._arguments, found["function"]["parameters"]["properties"])
        return found

    @functools.cached_property
    def _validator(self) -> Any:
        return validator_of(self.schema["function"]["parameters"])

    def read(self, arguments: object) -> tuple[dict[str, Any], list[str]]:
        """Arguments as the function receives them, and a list of the problems with them.

        JSON values become objects of the types that the function's hints name (an `Enum` member, a dataclass, a date,
        a tuple, 5 for the integer 5.0).

        Raises:
            Exception: a validator of the user's own type has failed by itself, and not by the value.
        """
        if not isinstance(arguments, dict):
            return {}, [f"the arguments must be a JSON object, not {type(arguments).__name__}"]
        validator = self._validator
        # In `unit: str = None`, None means "not given", whatever the hint says.
        optional = {item.name for item in self._arguments if item.default is None}
        arguments = {name: value for name, value in arguments.items() if value is not None or name not in optional}
        try:
            errors, slow = find_errors(validator, arguments, limit=3)  # a huge list would give one per item
            problems = [_describe_problem(error.absolute_path, error.message) for error in errors]
            checked = copy.deepcopy(arguments)  # the tool may change them; the recorded call must stay as it was
        except Exception as error:  # numbers too long to print, or nested too deeply
            return {}, [f"the arguments cannot be checked ({type(error).__name__})"]
        for pattern in slow:
            _warn_once(
                f"Tool {self._name!r}: the pattern {pattern!r} of its schema took longer than {PATTERN_TIMEOUT_S:g} s "
                "on an argument. The tool has to check such arguments itself, and the policy is not charged. Write "
                "the pattern so that no part can match in many ways, such as a+ in place of (a+)+."
            )
        return (checked, problems) if problems else self._convert(checked)

    def _convert(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        from pydantic import ValidationError

        problems: list[str] = []
        for item in self._arguments:
            name = item.name
            if name not in arguments and item.field is not None:
                arguments[name] = item.field.get_default(call_default_factory=True)
            elif name in arguments and item.hint not in (str, Any):
                try:
                    arguments[name] = _adapter(item.hint).validate_python(arguments[name])
                except ValidationError as error:
                    problems += [_describe_problem((name, *part["loc"]), part["msg"]) for part in error.errors()[:3]]
                except Exception as error:  # a validator of the user's own type
                    if fault_of(error, None, {name: arguments[name]}) is not ToolFault.ARGUMENTS:
                        raise
                    problems.append(f"{name!r}: {type(error).__name__}: {error}"[:200])
        return arguments, problems


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _as_trl_shows(name: str, text: str, description: str | None, arguments: Sequence[Argument]) -> Schema | None:
    """The schema that transformers makes; None if it cannot read the function, or would mistake one of its hints.

    It gets no return type: OpenAI's protocol has none, and servers drop it, so that a served model would read another
    prompt than in training.
    """
    if not all(_is_plain(argument.hint) for argument in arguments):
        return None
    from transformers.utils import get_json_schema

    def shim() -> None: ...

    if description is not None:
        sections = re.search(r"\n\s*Args:\n.*", text, re.DOTALL)
        text = description + (sections.group(0) if sections else "")
    # get_json_schema reads exactly these attributes; the shim makes partials, callable objects and methods acceptable.
    shim.__name__, shim.__doc__ = name, text
    shim.__annotations__ = {argument.name: argument.hint for argument in arguments}
    by_name = inspect.Parameter.KEYWORD_ONLY
    shim.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(item.name, by_name, default=item.default, annotation=item.hint) for item in arguments]
    )
    try:
        schema = get_json_schema(shim)
    except Exception:  # a docstring of another style, or a missing description
        return None
    return schema if schema["function"]["description"] else None


def _as_pydantic_sees(tool_name: str, description: str, arguments: Sequence[Argument]) -> Schema:
    """The schema of any function; the default stands in those of hints that TRL does not know."""
    properties = {}
    for argument in arguments:
        try:
            adapter = _adapter(argument.hint)
            item = as_helper_writes(inline_references(adapter.json_schema()))
        except Exception as error:  # pydantic's errors of types share no base class
            raise undescribed(
                tool_name,
                f"argument {argument.name!r} has the type {_type_name(argument.hint)}, which JSON cannot express "
                f"({_first_line(error)}): use str, int, float, bool, list[...], dict[str, ...], Literal[...], a "
                "dataclass or an Enum.",
            ) from error
        default = None if _is_plain(argument.hint) else _json_default(adapter, argument.default)
        properties[argument.name] = {
            **{key: value for key, value in item.items() if key != "default"},
            **({} if default is None else {"default": default}),
            **({"description": argument.told} if argument.told else {}),
        }
    parameters: Schema = {"type": "object", "properties": properties}
    required = [argument.name for argument in arguments if argument.default is REQUIRED]
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": tool_name, "description": description, "parameters": parameters},
    }


# -------------------------------------------------------------------- type hints


def _is_plain(hint: Any) -> bool:
    """Whether transformers' helper describes the hint rightly (it would take a bare `list` for an object)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return all(map(_is_note, hint.__metadata__)) and _is_plain(args[0])
    if origin is typing.Literal:
        return all(type(value) in _SCALARS for value in args)
    if origin in (typing.Union, types.UnionType, list, tuple, dict):
        return Ellipsis not in args and all(map(_is_plain, args))
    return any(hint is known for known in (*_SCALARS, dict, Any))


def _is_note(item: Any) -> bool:
    """Whether metadata of `Annotated` says nothing about the values: text, or a `Field` with only a description."""
    if type(item).__module__.startswith("pydantic.fields"):
        return not item.metadata and set(item._attributes_set) <= {"description", "default", "annotation"}
    return not type(item).__module__.startswith(("pydantic", "annotated_types", "pydantic_core"))


def _adapter(hint: object) -> Any:
    try:
        return _cached_adapter(hint)
    except TypeError:  # metadata that cannot be hashed
        return _cached_adapter.__wrapped__(hint)


@functools.lru_cache(maxsize=4096)
def _cached_adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _json_default(adapter: Any, default: Any) -> Any:
    """A default as JSON; None if there is none, or if it cannot be written so."""
    if default is REQUIRED or default is None:
        return None
    try:
        value = adapter.dump_python(default, mode="json", warnings=False)
        json.dumps(value, allow_nan=False)
    except Exception:  # a private sentinel, say, which means "not given"
        return None
    return value


def as_helper_writes(schema: object, *, is_properties: bool = False) -> Any:
    """Pydantic's schema in the manner of transformers' helper: no titles, and `nullable` for a union with None."""
    if isinstance(schema, list):
        return [as_helper_writes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_properties:
        return {name: as_helper_writes(item) for name, item in schema.items()}
    written = {
        key: value
        if key in ("default", "enum", "const", "examples")
        else as_helper_writes(value, is_properties=key == "properties")
        for key, value in schema.items()
        if key not in ("title", "discriminator") and not (key == "default" and value is None)
    }
    written = {key: written[key] for key in sorted(written, key=lambda key: key != "type")}
    options = written.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        others = [option for option in options if option != {"type": "null"}]
        del written["anyOf"]
        written = {**(others[0] if len(others) == 1 else {"anyOf": others}), **written, "nullable": True}
    return written


def _type_name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(". Set `arbitrary_types_allowed")[0].rstrip(".")


# -------------------------------------------------------------------- schemas of others


def read_schema(schema: object, name: str | None = None) -> Schema:
    """A schema that was written by hand or comes from another system, in the OpenAI form and without references.

    Args:
        schema: the OpenAI form, or `name`, `description` and `parameters` alone; MCP calls the last `inputSchema`, and
            Anthropic `input_schema`.
        name: name of the tool, by default the schema's own.
    """
    if hasattr(schema, "model_dump"):  # MCP's own class
        schema = schema.model_dump(exclude_none=True)
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    parts = function if isinstance(function, dict) else {}
    parameters = next((parts[key] for key in ("parameters", "inputSchema", "input_schema") if key in parts), None)
    if not isinstance(parameters, dict):
        raise ToolSchemaError(
            f"Tool schema {schema!r:.200}: must be {{'type': 'function', 'function': {{'name', 'description', "
            "'parameters'}}."
        )
    kept: dict[str, Any] = {"name": check_name(name or parts.get("name"))}
    kept |= {"description": parts.get("description") or "", "parameters": parameters}
    if parts.get("strict") is not None and function is not schema:
        kept["strict"] = parts["strict"]
    return complete_schema({"type": "function", "function": kept})  # keys in the order that servers hand to a template


def complete_schema(schema: Schema) -> Schema:
    """A schema in the OpenAI form with references filled in, and checked."""
    import jsonschema

    function = schema["function"]
    try:
        json.dumps(function["parameters"])
        check_size(function["parameters"])
        if has_references(function["parameters"]):
            function["parameters"] = inline_references(function["parameters"])
        validator_of(function["parameters"])
    except (TypeError, ValueError, RecursionError, jsonschema.exceptions.SchemaError) as error:
        why = getattr(error, "message", error)
        raise ToolSchemaError(
            f"Tool {function['name']!r}: its parameters must be a JSON schema that stands for itself ({why}). Correct "
            "the schema."
        ) from error
    return schema


def check_fit(fn: Callable[..., Any], schema: Schema) -> None:
    """Check that a function can be called with the arguments that a given schema promises."""
    promised = sorted(known_arguments(schema["function"]["parameters"]))
    try:
        signature = inspect.Signature(list(function_parameters(fn).values()))
    except ToolSchemaError:  # a builtin whose signature cannot be read
        return
    try:
        signature.bind(**dict.fromkeys(promised))
    except TypeError as error:
        raise ToolSchemaError(
            f"Tool {schema['function']['name']!r}: its schema has the arguments {promised}, its function others "
            f"({error}). Give both the same arguments."
        ) from error


def _check_defaults(tool_name: str, arguments: Sequence[Argument], properties: Schema) -> None:
    for argument in arguments:
        name, value = argument.name, argument.default
        default = list(value) if type(value) is tuple else value
        if type(default) not in (str, int, float, bool, list, dict):
            continue  # None and private sentinels mean "not given" under any hint
        error = next(make_validator(properties[name]).iter_errors(default), None)
        if error is not None:
            raise ToolSchemaError(
                f"Tool {tool_name!r}: {name}={default!r:.100} contradicts its type hint ({error.message:.200}): "
                "correct the default or the hint."
            )


def _describe_problem(path: Iterable[Any], message: str) -> str:
    if len(message) > 200:
        message = message[:200] + "..."
    first, *others = [repr(part) for part in path] or [""]
    where = first + "".join(f"[{part}]" for part in others)
    return f"{where}: {message}" if where else message
