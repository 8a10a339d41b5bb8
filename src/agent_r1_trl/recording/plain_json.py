"""JSON of whatever an environment put into a trajectory."""

from __future__ import annotations

import json
from typing import Any

from agent_r1_trl.safe_text import short_or_hex


def dump_json(value: Any) -> str:
    """Compact JSON that can always be written as UTF-8.

    An environment may put anything into `info`. What JSON cannot hold is converted (numpy and torch values, sets) or
    written as its `repr`, because recording must not end a training run.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_to_json)
    except (TypeError, ValueError):  # keys that are not strings, circular references, very long numbers
        text = json.dumps(_clean(value, ()), ensure_ascii=False, separators=(",", ":"), default=_to_json)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which a model can write as \ud800 in the JSON of a call
        return json.dumps(json.loads(text), separators=(",", ":"))
    return text


def _to_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return repr(value)


def _clean(value: Any, parents: tuple[int, ...]) -> Any:
    if id(value) in parents:
        return "<circular reference>"
    if isinstance(value, dict):
        return {str(key): _clean(item, (*parents, id(value))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, (*parents, id(value))) for item in value]
    return short_or_hex(value) if isinstance(value, int) else value
