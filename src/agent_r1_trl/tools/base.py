"""`Tool` and the decorator `@tool`: functions that a model may call.

    @tool
    def search(query: str) -> str:
        \"\"\"Search the corpus.

Args:
            query: What to look for.
        \"\"\"

`search("Oslo")` still calls the function; `search.schema` is what the chat template shows to the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from agent_r1_trl.settings import Count, NotNegative, Rule, Seconds, check_value
from agent_r1_trl.tools.foreign import read_foreign
from agent_r1_trl.tools.json_schema import Schema, describe_signature
from agent_r1_trl.tools.pool import DaemonThreadPool
from agent_r1_trl.tools.render import render_result
from agent_r1_trl.tools.schema import Interface, check_fit, read_schema
from agent_r1_trl.tools.signature import check_name, function_name, unwrap_partial

DEFAULT_MAX_RESULT_CHARS = 20_000
DEFAULT_ATTEMPTS = 3
_ERRORS = Rule(
    "exception classes, as in (KeyError,)",
    lambda value: all(isinstance(item, type) and issubclass(item, BaseException) for item in value),
)


class Tool:
    """A function with the name, schema and limits under which a model may call it.

    Args:
        fn: plain or async function or method, or a tool of another library. Plain functions run on a thread, async
            ones on the rollout's event loop, so an async tool must not block.
        name: name of the tool, by default the function's own.
        description: description of the tool, by default the first part of the docstring.
        timeout_s: maximum seconds per call; None for the executor's limit.
        max_result_chars: maximum length of a result in characters; a note replaces the rest.
        sequential: True if the calls of one turn to this and to the other sequential tools run one after another, in
            their order. None for the default: True for methods of an environment or of any other object, whose state
            they may change.
        schema: schema in the form of OpenAI, MCP or Anthropic, instead of the one made from hints and docstring. The
            function then receives the JSON values as they are, whatever its hints say.
        render: function that turns the return value into the text that the model reads.
        backend: True for a tool that needs a server of its author's choice. Its timeouts, lost connections and answers
            such as 503 are then the infrastructure's fault, not the model's. `backend = True` on the function, or on
            the class whose method the tool is, says the same.
        attempts: how often a call is made that fails by the infrastructure's fault, unless it was given up. None for
            the default: 1 for sequential tools, since a call may have changed the state before it failed, else 3.
        retry_wait_s: seconds before the second attempt; each further wait is twice as long.
        user_errors: exceptions with which the tool answers wrong arguments: the policy is charged for these, for no
            others, and they never count as a sign of an outage. `TimeoutError` declares calls that take too long as
            well. None for Python's convention (docs/tools.md, Who is charged).

    Raises:
        ToolSchemaError: the function's hints or docstring are incomplete, `schema` does not fit the function, or `fn`
            has no usable name; the message names the fix.
        ValueError: `fn` is no function, or an argument is out of range.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        max_result_chars: int | None = DEFAULT_MAX_RESULT_CHARS,
        sequential: bool | None = None,
        schema: Schema | None = None,
        render: Callable[[Any], str] | None = None,
        backend: bool = False,
        attempts: int | None = None,
        retry_wait_s: float = 0.5,
        user_errors: Iterable[type[BaseException]] | None = None,
    ) -> None:
        self._is_static = isinstance(fn, staticmethod)
        fn = fn.__func__ if isinstance(fn, staticmethod) else fn
        found = read_foreign(fn)
        if found is not None:
            backend = backend or _declares_backend(fn)
            fn, schema = found[0], schema or found[1]
        if not callable(fn) or inspect.isclass(fn):
            raise ValueError(f"tools: {_named(fn)} is no tool: {_instead(fn)}.")
        if inspect.isgeneratorfunction(unwrap_partial(fn)) or inspect.isasyncgenfunction(unwrap_partial(fn)):
            raise ValueError(f"Tool {function_name(fn)!r} yields: return the whole result, for example as a list.")
        if schema is not None:
            schema = read_schema(schema, name)
            check_fit(fn, schema)
            name = schema["function"]["name"]
        errors: Any = (user_errors,) if isinstance(user_errors, type) else user_errors
        errors = None if errors is None else tuple(errors)
        for setting, value, rule in (
            ("max_result_chars", max_result_chars, Count | None),
            ("attempts", attempts, Count | None),
            ("timeout_s", timeout_s, Seconds | None),
            ("retry_wait_s", retry_wait_s, NotNegative),
            ("user_errors", errors or (), Annotated[tuple, _ERRORS]),
        ):
            check_value(setting, value, rule)
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.name = check_name(name or function_name(fn))
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self.sequential = True if sequential is None and self.owner is not None else sequential
        self.render = render or render_result
        self.backend = backend or _declares_backend(fn)
        self.attempts = attempts
        self.retry_wait_s = retry_wait_s
        self.user_errors: tuple[type[BaseException], ...] | None = errors
        self.place: DaemonThreadPool | None = None  # in which its calls run, in place of the executor's
        self._interface = _interface_of(fn, self.name, description, schema)

    # ---------------------------------------------------------------- as a function

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function itself, without checks or limits."""
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """Bind a tool that was defined in a class body to the instance from which it is read."""
        return self.bind(instance) if instance is not None and self.is_method else self

    @property
    def is_method(self) -> bool:
        """Whether the function is a method that is not yet bound to an instance."""
        return not self._is_static and takes_self(self.fn)

    @property
    def owner(self) -> Any:
        """The object to which the function is bound, whose state it may change; None for a class or a module."""
        owner = getattr(unwrap_partial(self.fn), "__self__", None)
        return None if isinstance(owner, (type, types.ModuleType)) else owner

    @property
    def is_async(self) -> bool:
        """Whether the function is awaited on the event loop."""
        return is_async_callable(self.fn)

    @property
    def max_attempts(self) -> int:
        """How often a call is made at most."""
        return self.attempts or (1 if self.sequential else DEFAULT_ATTEMPTS)

    def bind(self, instance: object) -> Tool:
        """This tool with `self` filled in."""
        bound = copy.copy(self)
        bound.fn = self.fn.__get__(instance)  # type: ignore[attr-defined]
        bound.backend = self.backend or _declares_backend(bound.fn)
        if bound.sequential is None:
            bound.sequential = True
        return bound

    def close(self) -> None:
        """Free what the tool took for one trajectory; called when that ends. By default there is nothing."""

    # ---------------------------------------------------------------- as the model sees it

    @property
    def schema(self) -> Schema:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`, made on first use."""
        return self._interface.schema

    @property
    def description(self) -> str:
        """The description that the model reads."""
        return self.schema["function"].get("description") or ""

    @property
    def signature(self) -> str:
        """The tool's signature in one line, such as `search(query: string, top_k?: integer)`."""
        return describe_signature(self.schema["function"])

    def check_arguments(self, arguments: object) -> tuple[dict[str, Any], list[str]]:
        """Arguments as the function receives them, and a list of the problems with them; see `Interface.read`."""
        return self._interface.read(arguments)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"


