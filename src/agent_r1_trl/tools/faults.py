"""Whose fault the exception of a tool is: the model's, the tool's own, or that of the infrastructure behind the tool.

The policy is charged for what the tool's author declared as the model's, and for nothing else: by `ReportedError`, by
`user_errors`, by a text that a tool of another library hands to the model. An author who declares no `user_errors`
goes by the convention of Python: a `ValueError` is about a value that the function was given.

No library is imported to recognise its errors: lost connections and timeouts are known by the names of their classes,
which the clients of HTTP, databases and RPC choose alike, and by the status codes that they carry.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.tools.calls import values_of
from agent_r1_trl.trajectory import ToolFault


class InfrastructureError(RunError):
    """A tool or an environment could not do its work, and the model has no part in that.

    Raise it anywhere below a tool, `step` or a reward method. A tool's call may be repeated (`Tool(attempts=)`); if it
    still fails, the trajectory ends with `tool_failure`, neither in the baseline nor in the loss.
    """


class ReportedError(Exception):
    """The model's call failed by the model's own doing, and the text is all that it should read about that.

    Its own traceback, for example, from the tool that runs its code.
    """


class HandledError(Exception):
    """A tool of another library failed, and the text is what its author lets the model read about that.

    `__cause__` is what the tool raised, where that is known.
    """


class ServerError(HandledError):
    """A server failed in a call, and its text, which the model reads, is no judgement of the arguments."""


OVERLOADED_OR_GONE = (429, 502, 503, 504)
"""Status codes of HTTP with which a server says that it cannot answer now."""
_NOT_THE_REQUESTS = (401, 402, 407, 408, 429)
"""Refusals that have other reasons than what was asked for: keys, payment, haste."""
_GRPC_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_CONNECTION_NAMES = re.compile(
    "Timeout|TimedOut|Connect|Disconnect|Network|Transport|Unavailable|ProtocolError|ClientPayload|ChunkedEncoding"
    "|IncompleteRead|BadStatusLine|gaierror|herror|SSLError|MaxRetry|RateLimit"
)
_OTHER_NAMES = ("UnsupportedProtocol", "LocalProtocolError", "TimeoutExpired")
"""Classes with such a name, or such a base class, that report a wrong address or a program that ran too long."""
_CONNECTION_NUMBERS = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETRESET)

_THREAD_ERRORS = {
    "ValueError": re.compile(
        "(signal|set_wakeup_fd) only works in main thread"
        "|The future belongs to a different loop|loop argument must agree with"
    ),
    "ProgrammingError": re.compile("SQLite objects created in a thread can only be used in that same thread"),
    "RuntimeError": re.compile(
        r"There is no current event loop|no running event loop$|main thread is not in main loop$"
        r"|[Tt]his event loop is already running|Cannot run the event loop while another loop is running"
        r"|(asyncio\.run|Runner\.run)\(\) cannot be called from a running event loop"
        r"|Event loop is closed|Event loop stopped before Future completed"
        r"|(Task|Future|<).*attached to a different loop\Z|<.*is bound to a different event loop\Z"
        r"|Non-thread-safe operation invoked on an event loop|Timeout (context manager )?should be used inside a task"
        r"|Attempted to exit (a )?cancel scope",
        re.DOTALL,
    ),
    "error": re.compile("[Cc]annot switch to a different thread"),  # greenlet's, and so Playwright's
}
"""How the texts of code begin that runs in another thread, or on another event loop, than it was written for."""
_CLOSED = (
    r"(cannot perform operation: |cannot call .*: )?(the |this )?(underlying )?"
    r"(connection|cursor|pool|session|prepared statement) (is|was|has been|already) (clos(ed|ing)|released back)"
)
_OUT_OF_USE = {
    "InterfaceError": re.compile(
        f"cannot perform operation: another operation is in progress|{_CLOSED}", re.IGNORECASE
    ),
    "OperationalError": re.compile(f".*another command is already in progress|{_CLOSED}", re.IGNORECASE),
    "ProgrammingError": re.compile(
        "Cannot operate on a closed (database|cursor|connection)|" + _CLOSED, re.IGNORECASE
    ),
    "InvalidRequestError": re.compile(".* is already in progress|" + _CLOSED, re.IGNORECASE),
    "InvalidOperation": re.compile("Cannot use .* after close"),
    "ConnectionError": re.compile(r"Connection closed by server\.?\Z"),  # Redis's
    "ClientConnectionError": re.compile("Connector is closed"),
    "RuntimeError": re.compile(
        r"Cannot send a request, as the client has been closed|(Session|Connector) is closed\.?\Z"
        r"|\w+\(\) called while another coroutine is already waiting for incoming data"
        r"|Concurrent call to \w+\(\) is not allowed|cannot schedule new futures after"
    ),
    "ValueError": re.compile(
        r"I/O operation on closed|\w+ (of|to|on) closed file|Cannot invoke RPC.* on closed channel|Pool not running$"
        r"|(no active connection|Connection closed)\Z"
    ),
    "UsageError": re.compile("Channel is closed"),
}
"""How the texts begin of a client that was closed, or is used by two calls at once. Those of Python's own classes are
exact: a tool may let the model close something, and say so."""
_OUT_OF_USE_NAMES = ("ClosedPoolError", "PoolClosed", "ClosedResourceError", "ResourceClosedError", "ConcurrencyError")

_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_ABOUT_ARGUMENTS = (
    ValueError, LookupError, ArithmeticError, AssertionError, SyntaxError, RecursionError, re.error, *_FILE_ERRORS,
)  # fmt: skip
"""Exceptions that functions raise by convention for bad arguments."""
_DECLARATIONS = {
    "langchain_core": "ToolException", "mcp": "ToolError", "fastmcp": "ToolError", "pydantic_ai": "ModelRetry",
}  # fmt: skip
"""Classes with which authors of other libraries' tools tell the model what was wrong, by the library's name."""
_TOOLS_OWN = (OSError, NameError, AttributeError, ImportError, NotImplementedError, MemoryError)
"""Exceptions for other reasons than wrong arguments: missing resources and mistakes in the code."""
_MOST_CHARGED = (ToolFault.MODEL, ToolFault.ARGUMENTS, ToolFault.UNKNOWN, ToolFault.TOOL)


def fault_of(
    error: BaseException, user_errors: tuple[type[BaseException], ...] | None, arguments: Mapping[str, Any]
) -> ToolFault:
    """Whose fault an exception of a tool is.

    Args:
        error: what the tool raised.
        user_errors: the exceptions that its author declares as the model's; None: those of Python's convention.
        arguments: of the call.
    """
    if isinstance(error, (ReportedError, *(user_errors or ()))):
        return ToolFault.MODEL
    if isinstance(error, BaseExceptionGroup):
        faults = [fault_of(item, user_errors, arguments) for item in error.exceptions]
        return max(faults, key=_MOST_CHARGED.index)
    if isinstance(error, HandledError) and isinstance(error.__cause__, user_errors or ()):
        return ToolFault.MODEL
    found = _fault_by_convention(error, arguments)
    return ToolFault.UNKNOWN if found is ToolFault.ARGUMENTS and user_errors is not None else found


def _fault_by_convention(error: BaseException, arguments: Mapping[str, Any]) -> ToolFault:
    """Whose fault an exception is that nobody has declared."""
    if any(map(is_lost_connection, _with_causes(error))):
        return ToolFault.TOOL
    if isinstance(error, ServerError):
        return ToolFault.UNKNOWN
    is_told = isinstance(error, HandledError) or _is_declaration(error) or _is_refusal(error)
    if is_told or _is_from_evaluated_code(error, arguments):
        return ToolFault.ARGUMENTS
    if _is_of_the_tools_setup(error):
        return ToolFault.TOOL
    if isinstance(error, _FILE_ERRORS) and not _names_a_file(error, arguments):
        return ToolFault.UNKNOWN if error.filename is None else ToolFault.TOOL
    if isinstance(error, _ABOUT_ARGUMENTS):
        return ToolFault.ARGUMENTS if _is_about(error, arguments) else ToolFault.UNKNOWN
    return ToolFault.TOOL if isinstance(error, _TOOLS_OWN) else ToolFault.UNKNOWN


def is_infrastructure_error(
    error: BaseException, *, has_backend: bool, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether an error, or one that led to it, says that the infrastructure failed.

    Lost connections and timeouts do if the tool declares that it needs a back end. `arguments`: of a tool's call.
    """
    return is_thread_error(error, arguments) or any(
        isinstance(item, InfrastructureError) or (has_backend and is_lost_connection(item))
        for item in _with_causes(error)
    )


