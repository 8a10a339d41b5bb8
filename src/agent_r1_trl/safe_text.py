r"""Text of models, tools, environments and users, made safe to show and to store.

Two dangers: text that controls what shows it (escape sequences, Markdown, HTML), and secrets in it. A secret is

- the value of an environment variable of this process whose name says so (`HF_TOKEN`, `OPENAI_API_KEY`, ...),
- a value under such a name in a row of the data set, in a tool's arguments or in an environment's `info`,
- whatever one of the user's own patterns matches.

The rules hold for the whole process, as errors are written in places that know no configuration. Not covered: a secret
in another encoding (base64, URL escapes), or split over several messages.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.patterns import PatternTimeoutError, TimedPattern, warn_once
from agent_r1_trl.settings import Expression, SettingsGroup, Texts, setting

SECRET_NAMES = (
    r"(?:^|[_\-])(?:api[_\-]?keys?|access[_\-]?keys?|private[_\-]?keys?|secret[_\-]?keys?|secrets?|"
    r"passwords?|passwd|passphrase|credentials?|auth[_\-]?tokens?|access[_\-]?tokens?)$|(?<!bos)(?<!eos)(?<!pad)(?<!unk)[_\-]token$"
)
"""Names under which secrets stand, whatever their case: of environment variables, columns and arguments."""
SCHEMA_WORDS = frozenset(
    [
        "type",
        "title",
        "description",
        "format",
        "pattern",
        "minLength",
        "maxLength",
        "nullable",
        "default",
        "const",
        "deprecated",
        "examples",
        "writeOnly",
        "anyOf",
        "oneOf",
        "allOf",
    ]
)
"""Keys of a JSON schema that describes a text."""
MIN_SECRET_LENGTH = 6
"""Shorter values are not masked: they would be found everywhere."""
MAX_KNOWN_VALUES = 10_000
"""Values from rows that are remembered."""

# C0, DEL and C1; zero-width and bidirectional controls, which reorder text on the screen. Newline and tab are allowed.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+!|~])")


# -------------------------------------------------------------------- control characters and markup


def visible(text: str) -> str:
    r"""Replace control characters by visible symbols, because a page may contain escape sequences.

    >>> visible("a\x1b[31mb\r\u202ec")
    'a␛[31mb␍⟨U+202E⟩c'
    """
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be printed
    return _CONTROLS.sub(_symbol, text)


def _symbol(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def shown(text: str) -> str:
    """Text for a terminal, a log or an error: secrets masked, control characters visible."""
    return visible(mask(text))


def shown_all(item: object) -> Any:
    """A copy of nested dicts and lists with every text as `shown`."""
    mask = _rules.masker()
    return map_texts(lambda text: visible(mask(text)), item)


def whole(item: object) -> Any:
    """A copy of nested dicts and lists whose texts can be written as UTF-8: without lone surrogates."""
    return map_texts(lambda text: text.encode("utf-8", "replace").decode("utf-8"), item)


def map_texts(function: Callable[[str], str], item: object) -> Any:
    """A copy of nested dicts and lists with every text, keys included, as the function makes it."""
    if isinstance(item, str):
        return function(item)
    if isinstance(item, Mapping):
        return {map_texts(function, key): map_texts(function, value) for key, value in item.items()}
    return [map_texts(function, value) for value in item] if isinstance(item, list | tuple) else item


def markdown(text: str) -> str:
    r"""Text as one line of Markdown that is shown as it is: no markup, no HTML, no new paragraph.

    >>> markdown("# a <b>\n| `c`")
    '\\# a \\<b\\> \\| \\`c\\`'
    """
    return _MARKDOWN.sub(r"\\\1", " ".join(shown(text).split()))


def markdown_code(text: str) -> str:
    """Text as a code span of Markdown, also within a table.

    >>> markdown_code("a`b|c")
    "`a'b¦c`"
    """
    return f"`{' '.join(shown(text).split()).replace('`', chr(39)).replace('|', '¦')}`"


# -------------------------------------------------------------------- secrets


@dataclass(kw_only=True)
class SecretSettings(SettingsGroup):
    """The setting `secrets`: what counts as one."""

    names: Annotated[str, Expression()] = setting(
        SECRET_NAMES,
        "Regular expression for names of environment variables, columns and arguments that hold secrets.",
    )
    patterns: Annotated[list[str], Texts(Expression())] | None = setting(
        None, "Regular expressions of further secrets, masked wherever they match."
    )


if TYPE_CHECKING:
    SecretMapping = SecretSettings  # once the settings are checked
else:
    SecretMapping = Annotated[dict[str, Any] | str | None, SecretSettings]
SECRETS_HELP = "What is masked as a secret: a mapping, such as {names: '_(key|pin)$'}. None: the keys' defaults."


class SecretRules:
    """The definition of a secret: see `SecretSettings`."""

    def __init__(self, names: str = SECRET_NAMES, patterns: Sequence[str] = ()) -> None:
        self.names = TimedPattern(names, ignore_case=True)
        self.patterns = [TimedPattern(pattern, ignore_case=True) for pattern in patterns]
        self.noted: dict[str, str] = {}
        """Value -> name, of rows."""

    def is_secret(self, name: object) -> bool:
        """Whether a value under this name is a secret."""
        try:
            return isinstance(name, str) and self.names.search(name) is not None
        except PatternTimeoutError as error:
            warn_once(error, "secrets.names")
            return True

    def note(self, values: object) -> None:
        """Remember what stands under secret names in a row, so that it is masked wherever it turns up."""
        for value, name in self.values_in(values).items():
            if len(self.noted) < MAX_KNOWN_VALUES:
                self.noted[value] = name

    def values_in(self, item: Any, name: str = "") -> dict[str, str]:
        """Secret values in nested dicts and lists, each with its name."""
        if isinstance(item, Mapping):
            if name and _is_schema(item):
                # An argument called `password` of a tool: words such as "string" are no secrets.
                return self.values_in([item.get("default"), item.get("const")], name)
            parts = [(value, str(key) if self.is_secret(key) else name) for key, value in item.items()]
        elif isinstance(item, list | tuple):
            parts = [(value, name) for value in item]
        else:
            is_one = bool(name) and isinstance(item, str) and len(item) >= MIN_SECRET_LENGTH
            return {item: name} if is_one else {}
        return {value: key for part in parts for value, key in self.values_in(*part).items()}

    def known_values(self) -> dict[str, str]:
        """Every value that is known to be a secret, with its name: of rows, and of the environment as it is now."""
        return self.noted | {
            value: name
            for name, value in os.environ.items()
            if len(value) >= MIN_SECRET_LENGTH and not value.isdigit() and self.is_secret(name)
        }

    def masker(self, extra: Mapping[str, str] | None = None) -> Callable[[str], str]:
        """A function that replaces every secret known now, and every value of `extra`, in a text by its name.

        The environment is read once: reading it for each text of a rollout took longer than the masking.
        """
        known, extra = self.known_values(), extra or {}

        def mask(text: str) -> str:
            text = _masked(_masked(text, known), extra)
            try:
                for pattern in self.patterns:
                    text = pattern.sub("[secret]", text)
            except PatternTimeoutError as error:
                warn_once(error, "secrets.patterns")
                return "[secret: secrets.patterns took too long on this text]"
            return text

        return mask

    def mask(self, text: str, extra: Mapping[str, str] | None = None) -> str:
        """The text with every secret, and every value of `extra`, replaced by its name."""
        return self.masker(extra)(text)

    def mask_all(self, item: object, extra: Mapping[str, str] | None = None) -> Any:
        """A copy of nested dicts and lists with every secret in their texts masked."""
        return map_texts(self.masker(extra), item)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known that could be masked."""
        return not (self.patterns or self.known_values())


