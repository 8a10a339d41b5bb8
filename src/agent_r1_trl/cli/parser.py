"""Dataclasses from a recipe and the command line: one way to read a value, with errors that a user can act on."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from agent_r1_trl.cli.arguments import EvalArguments, TrainArguments, read_mapping, read_text
from agent_r1_trl.cli.errors import UsageError, no_such_option, with_fix
from agent_r1_trl.cli.options import help_text
from agent_r1_trl.cli.recipe import COMMAND_LINE, config_of, found_paths, read_recipe, read_value, words_of
from agent_r1_trl.features import MAPPINGS as OF_FEATURES
from agent_r1_trl.features import keys_of
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.settings import groups_of
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
from agent_r1_trl.trainers.config import ADAPTER_SETTINGS, ModelConfig, adapter_problem

MAPPINGS = (*OF_FEATURES, *groups_of(MultiTurnPPOConfig))
"""Settings of training that are mappings."""
OVER_RECIPE = ("env_kwargs", "reward_options", "chat_template_kwargs", *MAPPINGS)
"""Mappings of which the command line changes the keys that it names; the recipe's others stay."""
OF_RECIPES = (EvalArguments, TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
"""Keys of a recipe that are for other commands than the one that reads it."""


def _fields(kinds: Sequence[Any]) -> dict[str, Any]:
    return {item.name: item for kind in kinds for item in dataclasses.fields(kind) if item.init}


class RecipeParser:
    """Makes dataclass instances from a recipe and the command line.

    Args:
        kinds: the dataclasses to make, in this order.
        command: as the user typed it, for the help text.
        about: what the command does, for the help text.
        elsewhere: dataclasses whose settings a recipe may hold although this command does not use them.
        private: settings that are ignored in a recipe because they mean something else there.
        others: value of `trainer` -> the settings that it would have.
    """

    def __init__(
        self,
        kinds: Sequence[type],
        *,
        command: str,
        about: str = "",
        elsewhere: Sequence[type] = (),
        private: Sequence[str] = (),
        others: Mapping[str, type] | None = None,
    ) -> None:
        self.kinds = kinds
        self.command = command
        self._about = about
        self._private = private
        self._own, self._known = _fields(kinds), _fields([*elsewhere, *kinds])
        known = (*elsewhere, *kinds)
        self._hints = {name: hint for kind in known for name, hint in typing.get_type_hints(kind).items()}
        self._keys = [key for kind in known for key in keys_of(kind)]
        self.flags: dict[str, tuple[Any, bool]] = {}
        """Name of an option -> its field, and whether it is `--no_...`."""
        for name, item in self._own.items():
            aliases = [alias.removeprefix("--").replace("-", "_") for alias in item.metadata.get("aliases", ())]
            self.flags |= {flag: (item, False) for flag in (name, *aliases)}
            self.flags |= {f"no_{name}": (item, True)} if item.default is True else {}
        self._others: dict[str, str] = {}
        """Setting that this command line cannot have -> the `trainer` that has it."""
        for trainer, kind in (others or {}).items():
            self._others |= {name: trainer for name in _fields([kind]) if name not in self._own}
        self.recipe: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        """Every setting by its name once the arguments are parsed, before a dataclass derives others from it."""

    def parse(self, argv: Sequence[str], defaults: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Read the recipe and then the command line, which takes precedence; `--help` is answered here.

        `defaults` are values for settings that neither gives.

        Raises:
            UsageError: there is a mistake in either.
            SystemExit: help was asked for, and printed.
        """
        path = self.read(argv, defaults)
        source = f"{path} with the command line's options" if path else "The options"
        return tuple(self.make(kind, source) for kind in self.kinds)

    def read(self, argv: Sequence[str], defaults: dict[str, Any] | None = None) -> str | None:
        """As `parse`, but only into `settings`; returns the path of the recipe."""
        if {"-h", "--help"} & set(argv):
            print(help_text(self.command, self._about, self.kinds), end="")
            raise SystemExit(0)
        path = config_of(argv)
        values = {name: _default(item) for name, item in self._own.items()} | (defaults or {})
        of_recipe: dict[str, Any] = {}
        if path is not None:
            self.recipe = found_paths(read_recipe(path))
            of_recipe = self._of_recipe(path)
        values |= of_recipe
        of_flags = self._of_flags(argv)
        settings = values | _over_recipe(of_flags, values)
        _check_adapter(path, of_recipe, of_flags)
        texts = {name: read_text(settings[name]) for name in MAPPINGS if isinstance(settings.get(name), str)}
        self.settings = {name: found_paths(value) for name, value in (settings | texts).items()}
        return path

    def _of_recipe(self, path: str) -> dict[str, Any]:
        known = [*self._own, *sorted(self._known)]
        if wrong := [
            f"{key!r} is not a setting.{self._meant(key, [*known, *self._keys])}"
            for key in self.recipe
            if key not in known
        ]:
            raise UsageError(f"{path}: {' '.join(wrong)} Correct or remove it; --help lists all settings.")
        checked = {name: self._checked(path, name, value) for name, value in self.recipe.items()}
        return {name: checked[name] for name in checked if name in self._own and name not in self._private}

    def _meant(self, name: str, known: Sequence[str]) -> str:
        """As `meant_setting`; a setting of another trainer is named with that."""
        if (trainer := self._others.get(name.partition(".")[0])) is not None:
            return f" trainer={trainer!r} has it: set that, or remove {name}."
        return meant_setting(name, known)

    def _checked(self, place: str, name: str, value: object) -> Any:
        return read_value(place, name, value, self._hints[name], self._known[name].metadata.get("choices") or ())

    def _of_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        """The settings of the command line; `--echo.patience 5 --echo.actions clip stop` are keys of a mapping."""
        given: dict[str, Any] = {}
        keys: dict[str, dict[str, Any]] = {}
        first: dict[str, str] = {}
        for flag, texts in words_of(argv):
            name = flag.replace("-", "_")
            group, _, key = name.partition(".")
            setting = self.flags[name][0].name if name in self.flags else name
            if setting in first and name != "config":  # `config_of` names the files
                raise UsageError(_given_twice(first[setting], " ".join([f"--{flag}", *texts])))
            first[setting] = " ".join([f"--{flag}", *texts])
            if key and group in OVER_RECIPE and group in self._own:
                values = [read_text(text) for text in texts]
                keys.setdefault(group, {})[key] = values[0] if len(values) == 1 else values or True
            elif name in self.flags:
                item, is_off = self.flags[name]
                if is_off and texts:
                    raise UsageError(f"--{flag}: takes no value. Pass it alone, or --{item.name} true.")
                given[item.name] = False if is_off else self._of_texts(flag, item.name, texts)
            elif name != "config":
                suggestion = self._meant(name, [*self.flags, *self._keys])
                problem = no_such_option(self.command, f"--{flag}", suggestion)
                if name in self._known or (key and group in self._known):
                    problem = f"--{flag}: {self.command} does not use it, another command has. Remove it."
                raise UsageError(problem)
        for group, mapping in keys.items():  # --context window --context.turns 2
            value = given.get(group, {})
            given[group] = (value if isinstance(value, dict) else _main(group, value)) | mapping
        return given

    def _of_texts(self, flag: str, name: str, texts: list[str]) -> Any:
        """The value of the texts after a flag."""
        options = typing.get_args(self._hints[name]) or (self._hints[name],)
        takes_list = any(typing.get_origin(option) is list for option in (self._hints[name], *options))
        problem = None
        if not texts and bool not in options and name not in MAPPINGS:
            problem = f"--{flag}: no value is given."
        if len(texts) > 1 and not takes_list:
            problem = f"{texts[1]!r} belongs to no option."
        if problem is not None:
            raise UsageError(f"{problem} Options are written --name value.")
        if texts == ["null"] and NoneType in options:
            return None
        if name in OVER_RECIPE:
            return read_text(texts[0]) if texts else True
        return self._checked(COMMAND_LINE, name, texts if len(texts) > 1 else texts[0]) if texts else True

    def make(self, kind: type, source: str = "The options", **changes: object) -> Any:
        """One of the dataclasses, anew: with the settings that were parsed, and some in their place."""
        given = self.settings | changes
        try:
            return kind(**{name: given[name] for name in _fields([kind])})
        except UsageError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            raise UsageError(f"{source}: {with_fix(str(error))}") from error


_OF_ADAPTERS = {"lora", "peft", "qlora"}
_FILLERS = {"use", "with", "enable", "enabled", "is", "train", "config"}


def meant_setting(name: str, known: Sequence[str]) -> str:
    """As `did_you_mean`; a name that asks for an adapter means `use_peft`, not the `lora_r` that looks like it."""
    words = set(name.lower().replace("-", "_").partition(".")[0].split("_")) - _FILLERS
    if "use_peft" in known and words and words <= _OF_ADAPTERS:
        beside = " with 'load_in_4bit'" if "qlora" in words else ""
        return f" Did you mean 'use_peft'{beside}?"
    of_lora = [item for item in known if item.startswith("lora_") and "lora" in words]
    return did_you_mean(name, of_lora) or did_you_mean(name, known)


def _given_twice(one: str, other: str) -> str:
    return f"{one} and {other} give the same setting, and one of them would be dropped. Pass it once."


def _check_adapter(path: str | None, recipe: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuse the settings of an adapter without `use_peft: true`, also those with the value of the default.

    A recipe that says `use_peft: false` itself may hold all of them with their defaults, as a run's own recipe.yaml
    does; `ModelConfig` refuses other values.
    """
    if (recipe | flags).get("use_peft"):
        return
    places = [(COMMAND_LINE, flags)]
    if path is not None and "use_peft" not in recipe:
        places.insert(0, (path, recipe))
    for place, given in places:
        asked = {name: given[name] for name in ADAPTER_SETTINGS if given.get(name) not in (None, False)}
        if problem := adapter_problem(asked):
            raise UsageError(f"{place}: {problem}")


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _main(group: str, value: object) -> dict[str, Any]:
    """The meaning of a value that is no mapping; nothing for a switch, which a key implies."""
    kind = groups_of(MultiTurnPPOConfig).get(group)
    return {} if kind is None or kind.main_key is None else {kind.main_key: value}


def _over_recipe(given: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings of the command line, with its mappings put over the recipe's, key by key.

    The arguments of the recipe's environment are no arguments of another one that the command line names.
    """
    merged = dict(given)
    for name in given.keys() & set(OVER_RECIPE):
        before, now = recipe.get(name), given[name]
        is_of_another = name == "env_kwargs" and given.get("env", recipe.get("env")) != recipe.get("env")
        is_switch = name in MAPPINGS and not isinstance(now, dict)
        if before not in (None, "", {}, True, False) and not (is_of_another or is_switch):
            of_recipe = before if isinstance(before, dict) else _main(name, before)
            merged[name] = (of_recipe or read_mapping(name, before)) | read_mapping(name, now)
    return merged
