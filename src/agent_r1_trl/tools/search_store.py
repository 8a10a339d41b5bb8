"""The file behind `SearchIndex`: passages in a full-text table of sqlite (FTS5), which Python brings along.

The file is built once, under a temporary name, and moved to its path in one step, so processes that build the same
index at the same time never see half of it. Afterwards it is only read, from any thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = tuple[str, str, str]
"""id, title, text"""

TOKENIZER = "porter unicode61 remove_diacritics 2"
FREQUENT_SHARE = 0.2
MIN_ROWS_FOR_FREQUENT_WORDS = 5000


BUILD_CACHE_KIB = 64 * 1024
"""Memory of sqlite while it builds; more passages take more time and disk, not more memory."""


class DamagedIndexError(RuntimeError):
    """The file at the index's path is not an index."""


class SearchStore:
    """A read-only sqlite file; each thread of each process has its own connection.

    Args:
        path: the file that `build` made.
        title_weight: weight of a word found in the title, relative to the text.

    Raises:
        DamagedIndexError: the file is not an index.
    """

    def __init__(self, path: Path, title_weight: float) -> None:
        self.path = path
        self._title_weight = title_weight
        self._local = threading.local()
        self._known_terms: dict[str, bool] = {}
        try:
            self._num_rows = int(self._connection().execute("SELECT count(*) FROM passages_ids").fetchone()[0])
            self._frequent = {word for (word,) in self._connection().execute("SELECT word FROM frequent_words")}
            self.search(["a"], 1)
        except sqlite3.DatabaseError as error:
            raise DamagedIndexError(str(error)) from error

    @classmethod
    def build(cls, path: Path, rows: Iterable[Row]) -> None:
        """Write the index file of `rows`, in memory that does not grow with them.

        Raises:
            ValueError: an id occurs twice.
        """
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.executescript(
                f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{BUILD_CACHE_KIB}; BEGIN;"
                f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='{TOKENIZER}');"
                "CREATE TABLE passages_ids (id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID;"
                "CREATE TABLE passages_by_number (number INTEGER PRIMARY KEY, id TEXT);"
                "CREATE TABLE frequent_words (word TEXT PRIMARY KEY);"
            )
            for number, (identifier, title, text) in enumerate(rows, start=1):
                connection.execute("INSERT INTO passages(rowid, title, text) VALUES (?, ?, ?)", (number, title, text))
                try:
                    connection.execute("INSERT INTO passages_ids VALUES (?, ?)", (identifier, number))
                except sqlite3.IntegrityError as error:
                    raise ValueError(
                        f"row {number - 1}: id={identifier!r} occurs twice; ids must be unique."
                    ) from error
                connection.execute("INSERT INTO passages_by_number VALUES (?, ?)", (number, identifier))
            connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
            connection.executemany(
                "INSERT OR IGNORE INTO frequent_words VALUES (?)",
                ((word,) for word in cls._frequent_words(connection)),
            )
            connection.execute("COMMIT")
            connection.close()
            os.replace(temporary, path)
        finally:
            connection.close()
            temporary.unlink(missing_ok=True)

    @staticmethod
    def _frequent_words(connection: sqlite3.Connection) -> list[str]:
        """Stems found in more than a fifth of a large corpus.

        Such a word hardly changes the ranking, but a search for it has to score every passage that contains it.
        """
        (num_rows,) = connection.execute("SELECT count(*) FROM passages_ids").fetchone()
        if num_rows < MIN_ROWS_FOR_FREQUENT_WORDS:
            return []
        connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, passages, row)")
        found = connection.execute("SELECT term FROM temp.vocabulary WHERE doc > ?", (num_rows * FREQUENT_SHARE,))
        return [word for (word,) in found]

    def search(self, terms: Sequence[str], k: int) -> list[tuple[Row, float]]:
        """The best `k` rows with their BM25 scores (higher is better), best first, ties in the order of the corpus."""
        terms = [term for term in terms if not self._is_frequent(term)] or terms
        # Each term is a quoted string, in which FTS5 knows no operators; quotes cannot occur in a term.
        query = " OR ".join(f'"{term}"' for term in terms)
        # The inner query picks the k rows first: joining before LIMIT would fetch the text of every match.
        found = self._connection().execute(
            "SELECT ids.id, passages.title, passages.text, best.score FROM "
            "(SELECT rowid AS number, bm25(passages, ?, 1.0) AS score FROM passages WHERE passages MATCH ? "
            "ORDER BY score, rowid LIMIT ?) AS best "
            "JOIN passages ON passages.rowid = best.number JOIN passages_by_number AS ids ON ids.number = best.number "
            "ORDER BY best.score, best.number",
            (self._title_weight, query, k),
        )
        return [((identifier, title, text), -score) for identifier, title, text, score in found]

    def _is_frequent(self, term: str) -> bool:
        if not self._frequent:
            return False
        if term not in self._known_terms:
            if len(self._known_terms) > 100_000:
                self._known_terms.clear()
            self._known_terms[term] = bool(self._frequent & set(self._stems(term)))
        return self._known_terms[term]

    def _stems(self, term: str) -> list[str]:
        """What the index's tokenizer makes of a word: sqlite offers no function for it, so the word is indexed."""
        with contextlib.closing(sqlite3.connect(":memory:")) as memory:
            memory.execute(f"CREATE VIRTUAL TABLE word USING fts5(text, tokenize='{TOKENIZER}')")
            memory.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(word, row)")
            memory.execute("INSERT INTO word VALUES (?)", (term,))
            return [stem for (stem,) in memory.execute("SELECT term FROM stems")]

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these places in the corpus, the first being 0, in the order asked for."""
        marks = ",".join("?" * len(numbers))
        found = self._connection().execute(
            "SELECT passages.rowid - 1, ids.id, passages.title, passages.text FROM passages "
            f"JOIN passages_by_number AS ids ON ids.number = passages.rowid WHERE passages.rowid IN ({marks})",
            [number + 1 for number in numbers],
        )
        rows = {number: (identifier, title, text) for number, identifier, title, text in found}
        return [rows[number] for number in numbers]

    def get(self, identifier: str) -> Row | None:
        """The row with this id, or None."""
        row = self._connection().execute(
            "SELECT ids.id, passages.title, passages.text FROM passages_ids AS ids "
            "JOIN passages ON passages.rowid = ids.number WHERE ids.id = ?",
            (identifier,),
        )
        return row.fetchone()

    def __len__(self) -> int:
        return self._num_rows

    def _connection(self) -> sqlite3.Connection:
        # A connection must be used neither by two threads at once nor on both sides of a fork.
        owner, connection = getattr(self._local, "owned", (None, None))
        if owner != os.getpid() or connection is None:
            connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._local.owned = (os.getpid(), connection)
        return connection
