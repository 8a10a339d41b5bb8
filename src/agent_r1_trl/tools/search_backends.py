"""The two stores behind `SearchIndex`: sqlite FTS5 (standard library, on disk) and tantivy (an extra, faster).

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

A store is built once, in a temporary place, and moved to its path in one step, so processes that build the same index
at the same time cannot see half of it. Afterwards it is only read, from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

Row = tuple[str, str, str]
"""id, title, text"""


TOKENIZER = "porter unicode61 remove_diacritics 2"
FREQUENT_SHARE = 0.2
MIN_ROWS_FOR_FREQUENT_WORDS = 5000


class DamagedIndexError(RuntimeError):
    """What lies at the index's path is no index."""


class Store(Protocol):
    """What `SearchIndex` needs of a back end."""

    def search(self, terms: Sequence[str], k: int) -> list[tuple[Row, float]]:
        """The best `k` rows with their scores (higher is better), best first."""
        ...

    def get(self, identifier: str) -> Row | None:
        """The row with this id."""
        ...

    def __len__(self) -> int: ...


class FTS5Store:
    """A read-only sqlite file; each thread of each process has its own connection.

    Args:
        path: of the file that `build` made.
        title_weight: how much more a word in the title counts than one in the text.
    """

    suffix = ".sqlite"

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
        """Write the index file of `rows`."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.executescript(
                "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN;"
                f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='{TOKENIZER}');"
                "CREATE TABLE passages_ids (id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID;"
                "CREATE TABLE passages_by_number (number INTEGER PRIMARY KEY, id TEXT);"
                "CREATE TABLE frequent_words (word TEXT PRIMARY KEY);"
            )
            for number, (identifier, title, text) in enumerate(rows, start=1):
                connection.execute("INSERT INTO passages(rowid, title, text) VALUES (?, ?, ?)", (number, title, text))
                connection.execute("INSERT INTO passages_ids VALUES (?, ?)", (identifier, number))
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
        """Stems in more than a fifth of many passages: they decide little, and cost a score for each of these."""
        (num_rows,) = connection.execute("SELECT count(*) FROM passages_ids").fetchone()
        if num_rows < MIN_ROWS_FOR_FREQUENT_WORDS:
            return []
        connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, passages, row)")
        found = connection.execute("SELECT term FROM temp.vocabulary WHERE doc > ?", (num_rows * FREQUENT_SHARE,))
        return [word for (word,) in found]

    def search(self, terms: Sequence[str], k: int) -> list[tuple[Row, float]]:
        """The best `k` rows with their scores, ties in the order of the corpus."""
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
        """What the index's own tokenizer makes of a word: only sqlite knows, so it indexes the word in memory."""
        with contextlib.closing(sqlite3.connect(":memory:")) as memory:
            memory.execute(f"CREATE VIRTUAL TABLE word USING fts5(text, tokenize='{TOKENIZER}')")
            memory.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(word, row)")
            memory.execute("INSERT INTO word VALUES (?)", (term,))
            return [stem for (stem,) in memory.execute("SELECT term FROM stems")]

    def get(self, identifier: str) -> Row | None:
        """The row with this id."""
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


class TantivyStore:
    """A tantivy index folder; the searcher is safe to share between threads."""

    suffix = ".tantivy"

    def __init__(self, path: Path, title_weight: float) -> None:
        tantivy = import_tantivy()
        self.path = path
        self._title_weight = title_weight
        self._tantivy = tantivy
        self._schema = _tantivy_schema(tantivy)
        self._analyzer = _tantivy_analyzer(tantivy)
        try:
            self._index = tantivy.Index.open(str(path))
        except (ValueError, OSError) as error:
            raise DamagedIndexError(str(error)) from error
        self._index.register_tokenizer("words", _tantivy_analyzer(tantivy))
        self._searcher = self._index.searcher()

    @classmethod
    def build(cls, path: Path, rows: Iterable[Row]) -> None:
        """Write the index folder of `rows`."""
        tantivy = import_tantivy()
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        temporary.mkdir(parents=True)
        try:
            index = tantivy.Index(_tantivy_schema(tantivy), path=str(temporary))
            index.register_tokenizer("words", _tantivy_analyzer(tantivy))
            # One thread keeps documents in order, so ties are broken the same way every time.
            writer = index.writer(64_000_000, 1)
            for identifier, title, text in rows:
                writer.add_document(tantivy.Document(id=identifier, title=title, text=text))
            writer.commit()
            writer.wait_merging_threads()
            try:
                os.replace(temporary, path)
            except OSError:
                if not path.exists():  # otherwise another process was faster with the same content
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def search(self, terms: Sequence[str], k: int) -> list[tuple[Row, float]]:
        """The best `k` rows with their scores, ties in the order of the corpus."""
        query, occur = self._tantivy.Query, self._tantivy.Occur
        parts = []
        for term in terms:
            for word in self._analyzer.analyze(term):
                title = query.boost_query(query.term_query(self._schema, "title", word), self._title_weight)
                parts.append((occur.Should, title))
                parts.append((occur.Should, query.term_query(self._schema, "text", word)))
        if not parts:
            return []
        hits = self._searcher.search(query.boolean_query(parts), k).hits
        return [(self._row(address), score) for score, address in hits]

    def get(self, identifier: str) -> Row | None:
        """The row with this id."""
        found = self._searcher.search(self._tantivy.Query.term_query(self._schema, "id", identifier), 1).hits
        return self._row(found[0][1]) if found else None

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def _row(self, address: Any) -> Row:
        document = self._searcher.doc(address)
        return document.get_first("id"), document.get_first("title"), document.get_first("text")


def import_tantivy() -> Any:
    """The tantivy module.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import tantivy
    except ImportError as error:
        raise ValueError(
            'backend="tantivy": the package tantivy is not installed. Run: pip install "agent-r1-trl[search]", or use '
            'backend="fts5".'
        ) from error
    return tantivy


def _tantivy_schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("title", stored=True, tokenizer_name="words")
    builder.add_text_field("text", stored=True, tokenizer_name="words")
    return builder.build()


def _tantivy_analyzer(tantivy: Any) -> Any:
    return (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        .filter(tantivy.Filter.lowercase())
        .filter(tantivy.Filter.ascii_fold())
        .filter(tantivy.Filter.stemmer("english"))
        .build()
    )


STORES: dict[str, type[FTS5Store] | type[TantivyStore]] = {"fts5": FTS5Store, "tantivy": TantivyStore}


def encode_row(row: Row) -> bytes:
    """Bytes of a row for the content hash; no two rows share them."""
    return json.dumps(row, ensure_ascii=True).encode()
