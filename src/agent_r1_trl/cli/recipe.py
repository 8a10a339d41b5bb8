"""Recipe files: from YAML to values of the right type, before anything heavy is imported.

Paths in a recipe are relative to the directory the command runs in, as on the command line. In a recipe that comes
with the package and is called by its name, those that begin with `recipes/` are the package's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.shipped_recipes import find_recipe, shipped_recipes, with_package_paths
from agent_r1_trl.objects import did_you_mean

# TRL and `train` also take true and false for these, which the annotations leave out.
_ALSO_BOOL = ("scale_rewards", "fsdp", "resume_from_checkpoint")
_FALSE = {"thinking": "off"}
"""What YAML reads as false where it stands without quotation marks, besides `no`."""


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Separate `--config PATH` from the other arguments.

    Raises:
        UsageError: no path follows `--config`, or there are two.
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
    """YAML in which a key that is written twice is an error; PyYAML would drop the first value."""


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
    """Read the mapping in a YAML file.

    Args:
        path: of the file, or the name of a recipe that comes with the package.
        flag: the option that named the file, for errors.

    Raises:
        UsageError: there is no such file, its YAML is broken (with the line), or it is not a mapping of names.
    """
    file = Path(path)
    shipped = find_recipe(path) if flag == "--config" and not file.is_file() else None
    file = shipped or file
    if not file.is_file():
        near = [str(item) for item in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        hint = did_you_mean(path, [*near, *(shipped_recipes() if flag == "--config" else ())])
        kind = "recipe" if flag == "--config" else "YAML file"
        named = ", or a name that agent-r1-trl train --list-recipes shows" if flag == "--config" else ""
        raise UsageError(
            f"{flag} {path}: no such file (looked in {Path.cwd()}).{hint} Pass the path of a {kind}, "
            f"relative to the current directory{named}."
        )
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Correct the file.") from error
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(
            f"{path} must be a mapping of setting names to values. Write one setting per line, such as "
            "'learning_rate: 1.0e-6'."
        )
    return values if shipped is None else with_package_paths(values)


def check_keys(path: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown settings.

    Raises:
        UsageError: names each of them with the closest known setting.
    """
    unknown = [key for key in values if key not in known]
    if unknown:
        lines = [f"{key!r} is not a setting.{did_you_mean(key, known)}" for key in unknown]
        raise UsageError(f"{path}: {' '.join(lines)} Correct or remove it; --help lists all settings.")


def read_value(path: str, name: str, value: Any, hint: Any, allowed: Sequence[Any] = ()) -> Any:
    """Check a recipe's value against the type of its field.

    Text is converted as on the command line, because YAML takes 1e-5 for text. Any other value must have the type
    already: `true` is not a number, and 1 is not a boolean.

    Args:
        path: of the recipe, for errors.
        name: of the setting.
        value: as YAML read it.
        hint: the annotation of the field.
        allowed: the choices, where the annotation does not list them.

    Raises:
        UsageError: names file, setting, value and rule.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = list(allowed) or [
        item.value for option in options if isinstance(option, type) and issubclass(option, Enum) for item in option
    ]
    if value is False and (word := "no" if "no" in choices else _FALSE.get(name)):
        return word  # YAML reads an unquoted `no` or `off` as false
    if choices:  # TRL writes `SomeEnum | str`, which any text would pass
        hint = Optional[Literal[tuple(choices)]] if NoneType in options else Literal[tuple(choices)]  # noqa: UP045
    elif name in _ALSO_BOOL:
        hint = hint | bool
    elif isinstance(value, str) and str not in options and any(get_origin(option) is list for option in options):
        value = [value]
    has_text = any(isinstance(item, str) for item in (value if isinstance(value, list) else [value]))
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        checked = adapter.validate_python(value, strict=not has_text)
    except ValidationError as error:
        rules = [item["msg"].removeprefix("Input should be ") for item in error.errors()]
        rules = rules if choices else [rule.partition(", ")[0] for rule in rules]
        rule = " or ".join(dict.fromkeys([*rules, *(["null"] if NoneType in options else [])]))
        suggestion = did_you_mean(str(value), map(str, choices))
        raise UsageError(
            f"{path}: {name}={value!r} must be {rule}.{suggestion} Set {name} to such a value, or remove the line."
        ) from error
    return checked if has_text else value
