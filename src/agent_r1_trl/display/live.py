"""A block of lines at the bottom of a terminal that is drawn anew, and everything else that is printed, above it.

The cursor stays visible on the line below the block, so that a terminal is as it should be whatever ends the process.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

REFRESH_S = 0.5
"""Seconds between two drawings."""


def has_terminal(console: Console) -> bool:
    """Whether lines can be drawn over: in no log of a CI (whatever FORCE_COLOR says), notebook, or dumb terminal."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


class LiveBlock(RenderHook):
    """Lines that are drawn anew, from `start` to `stop`.

    Args:
        console: of the terminal.
        lines: gives them for so many columns and rows, from any thread; each is cut to one row.
    """

    def __init__(self, console: Console, lines: Callable[[int, int], Sequence[Text]]) -> None:
        self._console, self._lines = console, lines
        self._drawn: list[int] = []
        """Lengths of the lines that stand on the screen."""
        self._has_ended = threading.Event()
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Draw the block; what is written to standard output and error stands above it from now on."""
        console = self._console
        console.file = console.file  # itself, not what stands for it from now on
        for name in ("stdout", "stderr"):
            self._redirect(name, getattr(sys, name))
        console.push_render_hook(self)
        self._undo.callback(console.pop_render_hook)
        self._draw()
        thread = threading.Thread(target=self._keep_drawing, name="terminal", daemon=True)
        self._undo.callback(thread.join)
        thread.start()

    def _redirect(self, name: str, stream: TextIO) -> None:
        if not stream.isatty():
            return
        above = _Above(self._console, stream)
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
        for handler in handlers:  # of transformers, for example, which has kept the stream
            if vars(handler).get("stream") is stream:
                handler.setStream(above)
                self._undo.callback(handler.setStream, stream)
        setattr(sys, name, above)
        self._undo.callback(lambda: setattr(sys, name, stream) if getattr(sys, name) is above else None)

    def stop(self, *, is_left: bool = True) -> None:
        """Draw the block once more and leave it there, or take it away; nothing if it has been stopped."""
        if not self._has_ended.is_set():
            self._has_ended.set()
            try:
                for stream in (sys.stdout, sys.stderr):
                    if isinstance(stream, _Above):
                        stream.end()
                if not is_left:
                    self._lines = lambda width, height: ()
                self._draw()
            finally:
                self._undo.close()

    def _keep_drawing(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which is no reason to end a run
            while not self._has_ended.wait(REFRESH_S):
                self._draw()

    def _draw(self) -> None:
        self._console.print(Control(), end="")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put the block behind what is printed, and take the old one away."""
        width, height = self._console.size
        # A window that got narrower has wrapped the old lines.
        num_rows = sum(1 + max(0, length - 1) // width for length in self._drawn)
        erase = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * num_rows
        lines = [line.copy() for line in self._lines(width, height)][1 - height :]
        for line in lines:
            line.truncate(width - 1, overflow="ellipsis")
            line.no_wrap = True
        self._drawn = [line.cell_len for line in lines]
        return [Control(ControlType.CARRIAGE_RETURN, *erase), *renderables, *lines]  # type: ignore[arg-type]


class _Above(io.TextIOBase):
    """Stands for a stream of the terminal, and prints whole lines above the block."""

    def __init__(self, console: Console, stream: TextIO) -> None:
        # Not named `rich_proxied_file`: other consoles of rich would find the stream by it, and write into the block.
        self._console = console
        self._rest = ""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._console.lock:  # type: ignore[attr-defined]
            *lines, self._rest = (self._rest + text).split("\n")
            shown = [Text.from_ansi(line.rstrip("\r").rpartition("\r")[2]) for line in lines]  # \r: of bars
            if shown:
                self._console.print(Text("\n").join(shown))
        return len(text)

    def end(self) -> None:
        """Print the line that has not ended."""
        if self._rest.rpartition("\r")[2]:
            self.write("\n")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._stream.fileno())
