"""TRL's parser of dataclasses from a recipe and the command line, with errors that a user can act on."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NoReturn

from agent_r1_trl.cli.arguments import EvalArguments, TrainArguments, read_mapping, read_text
from agent_r1_trl.cli.errors import UsageError, no_such_option, with_fix
from agent_r1_trl.cli.options import help_text
from agent_r1_trl.cli.recipe import found_paths, read_recipe, read_value, split_config
from agent_r1_trl.features import MAPPINGS as OF_FEATURES
from agent_r1_trl.features import keys_of
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.settings import groups_of
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
from agent_r1_trl.trainers.config import ModelConfig, TrlParser

MAPPINGS = (*OF_FEATURES, *groups_of(MultiTurnPPOConfig))
"""Settings of training that are mappings."""
OVER_RECIPE = ("env_kwargs", "reward_options", "chat_template_kwargs", *MAPPINGS)
"""Mappings of which the command line changes the keys that it names; the recipe's others stay."""
OF_RECIPES = (EvalArguments, TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
"""What a recipe may hold for other commands than the one that reads it."""


def _fields(kinds: Sequence[Any]) -> dict[str, Any]:
    return {item.name: item for kind in kinds for item in dataclasses.fields(kind) if item.init}


def given_flags(argv: Sequence[str]) -> set[str]:
    """Names of the options on a command line, with underscores."""
    return {item.partition("=")[0][2:].replace("-", "_") for item in argv if item.startswith("--")}


class RecipeParser(TrlParser):
    """Makes dataclass instances from a recipe and the command line.

    Args:
        dataclass_types: the dataclasses to make, in this order.
        command: as the user typed it, for the help text.
        about: what the command does, for the help text.
        elsewhere: dataclasses whose settings a recipe may hold although this command does not use them.
        private: settings that are ignored in a recipe because they mean something else there.
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        *,
        command: str,
        about: str = "",
        elsewhere: Sequence[type] = (),
        private: Sequence[str] = (),
    ) -> None:
        # No abbreviated flags: `--learning` would silently be taken for `--learning_rate`.
        super().__init__(dataclass_types, prog=command, allow_abbrev=False, add_help=False)
        self.add_argument("--config", metavar="RECIPE", help="YAML file with any of these settings.")
        self._about, self._private = about, private
        self._own, self._known = _fields(dataclass_types), _fields([*elsewhere, *dataclass_types])
        kinds = (*elsewhere, *dataclass_types)
        self._hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
        self._keys = [key for kind in kinds for key in keys_of(kind)]
        self.recipe: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        """Every setting by its name once the arguments are parsed, before a dataclass derives others from it."""

    def parse(self, argv: Sequence[str], defaults: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Read the recipe and then the command line, which takes precedence; `--help` is answered here.

        Args:
            argv: the arguments.
            defaults: values for settings that neither the recipe nor the command line gives.

        Raises:
            UsageError: there is a mistake in either.
            SystemExit: help was asked for, and printed.
        """
        path = self.read(argv, defaults)
        source = f"{path} with the command line's options" if path else "The options"
        return tuple(self.make(kind, source) for kind in self.dataclass_types)

    def read(self, argv: Sequence[str], defaults: dict[str, Any] | None = None) -> str | None:
        """As `parse`, but only into `settings`; returns the path of the recipe."""
        if {"-h", "--help"} & set(argv):
            print(help_text(self.prog, self._about, self.dataclass_types), end="")
            raise SystemExit(0)
        path, arguments = split_config(argv)
        values = dict(defaults or {})
        if path is not None:
            self.recipe = found_paths(read_recipe(path))
            known = [*self._own, *sorted(self._known)]
            if wrong := [
                f"{key!r} is not a setting.{did_you_mean(key, [*known, *self._keys])}"
                for key in self.recipe
                if key not in known
            ]:
                raise UsageError(f"{path}: {' '.join(wrong)} Correct or remove it; --help lists all settings.")
            for name, value in self.recipe.items():
                allowed = self._known[name].metadata.get("choices") or ()
                checked = read_value(path, name, value, self._hints[name], allowed)
                if name in self._own and name not in self._private:
                    values[name] = checked
        self.set_defaults_with_config(**values)
        unset, arguments = self._take_nulls(_fold_keys(arguments))
        namespace, unknown = self.parse_known_args(arguments)
        self._check_unknown(unknown)
        vars(namespace).update(unset)
        given = _over_recipe(vars(namespace), values, given_flags(arguments))
        self.settings = {name: found_paths(value) for name, value in given.items()}
        return path

    def make(self, kind: type, source: str = "The options", **changes: Any) -> Any:
        """One of the dataclasses, anew: with the settings that were parsed, and some in their place."""
        given = self.settings | changes
        try:
            return kind(**{name: given[name] for name in _fields([kind])})
        except UsageError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            raise UsageError(f"{source}: {with_fix(str(error))}") from error

    def _take_nulls(self, arguments: Sequence[str]) -> tuple[dict[str, None], list[str]]:
        """The settings that `--name null` unsets, which argparse would read as a text, and the other arguments."""
        unset: dict[str, None] = {}
        rest: list[str] = []
        words = list(arguments)
        while words:
            item = words.pop(0)
            flag, has_value, value = item.partition("=")
            action = self._option_string_actions.get(flag)
            is_null = value == "null" if has_value else words[:1] == ["null"]
            if is_null and action is not None and NoneType in typing.get_args(self._hints.get(action.dest)):
                unset[action.dest] = None
                words = words[not has_value :]
            else:
                rest.append(item)
        return unset, rest

    def _check_unknown(self, unknown: list[str]) -> None:
        if not unknown:
            return
        flag = unknown[0].partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("--"):
            raise UsageError(f"{unknown[0]!r} belongs to no option. Options are written --name value.")
        if name in self._known:
            raise UsageError(f"{flag}: {self.prog} does not use this setting, which another command has. Remove it.")
        raise UsageError(no_such_option(self, flag, name, self._keys))

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UsageError`."""
        raise UsageError(f"{message}. {self.prog} --help lists the options.")


def _fold_keys(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--echo.patience 5 --echo.actions clip stop` as one mapping, `--echo {"patience": 5}`."""
    rest: list[str] = []
    folded: dict[str, dict[str, Any]] = {}
    values: list[str] | None = None
    found: list[tuple[str, str, list[str]]] = []
    for item in arguments:
        flag, has_value, value = item.partition("=")
        group, _, key = flag.removeprefix("--").replace("-", "_").partition(".")
        if flag.startswith("--") and key and group in OVER_RECIPE:
            values = [value] if has_value else []
            found.append((group, key, values))
        elif item.startswith("--") or values is None:
            values = None
            rest.append(item)
        else:
            values.append(item)
    for group, key, texts in found:
        given = [read_text(text) for text in texts]
        folded.setdefault(group, {})[key] = given[0] if len(given) == 1 else given or True
    for place, item in reversed(list(enumerate(rest))):  # --context window --context.turns 2
        group = item.removeprefix("--").partition("=")[0]
        if item.startswith("--") and group in folded:
            value = read_text(item.partition("=")[2] if "=" in item else rest[place + 1])
            del rest[place : place + (1 if "=" in item else 2)]
            folded[group] = (value if isinstance(value, dict) else _main(group, value)) | folded[group]
    return rest + [part for group, mapping in folded.items() for part in (f"--{group}", json.dumps(mapping))]


def _main(group: str, value: Any) -> dict[str, Any]:
    """What a value that is no mapping stands for; nothing for a switch, which a key implies."""
    kind = groups_of(MultiTurnPPOConfig).get(group)
    return {} if kind is None or kind.main_key is None else {kind.main_key: value}


def _over_recipe(given: dict[str, Any], recipe: Mapping[str, Any], flags: set[str]) -> dict[str, Any]:
    """The settings, with the mappings of the command line put over the recipe's, key by key.

    The arguments of the recipe's environment are no arguments of another one that the command line names.
    """
    merged = {name: read_text(given[name]) for name in MAPPINGS if isinstance(given.get(name), str)}
    for name in OVER_RECIPE:
        is_of_another = name == "env_kwargs" and "env" in flags and given.get("env") != recipe.get("env")
        is_switch = name in MAPPINGS and not isinstance(merged.get(name), dict)
        if name in flags and recipe.get(name) not in (None, "", {}, True, False) and not (is_of_another or is_switch):
            of_recipe = recipe[name] if isinstance(recipe[name], dict) else _main(name, recipe[name])
            merged[name] = (of_recipe or read_mapping(name, recipe[name])) | read_mapping(name, given[name])
    return given | merged
