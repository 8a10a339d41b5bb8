"""Which of the functions that somebody else wrote a model may call."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def select_names(
    owner: str, known: list[str], include: Iterable[str] | str | None, exclude: Iterable[str] | str
) -> list[str]:
    """The names that `include` has (None: all) and `exclude` has not; both hold names or patterns such as "read_*".

    Raises:
        ValueError: a pattern fits no name, or nothing is left; the message begins with `owner`.
    """
    included, excluded = (
        {item: fnmatch.filter(known, item) for item in ([patterns] if isinstance(patterns, str) else patterns)}
        for patterns in ("*" if include is None else include, exclude)
    )
    unknown = [item for item, names in (*included.items(), *excluded.items()) if not names]
    chosen = {name for names in included.values() for name in names}.difference(*excluded.values())
    if unknown or not chosen:
        problem = f"{unknown} fits none of" if unknown else "nothing is left of"
        raise ValueError(f"{owner}: include={include!r}, exclude={exclude!r}: {problem} {known}. Correct it.")
    return [name for name in known if name in chosen]
