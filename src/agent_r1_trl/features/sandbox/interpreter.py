"""The interpreter of one sandbox: reads requests (one JSON object per line), runs them, answers.

It runs in the process of the model's code. It is forked from the supervisor, or started from its
source text, so it stands alone. Requests come in on descriptor 0 and answers leave on 1; before any code runs, both
move out of its way, and what the code prints goes to descriptor 2.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

MAX_FRAMES = 6
MAX_ERROR_CHARS = 3000


def serve() -> None:
    """Answer requests until the supervisor closes the pipe."""
    requests = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 40), "rb")
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 40)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    streams = [
        open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
        for number in (1, 2)
    ]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [""]
    own_pid = os.getpid()
    for number, line in enumerate(requests, start=1):
        sys.stdout, sys.stderr = streams
        request = json.loads(line)
        if request["language"] == "ping":
            answer: dict[str, Any] = {}
        elif request["language"] == "shell":
            answer = run_shell(request["code"])
        else:
            answer = run_python(request["code"], main.__dict__, f"<call {number - 1}>", request["max_chars"])
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.flush()
        if os.getpid() != own_pid:  # the code forked, and this is the child
            os._exit(0)
        # The code may have written to this pipe itself: the answer has a line of its own, and the request's id.
        write_all(answers, b"\n" + json.dumps({**answer, "id": request["id"]}).encode() + b"\n")


def run_python(code: str, namespace: dict[str, Any], name: str, max_chars: int) -> dict[str, Any]:
    """Run statements in `namespace`; the value of a last expression is shown, as at a prompt."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return {}
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is None:
            return {}
        namespace["_"] = value
        shown = repr(value)
        return {"value": shown if len(shown) <= max_chars else f"{shown[:max_chars]}... [{len(shown)} characters]"}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return {"error": describe(error)}


def describe(error: BaseException) -> str:
    """A short traceback: the frames of the model's code, without this file's."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        first = next((index for index, frame in enumerate(frames) if frame.filename.startswith("<call ")), len(frames))
        shown = traceback.format_list(frames[first:][-MAX_FRAMES:])
        text = "".join(["Traceback (most recent call last):\n", *shown] if shown else [])
        text = (text + "".join(traceback.format_exception_only(type(error), error))).strip()
    except BaseException:
        text = type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARS else f"[...]{text[-MAX_ERROR_CHARS:]}"


def run_shell(code: str) -> dict[str, Any]:
    """Run a command line with bash (or sh) in the private directory."""
    import shutil  # late: sandlock judges each file that an import opens; saves a sixth of a start
    import subprocess

    shell = shutil.which("bash") or "/bin/sh"
    try:
        ended = subprocess.run([shell, "-c", code], stdin=subprocess.DEVNULL, cwd=os.environ["HOME"])
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return {"error": f"The shell could not be started: {error}"}
    if ended.returncode == 0:
        return {}
    if ended.returncode < 0:
        return {"error": f"killed by signal {-ended.returncode}"}
    return {"error": f"exit code {ended.returncode}"}


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


# -------------------------------------------------------------------- what sandlock lets through

NUMBERS = {"x86_64": (0xC000003E, 16, 72, 41), "aarch64": (0xC00000B7, 29, 25, 198)}
"""Machine -> its name to seccomp, and its numbers of `ioctl`, `fcntl` and `socket`."""
IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; others mark files that can only be read."""
FCNTLS = (*range(8), 9, 36, 37, 38, *range(1027, 1035))
"""Descriptors, locks, pipes; none that takes a lease, watches a folder, signals a process or gives a file a hint."""
SOCKET_FAMILIES = (1,)
"""AF_UNIX, which sandlock judges. TCP Fast Open and Multipath TCP connect without `connect`."""


def seal() -> None:
    """Deny, by a filter of seccomp for this process and all that it starts, what only the arguments of a call decide.

    Raises:
        OSError: the filter cannot be set.
    """
    import ctypes
    import errno
    import platform
    import struct

    deny, allow = 0x00050000, 0x7FFF0000
    machine, ioctl, fcntl_number, socket = NUMBERS[platform.machine()]
    load, is_equal, is_at_least, end = 0x20, 0x15, 0x35, 0x06  # BPF: of a word, two jumps, the verdict
    program = [
        (load, 0, 0, 4),  # the machine
        (is_equal, 1, 0, machine),
        (end, 0, 0, deny | errno.EPERM),
        (load, 0, 0, 0),  # the number of the call
        (is_at_least, 0, 1, 1 << 30),  # x32
        (end, 0, 0, deny | errno.EPERM),
    ]
    for number, place, allowed, error in (
        (ioctl, 24, IOCTLS, errno.ENOTTY),  # the second argument; what programs know of a file that is no device
        (fcntl_number, 24, FCNTLS, errno.EPERM),
        (socket, 16, SOCKET_FAMILIES, errno.EPERM),
    ):
        tests = [(is_equal, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
        part = [(load, 0, 0, place), *tests, (end, 0, 0, deny | error), (end, 0, 0, allow)]
        program += [(is_equal, 0, len(part), number), *part]
    program.append((end, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, ctypes.c_ulong(2), described, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "the filter of system calls cannot be set")


if __name__ == "__main__":  # in sandlock
    seal()
    serve()
