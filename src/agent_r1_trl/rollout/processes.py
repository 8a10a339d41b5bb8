"""Processes that tools and environments start: recognised by a mark in their environment, ended when a run ends early.

A shell's background jobs lose their parent, so they cannot be found as children; but whatever is started during a
rollout inherits the variable `MARK`. Not covered: a process with an environment of its own, and one that was forked
without a new program; both belong to the environment's `close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import uuid
from collections.abc import Iterator

logger = logging.getLogger(__name__)

MARK = "AGENT_R1_TRL_ROLLOUT"
"""Environment variable; its value names the process of the rollout."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_RUN = uuid.uuid4().hex
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _mark() -> str:
    return f"{os.getpid()}-{_RUN}"  # a forked process has a mark of its own


@contextlib.contextmanager
def marked_processes() -> Iterator[None]:
    """Processes that are started while it lasts are found by `end_marked_processes`."""
    before = os.environ.get(MARK)
    os.environ[MARK] = _mark()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before


def end_marked_processes(grace_s: float = GRACE_S) -> int:
    """End what this process's rollouts have started and what is still there: SIGTERM, then SIGKILL after `grace_s`.

    Returns the number of processes that were there.
    """
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == _mark():
                found.append(process)
    for process in found if grace_s else ():
        with contextlib.suppress(psutil.Error):
            process.terminate()
    alive = psutil.wait_procs(found, timeout=grace_s)[1] if grace_s else found
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if found:
        logger.warning("Ended %d processes that tools or environments had left behind.", len(found))
    return len(found)


def die_with_parent(number: int) -> None:
    """Ask for this signal when the process that has started this one ends; on Linux."""
    if _LIBC is not None:  # loaded ahead: between fork and exec nothing may be imported
        _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG
