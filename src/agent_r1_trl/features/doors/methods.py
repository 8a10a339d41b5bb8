"""The methods of any object as tools: a client, a simulator, a database that keeps its state."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import functools
import inspect
import threading
import typing
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any

from agent_r1_trl.settings import Rule, check_value
from agent_r1_trl.tools import Tool, ToolSchemaError
from agent_r1_trl.tools.pool import DaemonThreadPool
from agent_r1_trl.tools.signature import STARS

_OBJECT = Rule("an object, and no class or module", lambda obj: not inspect.isclass(obj) and not inspect.ismodule(obj))
_places: weakref.WeakValueDictionary[int, DaemonThreadPool] = weakref.WeakValueDictionary()
"""By the id of an object, which its tools keep alive together with its place."""
_places_lock = threading.Lock()


def tools_from(
    obj: object,
    *,
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    lenient: bool = False,
    parallel: bool = False,
) -> list[Tool]:
    """Make tools of the public methods of an object; names, hints and docstrings are read as those of functions.

    The calls on one object run one after another, in all trajectories that share it. A call that was given up keeps
    its place until it ends; further calls are then failures of the infrastructure.

    Args:
        obj: the object. Make it where the environment is made if each trajectory needs its own.
        include: names of methods, or patterns such as "read_*"; None for all that are public.
        exclude: methods that are no tools.
        lenient: take methods without hints or docstrings as well: such arguments may be anything.
        parallel: let calls run at the same time.

    Raises:
        ToolSchemaError: a method cannot be described; the message says how to go on.
        ValueError: `obj` has no methods of its own, or `include` or `exclude` fits none.
    """
    kind = type(obj)
    check_value("tools_from: obj", obj, Annotated[Any, _OBJECT])
    # Of the class: reading the object's own attributes would run its properties.
    found = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    kinds = (classmethod, staticmethod, functools.partialmethod, Tool)
    # A `functools.cached_property` is a routine to inspect, and no call.
    routines = {name for name, value in found.items() if callable(value) and inspect.isroutine(value)}
    known = [name for name, value in found.items() if name in routines or isinstance(value, kinds)]
    public = [name for name in known if not name.startswith("_")]
    names = select_names(f"tools_from({kind.__name__})", public, include, exclude)
    with _places_lock:
        place = _places.setdefault(id(obj), DaemonThreadPool(1, max_abandoned=0))
    return [_make_tool(getattr(obj, name), name, lenient, None if parallel else place) for name in names]


def _make_tool(method: object, name: str, lenient: bool, place: DaemonThreadPool | None) -> Tool:
    if isinstance(method, Tool):  # with settings of its own
        made = copy.copy(method)
        place = None if made.sequential is False else place
    else:
        made = _read(method, name, lenient)
    made.sequential, made.place = place is not None, place
    if place is not None and (made.is_async or inspect.iscoroutinefunction(method)):
        made.fn = _in_place(made.fn, place)
    return made


def _read(method: Any, name: str, lenient: bool) -> Tool:
    try:
        return Tool(method, name=name)
    except ToolSchemaError as error:
        problem = error
    except ValueError as error:  # it yields
        raise ToolSchemaError(f"{error} Or pass exclude=[{name!r}].") from error
    with contextlib.suppress(Exception):  # hints that cannot be read, or that JSON cannot express
        if lenient:
            return _read_leniently(method, name, typing.get_type_hints(inspect.unwrap(method), include_extras=True))
    with contextlib.suppress(Exception):  # a signature that cannot be read
        if lenient:
            return _read_leniently(method, name, {})
    raise ToolSchemaError(f"{problem} Or pass exclude=[{name!r}]{'' if lenient else ', or lenient=True'}.")


def _read_leniently(method: Any, name: str, hints: dict[str, Any]) -> Tool:
    """Arguments without a hint may be anything; `*args` and `**kwargs` stay empty."""
    parameters = [item for item in inspect.signature(method).parameters.values() if item.kind not in STARS]

    def shown() -> None: ...

    shown.__doc__ = inspect.getdoc(method) or f"{name.replace('_', ' ').capitalize()}."
    shown.__annotations__ = {item.name: hints.get(item.name, Any) for item in parameters}
    by_name = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    shown.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    made = Tool(shown, name=name)
    made.fn = method
    if any(item.kind is inspect.Parameter.POSITIONAL_ONLY for item in parameters):
        made.fn = lambda **given: method(*(given.get(item.name, item.default) for item in parameters))
    return made


def _in_place(method: Callable[..., Awaitable[Any]], place: DaemonThreadPool) -> Callable[..., Awaitable[Any]]:
    """An async method that runs while it holds the place of its object, for which plain ones wait too."""

    async def call(**arguments: object) -> Any:
        loop = asyncio.get_running_loop()
        has_begun = asyncio.Event()
        is_over = threading.Event()

        def hold() -> None:
            loop.call_soon_threadsafe(has_begun.set)
            is_over.wait()

        waiting = asyncio.create_task(has_begun.wait())
        holding = asyncio.create_task(place.run(hold))
        try:
            await asyncio.wait({waiting, holding}, return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                await holding
            return await method(**arguments)
        finally:
            is_over.set()
            waiting.cancel()
            if not has_begun.is_set():
                holding.cancel()

    return functools.update_wrapper(call, method)


def select_names(
    owner: str, known: list[str], include: Iterable[str] | str | None, exclude: Iterable[str] | str
) -> list[str]:
    """The names that `include` has (None: all) and `exclude` has not; both hold names or patterns such as "read_*".

    Raises:
        ValueError: a pattern fits no name, or nothing is left; the message begins with `owner`.
    """
    included = _names_by_pattern(known, "*" if include is None else include)
    excluded = _names_by_pattern(known, exclude)
    unknown = [pattern for pattern, names in [*included.items(), *excluded.items()] if not names]
    chosen = set().union(*included.values()).difference(*excluded.values())
    if unknown or not chosen:
        problem = f"{unknown} fits none of" if unknown else "nothing is left of"
        raise ValueError(f"{owner}: include={include!r}, exclude={exclude!r}: {problem} {known}. Correct it.")
    return [name for name in known if name in chosen]


def _names_by_pattern(known: list[str], patterns: Iterable[str] | str) -> dict[str, list[str]]:
    """Pattern -> the known names that it fits; a text alone is one pattern."""
    if isinstance(patterns, str):
        patterns = [patterns]
    return {pattern: fnmatch.filter(known, pattern) for pattern in patterns}
