"""A pseudo-terminal with a screen: what a program has written to it, as a user sees it."""

import os
import pty
import select
import subprocess
import termios

import pyte
from rich.control import Control

from agent_r1_trl.display.console import PlainConsole


class Terminal:
    """A screen of so many columns and rows, and a console on it."""

    def __init__(self, width, height=24, **environment):
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (height, width))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        environment = {"TERM": "xterm-256color", **environment}
        self.console = PlainConsole(file=self.file, width=width, height=height, soft_wrap=True, _environ=environment)

    def start(self, command, **options):
        """A process on this terminal."""
        return subprocess.Popen(command, stdin=self.file, stdout=self.file, stderr=self.file, **options)

    def resize(self, width):
        """The window gets another width."""
        termios.tcsetwinsize(self._master, (self.screen.lines, width))
        self.screen.resize(columns=width)
        self.console.width = width

    def draw(self):
        """Have the block drawn."""
        self.console.print(Control(), end="")
        return self.lines()

    def lines(self):
        """What has been written so far, without the empty lines at the end."""
        self.file.flush()
        while select.select([self._master], [], [], 0.02)[0]:
            data = os.read(self._master, 65536)
            self.raw += data
            self._stream.feed(data)
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def history(self):
        """The lines that have left the screen at its top."""
        self.lines()
        return list(self.screen.history.top)

    def block(self):
        """The lines of the newest block, from the header of its table on."""
        lines = self.lines()
        first = max((row for row, line in enumerate(lines) if line.lstrip().startswith("step  reward")), default=0)
        return lines[first:]

    def close(self):
        """Give it back."""
        self.file.close()
        os.close(self._master)
