"""The console of all commands: paths and names are printed as they are, never read as markup."""

from __future__ import annotations

import re
import textwrap
import threading
from typing import Any

from rich.console import Console

from agent_r1_trl.safe_text import shown

_LABEL = re.compile(r"[a-z]+( [a-z]+)* {2,}")
"""The beginning of a line that has a name and its value in columns."""
_COMMAND = re.compile(r"agent-r1-trl( [^\s()`]+)+")
_BLANK = "\0"
"""Stands for a blank at which no line ends."""


def folded(text: str, width: int) -> str:
    """A text whose lines end between words, those of a name and its value below the value.

    A command stays in one piece, to be copied; so do lines that begin with blanks, and words that are too long.

    >>> print(folded("time   2 s rollouts, 14 s updates", 20))
    time   2 s rollouts,
           14 s updates
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith("  "):
            lines.append(line)
            continue
        label = _LABEL.match(line)
        indent = label.end() if label is not None and label.end() <= width // 2 else 0
        words = _COMMAND.sub(lambda found: found[0].replace(" ", _BLANK), line[indent:])
        parts = textwrap.wrap(words, max(1, width - indent), break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(parts):
            margin = indent if indent + len(part) <= width else min(indent, 2)
            beginning = " " * margin if number else line[:indent]
            lines.append(beginning + part.replace(_BLANK, " "))
    return "\n".join(lines)


class PlainConsole(Console):
    """A console without markup and emoji codes, on which control characters are visible and secrets masked.

    With `soft_wrap`, texts are whole lines wherever they go but to a terminal, where they are `folded`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        self.lock = threading.RLock()
        """One text at a time: what stands below it (`live.py`) is drawn with it."""

    def print(self, *items: object, **options: Any) -> None:
        """Print texts and renderables."""
        with self.lock:
            super().print(*[self._text(item) if isinstance(item, str) else item for item in items], **options)

    def _text(self, item: str) -> str:
        text = shown(item)
        return folded(text, self.width) if self.soft_wrap and self.is_terminal and self.file.isatty() else text


def table_console() -> PlainConsole:
    """A console for wide tables: where nobody looks at a terminal, they are not squeezed into 80 columns."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=max(console.width, 150))
