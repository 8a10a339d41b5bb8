"""The file `servers.urls_file`: the URLs of a run's servers, read again at each weight sync.

    http://10.0.0.5:8000
    http://10.0.0.6:8000   # a comment

So a server may join a run, or leave it, while it goes on. Covered here: what the file says. Not covered: what becomes
of a server that joined or left (`fleet.py`), and what it must be able to do (`server.py`).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.server_routes import check_urls

logger = logging.getLogger(__name__)

_POLL_S = 0.5


class ServerFile:
    """A file with one URL a line."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._said = ""

    @property
    def setting(self) -> str:
        """The setting that names it, for messages."""
        return f"servers.urls_file={str(self.path)!r}"

    def read(self) -> list[str]:
        """The URLs in it, without what follows a `#`; none if there is no such file yet.

        Raises:
            ValueError: it cannot be read, a line is no URL, or two lines are the same.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.setting} cannot be read ({error}). Write one URL a line into it.") from error
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        urls = [line for line in lines if line]
        return check_urls(urls, setting=f"{self.setting} says {urls}") if urls else []

    def wait(self, timeout_s: float) -> list[str]:
        """The URLs, as soon as there is one.

        Raises:
            GenerationError: there is none within `timeout_s`.
            ValueError: see `read`.
        """
        deadline = time.monotonic() + timeout_s
        while not (urls := self.read()):
            if time.monotonic() > deadline:
                raise GenerationError(
                    f"{self.setting} names no server within {timeout_s:g} s. Start the servers and write one URL a "
                    "line into that file (docs/serving.md), or raise vllm_server_timeout."
                )
            self.say_once(f"Waiting up to {timeout_s:g} s until {self.path} names a server, one URL a line.")
            time.sleep(_POLL_S)
        return urls

    def say_once(self, message: str) -> None:
        """Log a warning, unless it is the last one again."""
        if message != self._said:
            logger.warning("%s", message)
        self._said = message
