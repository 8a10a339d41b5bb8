"""The directory of the process, which a tool may change for all: it is put back, and the tool is named."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_running: list[str | None] = []
"""Where the process was when each running call began; the first is where it is put back."""
_named: set[str] = set()


@contextlib.contextmanager
def back_home(name: str) -> Iterator[None]:
    """Put back, after a call of the tool of this name, a directory that was left, if no other call is running.

    A call that is still running may have gone elsewhere for a while and come back itself.
    """
    with _lock:
        _running.append(_running[0] if _running else _current_directory())
    try:
        yield
    finally:
        with _lock:
            home, here = _running.pop(), _current_directory()
            if not _running and home is not None and here != home:
                os.chdir(home)
                _warn_once(name, here, home)


def _current_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _warn_once(name: str, here: str | None, home: str) -> None:
    if name not in _named:
        _named.add(name)
        logger.warning(
            "The tool %r, or one that ran beside it, left the process in the directory %s; it was put back to %s. "
            "A directory belongs to the whole process: pass absolute paths, or run programs with "
            "subprocess.run(cwd=...). This is reported once for each tool.",
            name,
            here or "(deleted)",
            home,
        )