def tool(fn: Any = None, **settings: Any) -> Any:
    """Make a function a tool: `@tool`, or `@tool(timeout_s=5, max_result_chars=1000)`; settings as in `Tool`.

    A tool of another library takes settings as well: `tool(backend=True)(their_tool)`.
    """
    if fn is None:
        return functools.partial(tool, **settings)
    if isinstance(fn, Tool):
        raise ValueError(f"Tool {fn.name!r} is decorated twice: keep one @tool.")
    return Tool(fn, **settings)


def as_tool(obj: Any) -> Tool:
    """Make a callable, or a tool of another library (`foreign.py`), a `Tool`; a `Tool` is returned as it is."""
    return obj if isinstance(obj, Tool) else Tool(obj)


def shown_tool(item: object) -> Tool:
    """The schema of a tool for a model: as `as_tool`, or of a schema (a dict) that an environment's own `step` reads.

    Raises:
        ToolSchemaError: a schema is incomplete.
        ValueError: it is no tool.
    """
    return Tool(_not_called, schema=dict(item)) if isinstance(item, Mapping) else as_tool(item)


def _not_called(**arguments: object) -> None:
    raise TypeError("This tool is a schema alone: the environment's step runs its calls.")


def check_tool_list(value: object, owner: str) -> Iterable[Any]:
    """Check that the tools of an environment are a list, and return it.

    Raises:
        ValueError: they are one tool, text, or no list of another kind.
    """
    is_one = isinstance(value, Tool) or inspect.isroutine(value) or read_foreign(value) is not None
    if isinstance(value, Iterable) and not is_one and not isinstance(value, (str, bytes, Mapping)):
        return value
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    fix = f" Write [{name}], also for a single one." if is_one else ""
    raise ValueError(f"{owner}.tools={value!r:.100}: must be a list of functions, Tools or method names.{fix}")


def _named(obj: object) -> str:
    """An object that is no tool, in a few words: some of other libraries print pages."""
    name = getattr(obj, "name", None)
    if isinstance(name, str) and not inspect.isclass(obj):
        kind = type(obj)
        return f"{name[:100]!r}, a {kind.__name__} of {kind.__module__.partition('.')[0]},"
    return f"{obj!r:.200}"


def _instead(obj: object) -> str:
    """Advice on what to list in place of an object that is no tool."""
    if isinstance(getattr(obj, "name", None), str):
        return (
            "list the plain function that it was made of (below a decorator, def it without), or describe a function "
            "with Tool(fn, schema=...)"
        )
    return "pass a function with hints and a docstring, or Tool(fn, schema=...)"


def _declares_backend(fn: object) -> bool:
    """Whether a function, its class or the object that it belongs to has `backend = True`."""
    owners = (unwrap_partial(fn), getattr(fn, "__self__", None))
    return any(getattr(owner, "backend", None) is True for owner in owners)


def takes_self(fn: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function is `self`."""
    return inspect.isfunction(fn) and next(iter(inspect.signature(fn).parameters), None) == "self"


def is_async_callable(fn: object) -> bool:
    """Whether calling `fn`, which may be a partial or a callable object, returns a coroutine."""
    fn = unwrap_partial(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))  # noqa: B004


_interfaces: weakref.WeakKeyDictionary[Any, dict[Any, Interface]] = weakref.WeakKeyDictionary()


def _interface_of(fn: Any, name: str, description: str | None, schema: Schema | None) -> Interface:
    """The interface of a function, read once for all Tools of it, because each trajectory makes an environment."""
    target = fn.__func__ if inspect.ismethod(fn) else fn
    if schema is not None or not inspect.isfunction(target):
        return Interface(fn, name, description, schema)
    known = _interfaces.setdefault(target, {})
    if (name, description) not in known:
        known[name, description] = Interface(fn, name, description)
    return known[name, description]