def _is_schema(item: Mapping[Any, Any]) -> bool:
    """Whether a mapping describes a text instead of holding one."""
    return bool(item.keys() & {"type", "anyOf", "oneOf", "allOf"}) and set(item) <= SCHEMA_WORDS


def _masked(text: str, named: Mapping[str, str]) -> str:
    return _any_of(tuple(named)).sub(lambda match: f"[secret: {named[match[0]]}]", text) if named else text


@functools.lru_cache(8)
def _any_of(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)))


_rules = SecretRules()


def mask(text: str) -> str:
    """The text with every secret replaced by its name."""
    return _rules.mask(text)


def rules() -> SecretRules:
    """The rules of this process."""
    return _rules


def set_rules(names: str = SECRET_NAMES, patterns: Sequence[str] | None = None) -> None:
    """Set the rules of this process, see `SecretRules`; values that were noted before are kept."""
    global _rules
    noted = _rules.noted
    _rules = SecretRules(names, patterns or ())
    _rules.noted = noted


# -------------------------------------------------------------------- JSON


def dump_json(value: object, *, ensure_ascii: bool = False) -> str:
    """Compact JSON that can always be written as UTF-8.

    An environment may put anything into `info`. What JSON cannot hold is converted (numpy and torch values, sets) or
    written as its `repr`, because recording must not end a training run.
    """
    options: Any = {"ensure_ascii": ensure_ascii, "separators": (",", ":"), "default": _to_json}
    try:
        text = json.dumps(value, **options)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, circular references, long numbers
        text = json.dumps(_clean(value, ()), **options)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which a model can write as \ud800 in the JSON of a call
        return json.dumps(json.loads(text), separators=(",", ":"))
    return text


def _to_json(value: object) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else repr(value)


_MAX_BITS = 14_000
"""4,215 digits; Python writes at most 4,300 in decimals."""


def _clean(value: Any, parents: tuple[int, ...]) -> Any:
    if id(value) in parents or len(parents) > 100:
        return "<circular reference>" if id(value) in parents else "<too deep>"
    if isinstance(value, dict):
        return {str(key): _clean(item, (*parents, id(value))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, (*parents, id(value))) for item in value]
    is_long = isinstance(value, int) and value.bit_length() > _MAX_BITS
    return hex(value) if is_long else value
