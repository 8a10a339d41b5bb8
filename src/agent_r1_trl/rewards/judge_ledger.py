"""Verdicts and costs of a judge, in a SQLite file that several processes share, or in memory."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from typing import Any

LOCK_TIMEOUT_S = 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, scores TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), calls INTEGER, cost REAL);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0.0);
"""


class JudgeLedger:
    """Verdicts by the hash of what was asked, and the calls and the cost of all that was ever asked.

    Used from any thread. A call counts from before it is sent, with the most that it can cost; a copy in another
    process (a fork, a pickle) opens the file anew.

    Args:
        path: of the file; None keeps everything in memory, for this object alone.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[type[JudgeLedger], tuple[str | None]]:
        return JudgeLedger, (self.path,)

    def find(self, key: str) -> object:
        """The scores of an earlier answer as the file has them; None if there is none, or no JSON."""
        with self._transaction() as connection:
            row = connection.execute("SELECT scores FROM verdicts WHERE key = ?", (key,)).fetchone()
        with contextlib.suppress(ValueError, TypeError):
            return None if row is None else json.loads(row[0])
        return None

    def keep(self, key: str, scores: Sequence[float]) -> None:
        """Remember an answer."""
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, json.dumps(scores)))

    def reserve(self, cost: float, max_calls: int | None, max_cost: float | None) -> str | None:
        """Count a call that is about to be sent and may cost so much; returns which limit forbids it, if any."""
        with self._transaction() as connection:
            calls, spent = connection.execute("SELECT calls, cost FROM totals").fetchone()
            if max_calls is not None and calls >= max_calls:
                return f"max_calls={max_calls} are made"
            if max_cost is not None and spent + cost > max_cost * (1 + 1e-9):
                return f"max_cost={max_cost:g} leaves no room for a call ({spent:.6g} is spent or in flight)"
            connection.execute("UPDATE totals SET calls = calls + 1, cost = cost + ?", (cost,))
        return None

    def correct(self, difference: float) -> None:
        """Add to the cost what a call has cost more than was reserved (less: negative)."""
        with self._transaction() as connection:
            connection.execute("UPDATE totals SET cost = max(0.0, cost + ?)", (difference,))

    def totals(self) -> tuple[int, float]:
        """Calls and cost so far, those in flight included."""
        with self._transaction() as connection:
            calls, cost = connection.execute("SELECT calls, cost FROM totals").fetchone()
        return calls, cost

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is None or self._pid != os.getpid():
                options: Any = {"timeout": LOCK_TIMEOUT_S, "isolation_level": None, "check_same_thread": False}
                self._connection = sqlite3.connect(self.path or ":memory:", **options)
                self._pid = os.getpid()
                self._connection.executescript(_TABLES)
            with self._connection:  # commits, or undoes what was begun
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
