"""Rules of settings, checks of rows, what is shown back to the model, and the packages of the extra `games`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from agent_r1_trl.rewards.format import check_answer_tag
from agent_r1_trl.settings import Rule, Whole

AROUND = " \t\r\n.,;:!'\"`\u3002\uff0c\u3001\uff01\u201c\u201d\u2018\u2019\u300c\u300d"
"""White space and punctuation, the full-width kind too, that may stand around the name of an action."""
_MAX_SHOWN = 40
"""Characters of an action that is shown back to the model."""


class Tag(Rule):
    """The bare name of a tag, or ""."""

    def accepts(self, value: Any) -> bool:
        """See `Rule`."""
        with contextlib.suppress(ValueError):
            if value != "":
                check_answer_tag("", value)
            return True
        return False

    def __str__(self) -> str:
        return "the bare name of a tag other than that of the reasoning, or an empty text"


class TwoNumbers(Rule):
    """Two whole numbers, the second no smaller than the first (or, for a `size`, of any order).

    Args:
        minimum: of both.
        is_size: whether they are rows and columns.
    """

    def __init__(self, minimum: int, *, is_size: bool = False) -> None:
        self.minimum, self.is_size = minimum, is_size

    def accepts(self, value: Any) -> bool:
        """See `Rule`."""
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        is_whole = is_pair and all(Whole(self.minimum).accepts(item) for item in value)
        return is_whole and (self.is_size or value[0] <= value[1])

    def __str__(self) -> str:
        return f"two whole numbers >= {self.minimum}, {'rows and columns' if self.is_size else 'fewest and most'}"


class Given(Rule):
    """Anything; the class checks it together with others."""

    def accepts(self, value: Any) -> bool:
        """See `Rule`."""
        return True


def check_seed(owner: str, seed: Any) -> int | None:
    """The seed of a row, or None if it has none.

    Raises:
        ValueError: it is no integer >= 0.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"{owner}.reset: seed={seed!r:.200} must be an integer >= 0, or None.")
    return int(seed)


def load_package(name: str, owner: str) -> Any:
    """Import a package of the extra `games`.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f'{owner} needs the package {package.replace("_", "-")}: pip install "agent-r1-trl[games]".'
        ) from error


def has_no_text(prompt: Any) -> bool:
    """Whether a prompt says nothing: none at all, or the placeholder of a run whose environment owns the data."""
    if prompt is None or prompt == "":
        return True
    is_list = isinstance(prompt, list | tuple)
    return is_list and all(isinstance(item, Mapping) and not item.get("content") for item in prompt)


def shown(text: str) -> str:
    """A text of the model's, short and printable, in quotes."""
    text = text.strip().encode("utf-8", errors="replace").decode("utf-8")
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
