"""Whose fault a failed call is: the model's, the tool's own, or that of the infrastructure behind the tool.

No library is imported to recognise its errors: lost connections and timeouts are known by the names of their classes,
which the clients of HTTP, databases and RPC choose alike, and by the status codes that they carry.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.tools.calls import values_of


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
    "ValueError": re.compile("(signal|set_wakeup_fd) only works in main thread"),
    "ProgrammingError": re.compile("SQLite objects created in a thread can only be used in that same thread"),
    "RuntimeError": re.compile(
        "There is no current event loop in thread|no running event loop$|main thread is not in main loop$"
        r"|Task <.*attached to a different loop\Z",
        re.DOTALL,
    ),
    "error": re.compile("[Cc]annot switch to a different thread"),  # greenlet's, and so Playwright's
}
"""How their texts begin: a model must not be able to write such an error."""

_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_WRONG_ARGUMENTS = (
    ValueError, LookupError, TypeError, ArithmeticError, AssertionError, SyntaxError, RecursionError, *_FILE_ERRORS,
)  # fmt: skip
"""What functions raise that look at their arguments; wrong arguments are one cause of several."""
_TOOLS_OWN = (OSError, NameError, AttributeError, ImportError, NotImplementedError, MemoryError)
"""What is raised for other reasons than wrong arguments: missing resources and mistakes in the code."""


def is_infrastructure_error(error: BaseException, *, has_backend: bool) -> bool:
    """Whether an error, or one that led to it, says that the infrastructure failed.

    Lost connections and timeouts do if the tool declares that it needs a back end.
    """
    return is_thread_error(error) or any(
        isinstance(item, InfrastructureError) or (has_backend and is_lost_connection(item))
        for item in _with_causes(error)
    )


def is_thread_error(error: BaseException) -> bool:
    """Whether code failed because it runs on another thread than it was written for, for example by `signal.alarm`."""
    if _is_from_evaluated_code(error):  # that of the model's code is its own
        return False
    return any(
        name in _THREAD_ERRORS and item.args and _THREAD_ERRORS[name].match(str(item.args[0]))
        for item in _with_causes(error)
        for name in (base.__name__ for base in type(item).__mro__)
    )


def is_models_mistake(
    error: BaseException, user_errors: tuple[type[BaseException], ...], arguments: Mapping[str, Any]
) -> bool | None:
    """True for an error that the tool declares as its callers', False if arguments do not cause it, else None."""
    if isinstance(error, user_errors):
        return True
    if any(map(is_lost_connection, _with_causes(error))) or _is_of_the_tools_own_file(error, arguments):
        return False
    if isinstance(error, _WRONG_ARGUMENTS) or _is_refusal(error) or _is_from_evaluated_code(error):
        return None
    return False if isinstance(error, _TOOLS_OWN) else None


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


def _is_of_the_tools_own_file(error: BaseException, arguments: Mapping[str, Any]) -> bool:
    """Whether the error is about a file of which the arguments say nothing, such as an index that is missing."""
    if not isinstance(error, _FILE_ERRORS) or not isinstance(error.filename, str) or _is_from_evaluated_code(error):
        return False
    words = (PurePath(text).name for text in values_of(arguments))
    return not any(word in error.filename for word in words if word)


def _is_refusal(error: BaseException) -> bool:
    """Whether a server refused the request: 404 for an address that the model made up, for example."""
    status = _status(error)
    return isinstance(status, int) and 400 <= status < 500 and status not in _NOT_THE_REQUESTS


def _is_from_evaluated_code(error: BaseException) -> bool:
    """Whether `eval` or `exec` was at work, which run what the model wrote: a NameError is its own then."""
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("<") and not name.startswith("<frozen") for name in names)


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


def _read(owner: Any, name: str) -> Any:
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