def is_thread_error(error: BaseException, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether code failed because it runs on another thread, or event loop, than it was written for."""
    return _has_text(error, _THREAD_ERRORS, arguments)


def is_out_of_use(error: BaseException, arguments: Mapping[str, Any]) -> bool:
    """Whether a client of the tool's was closed, or is used by another call at the same time."""
    return _has_text(error, _OUT_OF_USE, arguments, _OUT_OF_USE_NAMES)


def _has_text(
    error: BaseException,
    texts: Mapping[str, re.Pattern[str]],
    arguments: Mapping[str, Any] | None,
    names: tuple[str, ...] = (),
) -> bool:
    """Whether an error, or one that led to it, has one of these texts, by class, or one of these classes.

    An error of the model's own code is its own, and so is one whose text the model wrote.
    """
    if _is_from_evaluated_code(error, arguments or {}):
        return False
    for item in _with_causes(error):
        classes = [base.__name__ for base in type(item).__mro__]
        if any(name in names for name in classes):
            return True
        text = _text_of(item)
        is_known = any(name in texts and texts[name].match(text) for name in classes)
        if is_known and not any(text in value for value in values_of(arguments)):
            return True
    return False


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error is a lost or refused connection, a timeout, or an answer such as 503, of any library."""
    names = [base.__name__ for base in type(error).__mro__]
    if any(name in _OTHER_NAMES for name in names):
        return False
    reason = _read(error, "reason")  # urllib's URLError
    return (
        any(map(_CONNECTION_NAMES.search, names))
        or _read(error, "errno") in _CONNECTION_NUMBERS
        or _status(error) in (*OVERLOADED_OR_GONE, *_GRPC_CODES)
        or (isinstance(reason, BaseException) and reason is not error and is_lost_connection(reason))
    )


def _text_of(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # of an object that cannot be shown
        return str(error.args[0]) if error.args else ""
    return ""


def _is_declaration(error: BaseException) -> bool:
    """Whether an author raised what a library has for telling the model what was wrong."""
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__)
    return any(_DECLARATIONS.get(library) == name for library, name in bases)


def _is_of_the_tools_setup(error: BaseException) -> bool:
    """Whether the error is about a variable of the environment that is not set."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is type(os.environ).__getitem__.__code__


def _names_a_file(error: OSError, arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments name the file that an error is about; an index that is missing is the tool's own."""
    names = [error.filename, error.filename2] if error.filename is not None else [_text_of(error)]
    about = " ".join(str(name) for name in names if name is not None)
    for text in values_of(arguments):
        word = PurePath(text).name
        if word and re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", about, re.IGNORECASE):
            return True
    return False


def _is_about(error: BaseException, arguments: Mapping[str, Any]) -> bool:
    """Whether the data that an error is about, as far as it holds them, come from the arguments.

    A server's answer that is no JSON is a `ValueError` as well.
    """
    given = values_of(arguments)
    data = _data_of(error)
    texts = [text for value in data for text in values_of(value)]
    if data and not texts:  # an empty answer, or a null in one
        return not given
    return all(_is_in(text, given) for text in texts)


def _is_in(text: str, given: Iterable[str]) -> bool:
    """Whether one of the given texts holds it; blanks are in blanks alone."""
    if not text.strip():
        return any(not value.strip() for value in given)
    return any(text in value for value in given)


def _data_of(error: BaseException) -> list[Any]:
    """The data that an error is about, where it holds any."""
    if isinstance(error, UnicodeError):
        return [_read(error, "object")]  # of a UnicodeDecodeError bytes, which no argument is
    if isinstance(error, SyntaxError):
        if type(error).__module__.startswith("xml."):
            return ["<"]  # it holds nothing of the document: at least there must be one
        is_file = isinstance(error.filename, str) and not error.filename.startswith("<")
        return [str(error.text or error.filename).strip()] if is_file else []
    if isinstance(error, re.error):
        return [error.pattern]
    if isinstance(error, ValueError) and isinstance(_read(error, "doc"), str):  # of JSON
        return [_read(error, "doc")]
    if type(error).__name__ == "ValidationError" and callable(_read(error, "errors")):  # of pydantic
        with contextlib.suppress(Exception):
            return [item["input"] for item in _read(error, "errors")()]
    return []


def _is_refusal(error: BaseException) -> bool:
    """Whether a server refused the request: 404 for an address that the model made up, for example."""
    status = _status(error)
    return isinstance(status, int) and 400 <= status < 500 and status not in _NOT_THE_REQUESTS


def _is_from_evaluated_code(error: BaseException, arguments: Mapping[str, Any]) -> bool:
    """Whether `eval` or `exec` was at work, which run what the model wrote: a NameError is its own then.

    Libraries make functions in the same way (the `__init__` of a dataclass). Of those that are no module, it is one
    that the arguments define.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen"):
            continue
        written = "lambda" if code.co_name == "<lambda>" else f"def {code.co_name}"
        if code.co_name == "<module>" or any(written in value for value in values_of(arguments)):
            return True
    return False


def _status(error: BaseException) -> Any:
    """Status code of HTTP, or the name of gRPC's; None if the error carries none."""
    for owner in (error, _read(error, "response")):
        for name in ("status_code", "status", "code"):
            value = _read(owner, name)
            if callable(value):  # gRPC's
                with contextlib.suppress(Exception):
                    value = value()
            if isinstance(value, int) or _read(value, "name") in _GRPC_CODES:
                return value if isinstance(value, int) else value.name
    return None


def _read(owner: object, name: str) -> Any:
    with contextlib.suppress(Exception):  # a property of a foreign class
        return getattr(owner, name, None)
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those that it was raised from, and the members of groups."""
    waiting, seen = [error], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, BaseExceptionGroup):
            waiting += item.exceptions
        cause = item.__cause__ or (None if item.__suppress_context__ else item.__context__)
        waiting += [cause] if cause is not None else []
