"""The tools of an environment instance: those that its class lists, and its own methods bound to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from agent_r1_trl.tools import Tool, as_tool
from agent_r1_trl.tools.base import takes_self
from agent_r1_trl.tools.foreign import read_foreign


class ToolList:
    """The attribute `tools` of an environment class.

    Reading it from the class gives the list as written. Reading it from an instance gives a list of `Tool`s, with
    methods bound to that instance.
    """

    def __init__(self, declared: Any) -> None:
        self.declared = declared
        if not isinstance(declared, (list, tuple)):
            return
        for item in declared:
            if inspect.isroutine(item) and not takes_self(item):
                as_tool(item)  # says here, and not in the first rollout, what its schema lacks
        # Tools of other libraries are read once, and not for every trajectory.
        self.declared = [as_tool(item) if read_foreign(item) else item for item in declared]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.declared
        state = vars(instance)
        if "_tools" not in state:
            state["_tools"] = resolve_tools(state.get("_declared_tools", self.declared), instance)
        return state["_tools"]

    def __set__(self, instance: Any, value: Any) -> None:
        state = vars(instance)
        state["_declared_tools"] = value
        state.pop("_tools", None)
        state.pop("_executor", None)


def resolve_tools(declared: Any, instance: Any) -> list[Tool]:
    """The listed tools in their order, then the methods of the class that are decorated with `@tool`.

    Raises:
        ValueError: an entry is not a tool, or is a string that names no method.
    """
    if isinstance(declared, (str, bytes)) or not isinstance(declared, Iterable):
        raise ValueError(
            f"{type(instance).__name__}.tools={declared!r:.200}: must be a list of functions, Tools or method names."
        )
    decorated = {
        name: None
        for base in reversed(type(instance).__mro__)
        for name, value in vars(base).items()
        if isinstance(value, Tool)
    }
    found: list[Tool] = []
    for item in [*declared, *decorated]:
        candidate = _bind(item, instance)
        if candidate is not None and all(_function(candidate) is not _function(other) for other in found):
            found.append(candidate)
    return found


def _bind(item: Any, instance: Any) -> Tool | None:
    if isinstance(item, str):
        owner = type(instance).__name__
        if not hasattr(instance, item):
            raise ValueError(f"{owner}.tools names {item!r}, but {owner} has no such method.")
        item = getattr(instance, item)
        if item is None:  # a subclass removes an inherited tool by setting it to None
            return None
    if isinstance(item, staticmethod):
        item = Tool(item)
    if isinstance(item, Tool):
        return item.__get__(instance, type(instance))
    if inspect.isfunction(item) and takes_self(item):
        return Tool(item).bind(instance)
    return as_tool(item)


def _function(candidate: Tool) -> Callable[..., Any]:
    """The function behind a tool: a method and its bound form are the same tool."""
    return getattr(candidate.fn, "__func__", candidate.fn)
