"""The local backends: `limits` (resource limits) and `sandlock` (isolation), behind one fork server per process."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Literal

from agent_r1_trl.features.sandbox.base import Language, SandboxError, SandboxLimits, SandboxResult

MAX_CODE_CHARS = 200_000
START = """\
import sys
sys.path.insert(0, sys.argv[1])
from agent_r1_trl.features.sandbox.supervisor import main
del sys.path[0]
main()
"""
SOURCE = str(Path(__file__).resolve().parents[3])
"""Where this package lies, which need not be the one that is installed."""
CHUNK = 1 << 16
ANSWER_GRACE_S = 30.0
"""Seconds beyond a call's own limits after which a sandbox that has not answered counts as broken."""


class LocalSandbox:
    """Runs code in processes on this machine; they start with the first call.

    Args:
        backend: `"sandlock"`, or `"limits"`.
        limits: what the code may use.
    """

    def __init__(self, backend: Literal["sandlock", "limits"], limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._settings = {"backend": backend, **dataclasses.asdict(self.limits)}
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def run(self, code: str, language: Language = "python") -> SandboxResult:
        """Run one piece of code.

        Raises:
            SandboxError: no sandbox could be started, or it does not answer.
        """
        if len(code) > MAX_CODE_CHARS:
            return SandboxResult(error=f"The code is too long: {len(code)} characters; the limit is {MAX_CODE_CHARS}.")
        with self._lock:
            if self._connection is None:
                self._connection = self._open()
            connection = self._connection
            try:
                request = {"language": language, "code": code.encode("utf-8", errors="replace").decode()}
                connection.sendall(json.dumps(request).encode() + b"\n")
                answer = self._receive(connection, 2 * self.limits.timeout_s + self.limits.start_timeout_s)
            except TimeoutError as error:
                self.close()
                raise SandboxError("the sandbox does not answer; it was closed") from error
            except (OSError, EOFError):
                self.close()
                return SandboxResult(error="The code ended the sandbox.", lost="everything")
            if "fatal" in answer:
                self.close()
                raise SandboxError(f"the sandbox failed: {answer['fatal']}")
        known = {item.name for item in dataclasses.fields(SandboxResult)}
        return SandboxResult(**{name: value for name, value in answer.items() if name in known})

    def close(self) -> None:
        """Kill its processes and remove its directory. A call that is running ends."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _close(connection)

    def _open(self) -> socket.socket:
        connection = _the_server().open(self._settings)
        weakref.finalize(self, _close, connection)
        try:
            answer = self._receive(connection, self.limits.start_timeout_s)
        except (OSError, EOFError) as error:
            _close(connection)
            raise SandboxError(f"the sandbox did not start within {self.limits.start_timeout_s:g} s") from error
        if "fatal" in answer:
            _close(connection)
            raise SandboxError(f"the sandbox did not start: {answer['fatal']}")
        return connection

    @staticmethod
    def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
        connection.settimeout(timeout_s + ANSWER_GRACE_S)
        received = bytearray()
        while not received.endswith(b"\n"):
            data = connection.recv(CHUNK)
            if not data:
                raise EOFError
            received += data
        return json.loads(received)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
    connection.close()


class _ServerProcess:
    """The process that forks the supervisors (see `supervisor.py`), and the socket to it."""

    _base = ""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", START, SOURCE],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8", **kept},
                start_new_session=True,
            )
        self._socket.settimeout(60)
        with contextlib.suppress(OSError, ValueError):
            self._base = json.loads(self._socket.recv(CHUNK))["base"]
            return
        self.close()
        raise SandboxError("the process of the sandboxes did not start; its message is above")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def open(self, settings: dict[str, Any]) -> socket.socket:
        """Our end of a new sandbox's socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [json.dumps(settings).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the process of the sandboxes is gone ({error})") from error
        return ours

    def close(self) -> None:
        """End it, and every sandbox with it."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
            if self._base:
                shutil.rmtree(self._base, ignore_errors=True)  # for one that was killed

    def forget(self) -> None:
        """Let go of it in a forked child, whose parent it serves."""
        self._socket.close()
        self._process.returncode = 0  # else it would be waited for, which only the parent can


_server: _ServerProcess | None = None
_server_lock = threading.Lock()


def _the_server() -> _ServerProcess:
    """This process's server, started on first use and again if it died."""
    global _server
    with _server_lock:
        if _server is None or not _server.is_alive:
            _end_server()
            try:
                _server = _ServerProcess()
            except OSError as error:
                raise SandboxError(f"the process of the sandboxes did not start: {error}") from error
        return _server


def _end_server() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _forget_server() -> None:
    global _server, _server_lock
    _server_lock = threading.Lock()
    server, _server = _server, None
    if server is not None:
        server.forget()


atexit.register(_end_server)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_server)
