"""Settings that say themselves which values they take, and the one place that refuses others.

A field of a dataclass is annotated with its rule (`max_turns: Count = setting(8, "Maximum number of ...")`) and
`check_settings` checks all of them. What two settings say together is a row of a table: `Need` (one is read only
beside certain values of others) or `Clash` (they contradict each other). Rules stand in the annotation and not in the
field's metadata, because transformers hands metadata to argparse as it is. What is refused is so with a ValueError
that names the setting, its value, the rule and the fix.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.patterns import TimedPattern


def setting(default: object, help: str, **more: object) -> Any:
    """A field of a dataclass with its default and its text for `--help`; `more`: its `aliases` and `choices` there."""
    return field(default=default, metadata={"help": help, **more})


# -------------------------------------------------------------------- one value


class Rule:
    """Which values a setting takes: `str` of it is the rule in words. Of a list the test is one of all elements."""

    def __init__(self, words: str, takes: Callable[[Any], bool], *, is_list: bool = False) -> None:
        self._words = words
        self._takes = takes
        self.is_list = is_list

    def accepts(self, value: object) -> bool:
        """Whether it takes this value."""
        is_list = not self.is_list or (isinstance(value, list | tuple) and len(value) > 0)
        return is_list and self._takes(value)

    def __str__(self) -> str:
        return self._words


class Whole(Rule):
    """A whole number from `minimum` on, to `maximum` if there is one."""

    def __init__(self, minimum: int = 1, maximum: int | None = None) -> None:
        def takes(value: object) -> bool:
            if not isinstance(value, int) or isinstance(value, bool):
                return False
            return value >= minimum and (maximum is None or value <= maximum)

        bound = "" if maximum is None else f" and <= {maximum}"
        super().__init__(f"a whole number >= {minimum}{bound}", takes)
        self.minimum, self.maximum = minimum, maximum


class CountOr(Rule):
    """A whole number from 1 on, or a word that stands for one that is chosen."""

    def __init__(self, word: str) -> None:
        is_count = Whole(1).accepts
        super().__init__(f"a whole number >= 1, or {word!r}", lambda value: value == word or is_count(value))
        self.word = word


class Number(Rule):
    """A number within bounds, finite unless infinity stands for something.

    Args:
        may_be_infinite: whether infinity does.
        **bounds: some of `minimum`, `maximum` (which are accepted themselves), `above` and `below` (which are not).
    """

    def __init__(self, *, may_be_infinite: bool = False, **bounds: float) -> None:
        def takes(value: object) -> bool:
            if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
                return False
            if math.isinf(value) and not may_be_infinite:
                return False
            return all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items())

        texts = [f"{_BOUNDS[name][0]} {bound:g}" for name, bound in bounds.items()]
        super().__init__(f"a {'' if may_be_infinite else 'finite '}number {' and '.join(texts)}".strip(), takes)
        self.may_be_infinite, self.bounds = may_be_infinite, bounds


_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": (">=", operator.ge),
    "maximum": ("<=", operator.le),
    "above": (">", operator.gt),
    "below": ("<", operator.lt),
}


class OneOf(Rule):
    """One of some names."""

    def __init__(self, *choices: str) -> None:
        words = f"one of {', '.join(map(repr, choices))}"
        super().__init__(words, lambda value: isinstance(value, str) and value in choices)
        self.choices = choices


class SomeOf(Rule):
    """A list of some names, at least one, each once."""

    def __init__(self, *choices: str) -> None:
        words = f"a list of some of {', '.join(map(repr, choices))}, each once"
        is_one = OneOf(*choices).accepts
        super().__init__(words, lambda value: all(map(is_one, value)) and len({*value}) == len(value), is_list=True)
        self.choices = choices


class Text(Rule):
    """A text, by default one that is not blank."""

    def __init__(self, *, may_be_empty: bool = False) -> None:
        words = "a text" if may_be_empty else "a text that is not empty"
        super().__init__(words, lambda value: isinstance(value, str) and (may_be_empty or bool(value.strip())))


class Texts(Rule):
    """A list of texts, at least one; by default of texts that are not blank."""

    def __init__(self, each: Rule | None = None) -> None:
        one = each or Text()
        super().__init__(f"a list, at least one, each {one}", lambda value: all(map(one.accepts, value)), is_list=True)


class Expression(Rule):
    """A regular expression to search for; one that matches empty text would match everywhere."""

    def __init__(self) -> None:
        def takes(value: Any) -> bool:
            try:
                return TimedPattern(value).search("") is None
            except (ValueError, TypeError):
                return False

        super().__init__("one regular expression that does not match empty text ('(?!)' matches nothing)", takes)


class Switch(Rule):
    """True or False; any other value would count as one of them in silence."""

    def __init__(self) -> None:
        super().__init__("True or False", lambda value: isinstance(value, bool))


Count = Annotated[int, Whole(1)]
CountOrZero = Annotated[int, Whole(0)]
Share = Annotated[float, Number(minimum=0, maximum=1)]
PositiveShare = Annotated[float, Number(above=0, maximum=1)]
Positive = Annotated[float, Number(above=0)]
Finite = Annotated[float, Number()]
NotNegative = Annotated[float, Number(minimum=0)]
Rate = Annotated[float, Number(minimum=0, maximum=100)]
"""A rate of learning or decay. With a larger one a single step overwrites every weight, or makes it infinite."""
Seconds = Positive
Flag = Annotated[bool, Switch()]
Words = Annotated[str, Text()]


def check_settings(config: object, others: Mapping[str, Any] | None = None) -> None:
    """Read every field of a dataclass that is a group, and check every one that has a rule.

    Args:
        config: an instance.
        others: name -> annotation, of fields that are inherited and have no rule of their own.
    """
    kind: Any = type(config)
    for name, group in groups_of(kind).items():
        setattr(config, name, group.read(name, getattr(config, name)))
    check_rules(config, rules_of(kind))
    for name, annotation in (others or {}).items():
        check_value(name, getattr(config, name), annotation)


def check_value(name: str, value: object, annotation: object) -> None:
    """Check one value by an annotation such as `Count | None`."""
    _check(name, value, _rule_of(annotation))


def check_rules(owner: object, rules: Mapping[str, tuple[Rule, bool]], prefix: str = "") -> None:
    """Check attributes of an object by `rules_of` its class; messages name them with the prefix."""
    for name, rule in rules.items():
        _check(prefix + name, getattr(owner, name), rule)


def _check(name: str, value: object, found: tuple[Rule | None, bool]) -> None:
    rule, is_optional = found
    if rule is not None and not rule.accepts(value) and not (value is None and is_optional):
        none = ", or None" if is_optional else ""
        raise ValueError(f"{name}={value!r:.200} must be {rule}{none}. Set {name} to such a value.")


@functools.cache
def rules_of(kind: type) -> dict[str, tuple[Rule, bool]]:
    """Field of a dataclass -> its rule, and whether it may be None as well; of the fields that have one.

    A field that is declared again without a rule keeps the one it had.
    """
    found = {}
    for parent in reversed(kind.__mro__):
        for name, hint in _hints(parent).items():
            rule, is_optional = _rule_of(hint)
            if rule is not None:
                found[name] = (rule, is_optional)
    return found


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _members(annotation: object) -> tuple[Any, ...]:
    return (annotation,) if hasattr(annotation, "__metadata__") else get_args(annotation)


def _notes(annotation: object) -> list[Any]:
    return [note for member in _members(annotation) for note in getattr(member, "__metadata__", ())]


def _rule_of(annotation: object) -> tuple[Rule | None, bool]:
    rules = (note for note in _notes(annotation) if isinstance(note, Rule))
    return next(rules, None), NoneType in _members(annotation)


# -------------------------------------------------------------------- a mapping


@dataclass(kw_only=True)
class SettingsGroup:
    """Settings that users write as one mapping, `echo: {patience: 5}`; subclasses declare the keys as fields."""

    may_be_off: ClassVar[bool] = False
    """Whether the group is None where nothing, or False, was given, and True stands for its defaults."""
    main_key: ClassVar[str | None] = None
    """The key that a value stands for which is no mapping, as in `context: window`."""

    @classmethod
    def read(cls, flag: str, value: Any) -> Self | None:
        """Make the group of what a user wrote.

        Args:
            flag: the setting.
            value: a mapping, or the JSON text of one; None or False for none; a group, which is copied.
        """
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = {"true": True, "false": False}.get(value.lower(), value)
        if value is None or value is False:
            return None if cls.may_be_off else cls()
        if value is True and cls.may_be_off:
            value = {}
        known = [item.name for item in dataclasses.fields(cls)]
        if cls.main_key is not None and not isinstance(value, dict | cls):
            value = {cls.main_key: value}
        if not isinstance(value, dict | cls):
            flags = "True, False or " if cls.may_be_off else ""
            raise ValueError(
                f"{flag}={value!r:.200} must be {flags}a mapping of some of {', '.join(known)} to values. Set "
                f"{flag} to such a value."
            )
        kind: Any = cls
        rules = rules_of(kind)
        if isinstance(value, dict):
            if wrong := [key for key in value if key not in known]:
                raise ValueError(
                    f"{flag}: {wrong[0]!r} is none of its keys.{did_you_mean(str(wrong[0]), known)} Correct or remove "
                    f"it; the keys are {', '.join(known)}."
                )
            lists = [key for key, text in value.items() if isinstance(text, str) and key in rules]
            value = cls(**value | {key: [value[key]] for key in lists if rules[key][0].is_list})
        else:
            value = copy.copy(value)  # what one configuration changes in it stays with that one
        check_rules(value, rules, f"{flag}.")
        return value


@functools.cache
def groups_of(kind: type) -> dict[str, type[SettingsGroup]]:
    """Field of a dataclass -> the group that its annotation names, `Annotated[..., EchoSettings]`."""
    hints: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        hints |= _hints(parent)
    groups = {}
    for name, hint in hints.items():
        classes = [note for note in _notes(hint) if isinstance(note, type)]
        if classes and issubclass(classes[0], SettingsGroup):
            groups[name] = classes[0]
    return groups


def plain(value: object) -> Any:
    """A group as the mapping of what differs from its defaults; for nothing None, or True if it may be off."""
    if not isinstance(value, SettingsGroup):
        return value
    given = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    given = {name: found for name, found in given.items() if found != default_of(value, name)}
    return given or (True if value.may_be_off else None)


def plain_value(config: object, name: str) -> Any:
    """A setting as users write it; of the key of a group, `echo.patience`, None where the group is off."""
    group, _, key = name.rpartition(".")
    if not group:
        return plain(getattr(config, name))
    found = getattr(config, group)
    return getattr(found, key) if isinstance(found, SettingsGroup) else None  # of a feature that is not installed


# -------------------------------------------------------------------- several together


class Need(NamedTuple):
    """Settings that are read only beside certain values of others."""

    names: str
    """Names of the settings, with blanks between."""
    beside: dict[str, tuple[Any, ...] | None]
    """Other setting -> the values with which they are read (of a list: one of its elements); None: any but the
    default. One of the others is enough."""

    def is_met(self, config: object) -> bool:
        """Whether the settings are read."""
        return any(_has(config, other, values) for other, values in self.beside.items())


def _has(config: object, name: str, values: tuple[Any, ...] | None) -> bool:
    found = plain_value(config, name)
    if values is None:
        return bool(found not in (None, default_of(config, name)))
    return any(item in values for item in (found if isinstance(found, list) else [found]))


class Clash(NamedTuple):
    """Settings that contradict each other."""

    names: str
    """Names of the settings that the message begins with, with blanks between."""
    holds: Callable[[Any], Any]
    """Whether a configuration has the contradiction."""
    text: str
    """Why it is one, and what to do; `{c.seed}` is the value of a setting."""

    @classmethod
    def of(cls, when: Mapping[str, tuple[Any, ...] | None], text: str, holds: Callable[[Any], Any] = bool) -> Clash:
        """One of values, as in `Need.beside` (of each setting; an empty tuple: any), and of what `holds` besides."""

        def all_hold(c: object) -> Any:
            return all(values == () or _has(c, name, values) for name, values in when.items()) and holds(c)

        return cls(" ".join(when), all_hold, text)


def refuse(problems: Iterable[str]) -> None:
    """Raise the first of the problems, if there is any."""
    for problem in problems:
        raise ValueError(problem)


def find_clashes(config: object, clashes: Iterable[Clash]) -> Iterator[str]:
    """The rows of a table that hold, in words."""
    for clash in clashes:
        if clash.holds(config):
            first, *others = [shown(config, name) for name in clash.names.split()]
            beside = f" with {' and '.join(others)}" if others else ""
            yield f"{first}{beside}: {clash.text.format(c=config)}"


def find_unread(config: object, needs: Iterable[Need], is_waiting: Callable[[str], bool] = lambda name: False) -> str:
    """The settings that have another value than their default, which no row of a table has read; "" for none.

    Those that are `is_waiting` may stand there without effect.
    """
    problems = []
    for need in needs:
        names = [
            name
            for name in need.names.split()
            if hasattr(config, name.partition(".")[0])
            and not is_waiting(name)
            and plain_value(config, name) not in (None, default_of(config, name))
        ]
        if names and not need.is_met(config):
            beside = " and ".join(shown(config, other) for other in need.beside)
            fix = " or ".join(
                f"{other} to {'another value than ' + repr(default_of(config, other)) if values is None else ''}"
                f"{' or '.join(map(repr, values or ()))}"
                for other, values in need.beside.items()
            )
            problems += [
                f"{shown(config, name)} has no effect with {beside}. Remove {name} (or set it to its default, "
                f"{default_of(config, name)!r}), or set {fix}."
                for name in names
            ]
    return " ".join(problems)


def shown(config: object, name: str) -> str:
    """A setting and its value, as in `beta=0.0`."""
    value = plain_value(config, name)
    return f"{name}={getattr(value, 'value', value)!r:.200}"  # of an enumeration, what users write


def default_of(config: Any, name: str) -> Any:
    """The default of a field, or of the key of a group; None where the group is off."""
    group, _, key = name.rpartition(".")
    owner = getattr(config, group) if group else config
    is_off = group and not isinstance(owner, SettingsGroup)
    return None if is_off else type(owner).__dataclass_fields__[key].default
