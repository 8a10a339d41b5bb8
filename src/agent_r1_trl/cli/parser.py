"""TRL's parser of dataclasses from a recipe and the command line, with errors that a user can act on."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from agent_r1_trl.cli.arguments import read_mapping
from agent_r1_trl.cli.errors import UsageError, explain_argparse, with_cure
from agent_r1_trl.cli.recipe import check_keys, read_recipe, read_value, split_config
from agent_r1_trl.cli.shipped_recipes import found_paths
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.trainers.trl_arguments import TrlParser

OVER_RECIPE = ("env_kwargs", "reward_options", "chat_template_kwargs")
"""Mappings of which the command line changes the keys that it names; the recipe's others stay."""


class RecipeParser(TrlParser):
    """Makes dataclass instances from a recipe and the command line.

    Args:
        dataclass_types: the dataclasses to make, in this order.
        command: as the user typed it, for the help text.
        elsewhere: dataclasses whose settings a recipe may hold although this command does not use them.
        private: settings that are ignored in a recipe because they mean something else there.
        modes: flags of the command, such as `--run`, and the dataclasses of the settings that it takes with them.
        **settings: of argparse.
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        *,
        command: str,
        elsewhere: Sequence[type] = (),
        private: Sequence[str] = (),
        modes: Mapping[str, Sequence[Any]] | None = None,
        **settings: Any,
    ) -> None:
        # No abbreviated flags: `--learning` would silently be taken for `--learning_rate`.
        super().__init__(dataclass_types, prog=command, allow_abbrev=False, **settings)
        self.add_argument("--config", metavar="RECIPE", help="YAML file with any of these settings.")
        kinds = (*elsewhere, *dataclass_types)
        self._hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
        known = {item.name: item for kind in kinds for item in dataclasses.fields(kind) if item.init}
        self._allowed = {name: item.metadata.get("choices") or () for name, item in known.items()}
        self._names = [item.name for kind in dataclass_types for item in dataclasses.fields(kind) if item.init]
        self._elsewhere = set(known) - set(self._names)
        self._private = set(private)
        self._modes = {
            mode: {item.name for kind in kinds for item in dataclasses.fields(kind)}
            for mode, kinds in (modes or {}).items()
        }
        self.settings: dict[str, Any] = {}
        """Every setting by its name once the arguments are parsed, before a dataclass derives others from it."""

    def parse(self, argv: Sequence[str], defaults: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Read the recipe and then the command line, which takes precedence.

        Args:
            argv: the arguments.
            defaults: values for settings that neither the recipe nor the command line gives.

        Raises:
            UsageError: there is a mistake in either.
        """
        path, arguments = split_config(argv)
        values = dict(defaults or {})
        if path is not None:
            recipe = read_recipe(path)
            check_keys(path, recipe, [*self._names, *sorted(self._elsewhere)])
            for name, value in recipe.items():
                checked = read_value(path, name, value, self._hints[name], self._allowed[name])
                if name in self._names and name not in self._private:
                    values[name] = checked
        self.set_defaults_with_config(**values)
        namespace, unknown = self.parse_known_args(arguments)
        self._check_unknown(unknown)
        given = _over_recipe(vars(namespace), values, arguments)
        self.settings = given = {name: found_paths(value) for name, value in given.items()}
        return tuple(self._make(kind, given, path) for kind in self.dataclass_types)

    def make(self, kind: type, **changes: Any) -> Any:
        """One of the dataclasses, anew: with the settings that were parsed, and some in their place.

        Raises:
            UsageError: they do not go together.
        """
        return self._make(kind, {**self.settings, **changes}, None)

    def _check_unknown(self, unknown: list[str]) -> None:
        if not unknown:
            return
        flag = unknown[0].partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("--"):
            raise UsageError(f"{unknown[0]!r} belongs to no option. Options are written --name value.")
        if name in self._elsewhere:
            modes = [mode for mode, names in self._modes.items() if name in names]
            cure = f"Remove it, or pass {modes[0]} as well" if modes else "Remove it"
            raise UsageError(f"{flag}: {self.prog} does not use this setting, which another command has. {cure}.")
        flags = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        hint = did_you_mean(name, [item for item in flags if "-" not in item])
        raise UsageError(f"{flag}: there is no such option.{hint} {self.prog} --help lists all options.")

    def _make(self, kind: type, given: dict[str, Any], path: str | None) -> Any:
        values = {item.name: given[item.name] for item in dataclasses.fields(kind) if item.init}
        try:
            return kind(**values)
        except UsageError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            source = f"{path} with the command line's options" if path else "The options"
            raise UsageError(f"{source}: {with_cure(str(error))}") from error

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UsageError`."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            names = [name.split("/")[0] for name in missing.split(", ")]
            helps = "".join(self._help_of(name) for name in names)
            raise UsageError(f"{', '.join(names)}: not set. Pass it, or set it in the recipe.{helps}")
        raise UsageError(explain_argparse(message, self._help_of))

    def _help_of(self, flag: str) -> str:
        action = next((action for action in self._actions if flag in action.option_strings), None)
        return f" {flag}: {action.help}" if action is not None and action.help else ""


def _over_recipe(given: dict[str, Any], recipe: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The settings, with the mappings of the command line put over the recipe's, key by key.

    The arguments of the recipe's environment are no arguments of another one that the command line names.
    """
    flags = {item.partition("=")[0][2:].replace("-", "_") for item in arguments if item.startswith("--")}
    merged = {}
    for name in OVER_RECIPE:
        is_of_another = name == "env_kwargs" and "env" in flags and given.get("env") != recipe.get("env")
        if name in flags and recipe.get(name) and not is_of_another:
            merged[name] = read_mapping(name, recipe[name]) | read_mapping(name, given[name])
    return given | merged
