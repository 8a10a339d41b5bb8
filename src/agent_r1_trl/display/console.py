"""The console of all commands: paths and names are printed as they are, never read as markup."""

from __future__ import annotations

import threading
from typing import Any

from rich.console import Console

from agent_r1_trl.safe_text import shown


class PlainConsole(Console):
    """A console without markup and emoji codes, on which control characters are visible and secrets masked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        self.lock = threading.RLock()
        """One text at a time: what stands below it (`live.py`) is drawn with it."""

    def print(self, *items: object, **options: Any) -> None:
        """Print texts and renderables."""
        with self.lock:
            super().print(*[shown(item) if isinstance(item, str) else item for item in items], **options)


def table_console() -> PlainConsole:
    """A console for wide tables: where nobody looks at a terminal, they are not squeezed into 80 columns."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=max(console.width, 150))
