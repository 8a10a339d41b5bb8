"""Rows of data sets, as environments receive them: what Arrow's columns add to nested values."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

NUM_ROWS = 200
"""Rows that are looked at."""

_warned: set[str] = set()


def warn_of_added_keys(dataset: Any, name: str) -> None:
    """Warn, once, of keys that `datasets` has added to the dicts of a nested column.

    A column of dicts is an Arrow struct, in which every row has the keys of all rows: those that a row did not have
    are None.

    Args:
        dataset: a `datasets.Dataset`; anything else is left alone.
        name: the argument that holds it, for the message.
    """
    keys = added_keys(dataset)
    if not keys:
        return
    message = (
        f"{name}: every dict of a nested column has the keys of all rows (it is an Arrow struct), so that "
        f"{', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''} may be None in rows that never had such a key. If "
        "that matters, make the data set with Dataset.from_list(rows, on_mixed_types='use_json'), or keep the column "
        "as JSON text and read it in reset."
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def added_keys(dataset: Any) -> list[str]:
    """Paths such as `state.door` that are None in some of the first rows and something else in others."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, dict) or not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__"):
        return []
    columns = [name for name, feature in features.items() if _has_struct(feature)]
    if not columns:
        return []
    found: dict[str, set[bool]] = {}
    for row in itertools.islice(dataset.select_columns(columns), NUM_ROWS):
        for column in columns:
            _collect(row[column], column, found)
    return [path for path, kinds in found.items() if len(kinds) > 1]


def _has_struct(feature: Any) -> bool:
    if isinstance(feature, dict):
        return True
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return inner is not None and _has_struct(inner)


def _collect(value: Any, path: str, found: dict[str, set[bool]]) -> None:
    """Note for each key of the dicts in a value whether it is None."""
    if isinstance(value, list):
        for item in value:
            _collect(item, path, found)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not ("role" in value and "content" in value):  # a message's own keys: `prompt_messages` drops None
                found.setdefault(f"{path}.{key}", set()).add(item is None)
            _collect(item, f"{path}.{key}", found)
