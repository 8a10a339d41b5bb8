"""The directory of the process, which a tool may change for all: it is put back, and the tool is named."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)


class DirectoryGuard:
    """Notes which call left another directory behind, and puts the old one back when no other call is running.

    Until then, because a call that is still running may have gone elsewhere for a while and come back itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._home: str | None = None
        self._warned_of: set[str] = set()

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A call of the tool of this name."""
        with self._lock:
            if self._num_running == 0:
                self._home = current_directory()
            self._num_running += 1
        try:
            yield
        finally:
            self._leave(name)

    def _leave(self, name: str) -> None:
        with self._lock:
            self._num_running -= 1
            here = current_directory()
            if self._num_running or self._home is None or here == self._home:
                return
            os.chdir(self._home)
            is_new, self._warned_of = name not in self._warned_of, {*self._warned_of, name}
        if is_new:
            logger.warning(
                "The tool %r, or one that ran beside it, left the process in the directory %s; it was put back to %s. "
                "A directory belongs to the whole process: pass absolute paths, or run programs with "
                "subprocess.run(cwd=...). This is reported once for each tool.",
                name,
                here or "(deleted)",
                self._home,
            )


def current_directory() -> str | None:
    """The process's directory; None if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


guard = DirectoryGuard()
"""The guard of this process."""
