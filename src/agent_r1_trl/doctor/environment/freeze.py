"""Finding state that two instances of an environment share.

Not part of the data flow: a linter's step.
"""

from __future__ import annotations

import collections
import types
from typing import Any

from agent_r1_trl.tools import SearchIndex, Tool, ToolExecutor

_CONTAINERS = (list, dict, set, bytearray, collections.deque)
_OPAQUE = (Tool, ToolExecutor, SearchIndex, types.ModuleType, types.FunctionType, types.MethodType, type)
_MAX_DEPTH = 6
_MAX_ITEMS = 2000


def snapshot_class(cls: type) -> dict[str, str]:
    """The mutable attributes of a class and its bases (this package's excepted), frozen to text."""
    frozen = {}
    for base in cls.__mro__:
        if base is object or base.__module__.startswith("agent_r1_trl."):
            continue
        for name, value in vars(base).items():
            if name.startswith("__") or "cache" in name.lower():
                continue
            if isinstance(value, _CONTAINERS) or _is_user_object(value):
                frozen[f"{base.__name__}.{name}"] = freeze(value)
    return frozen


def snapshot_instance(instance: Any) -> dict[str, str]:
    """The attributes of an instance, frozen to text."""
    names = list(getattr(instance, "__dict__", {}))
    return {name: freeze(instance.__dict__[name]) for name in names if "cache" not in name.lower()}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose value differs."""
    return sorted(name for name in before if before[name] != after.get(name, before[name]))


def freeze(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """Text that changes when the value's plain content changes; opaque things count by identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        try:
            return repr(value)
        except ValueError:  # an integer too long to print
            return f"int of {value.bit_length()} bits"  # type: ignore[union-attr]
    if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, _OPAQUE):
        return f"<{type(value).__name__} {id(value)}>"
    inner = seen | {id(value)}
    try:
        if isinstance(value, dict):
            items = list(value.items())[:_MAX_ITEMS]
            body = ", ".join(
                f"{freeze(key, depth + 1, inner)}: {freeze(item, depth + 1, inner)}" for key, item in items
            )
            return f"{{{len(value)}: {body}}}"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(freeze(item, depth + 1, inner) for item in list(value)[:_MAX_ITEMS]))}}}"
        if isinstance(value, (list, tuple, collections.deque)):
            body = ", ".join(freeze(item, depth + 1, inner) for item in list(value)[:_MAX_ITEMS])
            return f"[{len(value)}: {body}]"
        if isinstance(value, bytearray):
            return repr(bytes(value))
        if hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array
            return f"array {value.shape} {hash(value.tobytes())}"
        if _is_user_object(value):
            return f"{type(value).__name__} {freeze(vars(value), depth + 1, inner)}"
    except Exception:  # a container that another thread is changing, a property that raises
        return f"<{type(value).__name__}>"
    return f"<{type(value).__name__} {id(value)}>"


def _is_user_object(value: Any) -> bool:
    """An instance of a Python class with attributes, and nothing of the interpreter's or this package's machinery."""
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__.split(".")[0]
    return module not in (
        "builtins",
        "functools",
        "threading",
        "_thread",
        "asyncio",
        "logging",
        "abc",
        "types",
        "typing",
    )
