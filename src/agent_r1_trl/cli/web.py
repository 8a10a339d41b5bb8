"""An application of aiohttp, served until the process is told to end."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from agent_r1_trl.cli.errors import DependencyError
from agent_r1_trl.settings import Number

if TYPE_CHECKING:
    from aiohttp import web


Port = Annotated[int, Number(minimum=0, maximum=65535)]
"""0: a free one."""


def serve_app(app: web.Application, host: str, port: int, on_start: Callable[[str], None], **options: Any) -> None:
    """Serve an application until the process is told to end (SIGINT, SIGTERM).

    `on_start` is told the URL, with the port that a port of 0 became; `options` are those of aiohttp's `run_app`.

    Raises:
        DependencyError: the address is taken, or not this machine's.
    """
    from aiohttp import web

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen there ({error.strerror or error})"
        raise DependencyError(f"--host {host} --port {port}: {problem}. {_fix_of(error, host)}.") from error
    on_start(f"http://{host}:{listening.getsockname()[1]}")
    web.run_app(app, sock=listening, print=None, access_log=None, backlog=1024, **options)


def _fix_of(error: OSError, host: str) -> str:
    """What to pass instead of an address on which no server can listen."""
    try:
        socket.getaddrinfo(host, None)
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
    except OSError:  # no such name
        is_elsewhere = True
    if is_elsewhere:
        return "Pass --host 127.0.0.1, or another address of this machine"
    if isinstance(error, PermissionError):
        return "Pass a --port from 1024 on, or 0 for a free one"
    return "Pass another --port, or 0 for a free one"
