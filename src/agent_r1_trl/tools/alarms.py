"""Finds functions that limit their time with `signal.alarm`, which no thread but the main one may set up."""

from __future__ import annotations

import inspect
import signal
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

from agent_r1_trl.tools.signature import unwrap_partial

_ALARMS = {"alarm", "setitimer", "SIGALRM"}
_SETTERS = [getattr(signal, name) for name in ("alarm", "setitimer") if hasattr(signal, name)]
_GUARDS = {"main_thread", "ValueError"}
"""Names in functions that look where they run, or bear the refusal."""
_found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def check_no_alarm(fn: Callable[..., Any], what: str, cure: str) -> None:
    """Refuse a function that sets alarms, itself or in a helper that its user wrote.

    Only what names in the code show is found; the rest fails when it is called (`faults.is_thread_error`).

    Args:
        fn: any callable.
        what: the function, for the message.
        cure: what to do instead, for the message.

    Raises:
        ValueError: it sets alarms.
    """
    target = _function(fn)
    if target is None:
        return
    if target not in _found:
        _found[target] = any(map(_sets_alarm, _reachable(target)))
    if _found[target]:
        raise ValueError(
            f"{what} uses signal.alarm (or setitimer), which works in the main thread only, and this runs on another "
            f"one: every call would fail. {cure}"
        )


def _function(fn: Any) -> types.FunctionType | None:
    fn = unwrap_partial(fn)
    fn = getattr(fn, "__func__", fn)
    if not inspect.isfunction(fn):
        fn = getattr(type(fn), "__call__", None)  # noqa: B004
    return fn if inspect.isfunction(fn) else None


def _sets_alarm(fn: types.FunctionType) -> bool:
    values = _values(fn)
    for code in _codes(fn.__code__):
        names = {*code.co_names, *code.co_freevars}
        has_module = "signal" in code.co_names or any(values.get(name) is signal for name in names)
        is_setter = any(values.get(name) is setter for name in names for setter in _SETTERS)
        if (is_setter or (has_module and names & _ALARMS)) and not names & _GUARDS:
            return True
    return False


def _reachable(first: types.FunctionType) -> Iterator[types.FunctionType]:
    """The function, those that it wraps, and those of the user's that it names."""
    waiting, seen = [first], set()
    while waiting:
        fn = waiting.pop()
        if id(fn) in seen:
            continue
        seen.add(id(fn))
        yield fn
        values = _values(fn)
        for name in {name for code in _codes(fn.__code__) for name in (*code.co_names, *code.co_freevars)}:
            value = values.get(name)
            if inspect.isclass(value) and not _is_library(value):
                waiting += [member for member in vars(value).values() if inspect.isfunction(member)]
            elif inspect.isfunction(value) and (name in fn.__code__.co_freevars or not _is_library(value)):
                waiting.append(value)
        wrapped = getattr(fn, "__wrapped__", None)
        if inspect.isfunction(wrapped):
            waiting.append(wrapped)


def _values(fn: types.FunctionType) -> ChainMap[str, Any]:
    """What the names of a function stand for: globals, and variables of the functions around it."""
    around = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # not yet defined
            continue
    return ChainMap(around, fn.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_library(value: Any) -> bool:
    module = str(getattr(value, "__module__", None) or "")
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    is_standard = module.partition(".")[0] in sys.stdlib_module_names and module != "__main__"
    return is_standard or "site-packages" in file or "dist-packages" in file
