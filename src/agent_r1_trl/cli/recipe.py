"""Recipe files: YAML to checked values, before anything heavy is imported.

Paths in a recipe are relative to the directory the command runs in, as on the command line.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.objects import did_you_mean

_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}
# TRL takes these although its annotations say text.
_ALSO_BOOL = ("scale_rewards", "fsdp")


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config PATH` out of the arguments.

    Raises:
        UsageError: no path follows it, or there are two.
    """
    path: str | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument != "--config" and not argument.startswith("--config="):
            rest.append(argument)
            continue
        value = argument.partition("=")[2] if "=" in argument else next(arguments, None)
        if not value or value.startswith("--"):
            raise UsageError("--config: no file follows it. Pass the path of a recipe, --config recipe.yaml.")
        if path is not None:
            raise UsageError(f"--config was given twice ({path}, {value}). One recipe per run: remove one of them.")
        path = value
    return path, rest


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key written twice, of which the first would be lost."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in values:
            line = key_node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is written twice (line {line})", None)
        values[key] = loader.construct_object(value_node, deep=True)
    return values


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_recipe(path: str, *, flag: str = "--config") -> dict[str, Any]:
    """The mapping a YAML file holds.

    Args:
        path: of the file.
        flag: that named it, for errors.

    Raises:
        UsageError: no such file, broken YAML (with the line), or no mapping of names to values.
    """
    file = Path(path)
    if not file.is_file():
        near = [str(item) for item in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = did_you_mean(path, near)
        kind = "recipe" if flag == "--config" else "YAML file"
        raise UsageError(
            f"{flag} {path}: no such file (looked in {Path.cwd()}).{hint} Pass the path of a {kind}, "
            "relative to the current directory."
        )
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Mend the file.") from error
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path} must hold a mapping of setting names to values, such as 'learning_rate: 1.0e-6'.")
    return values


def check_keys(path: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse names that are no settings.

    Raises:
        UsageError: names all of them, each with the closest known one.
    """
    unknown = [key for key in values if key not in known]
    if unknown:
        lines = [f"{key!r} is no setting.{did_you_mean(key, known)}" for key in unknown]
        raise UsageError(f"{path}: {' '.join(lines)} Correct or remove it; --help lists all settings.")


def read_value(path: str, name: str, value: Any, hint: Any, allowed: Sequence[Any] = ()) -> Any:
    """Check a recipe's value against the type of its field; text that spells a number becomes one.

    Args:
        path: of the recipe, for errors.
        name: of the setting.
        value: as YAML has it.
        hint: the type of the field.
        allowed: the only values there are, where the type says less.

    Raises:
        UsageError: names file, setting, value and rule.
    """
    options = _options(hint)
    if name in _ALSO_BOOL:
        options = (*options, bool)
    for option in options:
        found, converted = _fit(value, option)
        if found and (converted is None or not allowed or converted in allowed):
            return converted
    if value is False and any(_is_enum(option) for option in options):
        return "no"  # YAML reads an unquoted `no` as false
    choices = list(allowed) or [item for option in options for item in _choices(option)]
    rule = (
        f"one of {', '.join(map(repr, choices))}" if choices else " or ".join(dict.fromkeys(map(_describe, options)))
    )
    hint = did_you_mean(str(value), map(str, choices))
    raise UsageError(f"{path}: {name}={value!r} must be {rule}.{hint} Set {name} to such a value, or remove the line.")


def _options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, most particular first: text fits nearly everything, but names of an enumeration."""
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if any(map(_is_enum, options)):
        return tuple(option for option in options if option is not str)
    return tuple(sorted(options, key=lambda option: option is str))


def _fit(value: Any, option: Any) -> tuple[bool, Any]:
    origin = get_origin(option) or option
    if origin is Any:
        return True, value
    if origin is type(None):
        return value is None, None
    if origin is bool:
        words = {"true": True, "false": False}
        is_word = isinstance(value, str) and value.lower() in words
        return (True, words[value.lower()]) if is_word else (isinstance(value, bool), value)
    if origin in (int, float):
        return _fit_number(value, origin)
    if origin is str:
        return isinstance(value, str), value
    if origin is Literal or _is_enum(option):
        return value in _choices(option), value
    if origin is list:
        items = list(value) if isinstance(value, list | tuple) else [value] if isinstance(value, str) else None
        inner = get_args(option)[0] if get_args(option) else Any
        if items is None or not all(_fit(item, inner)[0] for item in items):
            return False, value
        return True, [_fit(item, inner)[1] for item in items]
    if origin is dict:
        return isinstance(value, dict), value
    return not isinstance(value, bool | int | float | str | list | dict | None), value


def _fit_number(value: Any, kind: type) -> tuple[bool, Any]:
    if isinstance(value, bool):
        return False, value
    if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
        try:
            return True, kind(value)
        except ValueError:
            return False, value
    if kind is int:
        return isinstance(value, int), value
    return isinstance(value, int | float), value


def _is_enum(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, Enum)


def _choices(option: Any) -> tuple[Any, ...]:
    if get_origin(option) is Literal:
        return get_args(option)
    return tuple(item.value for item in option) if _is_enum(option) else ()


def _describe(option: Any) -> str:
    origin = get_origin(option) or option
    if origin is list and get_args(option):
        return f"a list of {_describe(get_args(option)[0]).removeprefix('a ')}s"
    return _KINDS.get(origin, getattr(origin, "__name__", str(origin)))
