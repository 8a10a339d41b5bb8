"""Checks of settings and rows, what is shown back to the model, and the packages of the extra `games`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_MAX_SHOWN = 40
"""Characters of an action that is shown back to the model."""


def check_whole(owner: str, name: str, value: Any, minimum: int = 1) -> None:
    """Check that a setting is an integer >= `minimum`.

    Raises:
        ValueError: it is not; the message names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{owner}.{name}={value!r}: must be an integer >= {minimum}.")


def check_seed(owner: str, seed: Any) -> int | None:
    """The seed of a row, or None if it has none.

    Raises:
        ValueError: it is no integer >= 0.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"{owner}.reset: seed={seed!r:.200} must be an integer >= 0, or None.")
    return seed


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
