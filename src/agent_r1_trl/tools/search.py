"""Search over a local corpus: an index on disk, and the tool that lets a model search it.

index = SearchIndex("corpus.jsonl")                 # {"id": ..., "title": ..., "text": ...} per line
index.search("capital of Norway", k=3)              # list[Passage], best first
search = make_search_tool(index, top_k=3)           # a Tool

The index is a full-text table of sqlite (FTS5), which Python brings along. The file is built once, under a temporary
name, and moved to its path in one step, so processes that build the same index at the same time never see half of it.
Afterwards it is only read, from any thread.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sqlite3
import tempfile
import threading
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agent_r1_trl.features import feature
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import whole
from agent_r1_trl.settings import Count, check_value
from agent_r1_trl.tools.base import Tool

FORMAT_VERSION = 3
TOKENIZER = "porter unicode61 remove_diacritics 2"
TITLE_WEIGHT = 2.0
"""Weight of a word found in the title, relative to the text."""
BUILD_CACHE_KIB = 64 * 1024
"""Memory of sqlite while it builds; more passages take more time and disk, not more memory."""
MAX_QUERY_TERMS = 64
_STOP_WORDS_TEXT = """
a about after all also am an and any are as at be been before being but by can could did do does doing down for
from further had has have having he her here hers him his how i if in into is it its me my no nor not of off on once
only or other our out over own same she should so some such than that the their theirs them then there these
they this those through to too under until up very was we were what when where which while who whom whose why
will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())


@dataclass(kw_only=True, frozen=True)
class Passage:
    """One search result."""

    id: str
    title: str
    text: str
    score: float = 0.0
    """BM25; higher is better. Comparable within one search only."""


class SearchIndex:
    """BM25 search over passages, indexed once and kept on disk under a name made from their content.

    Stop words do not count, words are stemmed (English) and lower-cased, and accents do not matter. Any text is a
    valid query. An index may be used from many threads at once.

    Args:
        corpus: path of a JSONL file, a `datasets.Dataset`, or an iterable of dicts, with the columns
            `text`, `id` (optional, unique; by default the row number) and `title` (optional), or with `contents`,
            whose first line is the title.
        cache_dir: where indexes are kept; by default `$AGENT_R1_TRL_CACHE`, else `~/.cache/agent_r1_trl`.

    Raises:
        ValueError: a row without text, an id that occurs twice, an empty corpus, a folder that cannot be written to.
    """

    def __init__(
        self,
        corpus: str | os.PathLike[str] | Iterable[dict[str, Any]],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        rows: Iterable[Row]
        if isinstance(corpus, str | os.PathLike):
            if not Path(corpus).is_file():
                raise ValueError(f"corpus={str(corpus)!r}: no such file; pass the path of a JSONL file.")
            rows = read_rows(read_jsonl(Path(corpus)), str(corpus))
            with Path(corpus).open("rb") as stream:
                digest = hashlib.file_digest(stream, lambda: _hash("file")).hexdigest()
        else:
            rows = list(read_rows(corpus, "corpus"))
            digest = _hash("rows", json.dumps(rows).encode()).hexdigest()
        path = _cache_folder(cache_dir) / f"{digest}-v{FORMAT_VERSION}.sqlite"
        try:
            self._open(path)
        except sqlite3.DatabaseError:  # not built yet, or damaged: the disk was full when it was written, say
            write_index(path, rows)
            self._open(path)

    def _open(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._num_rows = int(self._connection().execute("SELECT count(*) FROM ids").fetchone()[0])
        self.search("a", 1)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The best `k` passages, best first (ties in the order of the corpus); none if no word of the query occurs."""
        check_search(query, k)
        terms = query_terms(query)
        if not terms:
            return []
        # The inner query picks the k rows first: joining before LIMIT would fetch the text of every match.
        found = self._connection().execute(
            "SELECT ids.id, passages.title, passages.text, best.score FROM "
            "(SELECT rowid AS number, bm25(passages, ?, 1.0) AS score FROM passages WHERE passages MATCH ? "
            "ORDER BY score, rowid LIMIT ?) AS best "
            "JOIN passages ON passages.rowid = best.number JOIN ids ON ids.number = best.number "
            "ORDER BY best.score, best.number",
            # Each term is a quoted string, in which FTS5 knows no operators; quotes cannot occur in a term.
            (TITLE_WEIGHT, " OR ".join(f'"{term}"' for term in terms), k),
        )
        return [Passage(id=id_, title=title, text=text, score=-score) for id_, title, text, score in found]

    def get(self, identifier: str) -> Passage | None:
        """The passage with this id, or None."""
        found = self._connection().execute(
            "SELECT ids.id, title, text FROM ids JOIN passages ON passages.rowid = ids.number WHERE ids.id = ?",
            (str(identifier),),
        )
        row = found.fetchone()
        return Passage(id=row[0], title=row[1], text=row[2]) if row else None

    def __len__(self) -> int:
        """Number of passages."""
        return self._num_rows

    def __repr__(self) -> str:
        return f"SearchIndex({len(self)} passages, path={str(self.path)!r})"

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self._open(path)

    def _connection(self) -> sqlite3.Connection:
        # A connection must be used neither by two threads at once nor on both sides of a fork.
        owner, connection = getattr(self._local, "owned", (None, None))
        if owner != os.getpid() or connection is None:
            connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._local.owned = (os.getpid(), connection)
        return connection


def write_index(path: Path, rows: Iterable[Row]) -> None:
    """Write the file of an index, in memory that does not grow with the passages."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    connection = sqlite3.connect(temporary, isolation_level=None)
    try:
        connection.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{BUILD_CACHE_KIB}; BEGIN;"
            f"CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='{TOKENIZER}');"
            "CREATE TABLE ids (number INTEGER PRIMARY KEY, id TEXT UNIQUE);"
        )
        for number, (identifier, title, text) in enumerate(rows, start=1):
            connection.execute("INSERT INTO passages(rowid, title, text) VALUES (?, ?, ?)", (number, title, text))
            try:
                connection.execute("INSERT INTO ids VALUES (?, ?)", (number, identifier))
            except sqlite3.IntegrityError as error:
                raise ValueError(f"row {number - 1}: id={identifier!r} occurs twice; ids must be unique.") from error
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.execute("COMMIT")
        connection.close()
        os.replace(temporary, path)
    finally:
        connection.close()
        temporary.unlink(missing_ok=True)


def check_search(query: str, k: int) -> None:
    """Refuse a `k` that is not an integer >= 1, and a query that is not a string."""
    check_value("k", k, Count)
    if not isinstance(query, str):
        raise ValueError(f"query={query!r}: must be a string.")


def query_terms(query: str) -> list[str]:
    """The words of a query, each once: no punctuation, and no stop words unless there is nothing else.

    >>> query_terms('What is the "capital" of Norway?')
    ['capital', 'norway']
    """
    # Lower case last: that of a capital i with a dot has a mark, which FTS5 drops, as it drops those in the pattern.
    found = re.findall(r"(?:[^\W_][\u0300-\u036f]*)+", unicodedata.normalize("NFC", query[:10_000]))
    words = [word.lower() for word in found]
    kept = [word for word in words if word not in STOP_WORDS] or words
    return list(dict.fromkeys(kept))[:MAX_QUERY_TERMS]


def _hash(kind: str, data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16, person=kind.encode())


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    named = cache_dir if cache_dir is not None else os.environ.get("AGENT_R1_TRL_CACHE")
    folder = (Path(named) if named else Path.home() / ".cache" / "agent_r1_trl") / "search"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return folder
    if named:
        raise ValueError(f"cache_dir={str(named)!r}: cannot be written to; choose a folder that can.")
    # Some containers have no writable home; building the index again is better than stopping the run.
    folder = Path(tempfile.gettempdir()) / f"agent_r1_trl-{os.getuid()}" / "search"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -------------------------------------------------------------------- what is searched


@runtime_checkable
class Retriever(Protocol):
    """A searchable index; may be searched from many threads at once.

    A retriever may also have `get(id) -> Passage | None`.
    """

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The best `k` passages, best first.

        Raises:
            InfrastructureError: the search cannot be made now, through no fault of the query.
        """
        ...


RetrieverSource = Retriever | str | os.PathLike[str] | Mapping[str, Any]
"""See `open_retriever`."""

_opened: dict[str, Retriever] = {}
_lock = threading.Lock()


def open_retriever(source: RetrieverSource, *, flag: str = "retriever") -> Retriever:
    """A retriever from a setting; whatever the whole process can share is opened once.

    Args:
        source: the path of a JSONL corpus, the address of a server (`http://host:8010`), a mapping with
            `path` or `url` and options (`{"url": ..., "timeout_s": 5}`), or an object with a method `search`.
        flag: the setting, for errors.

    Raises:
        ValueError: there is no such file, or the setting has another form.
    """
    options: dict[str, Any] = {}
    if isinstance(source, Mapping):
        options = dict(source)
        if ("path" in options) == ("url" in options):
            raise ValueError(f"{flag}={options}: must have either 'path' or 'url'. Give it one of them.")
        source = options.pop("url") if "url" in options else Path(options.pop("path"))
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        key = json.dumps([source, options], sort_keys=True, default=repr)
        return _shared(key, feature("search", f"{flag}={source!r}").HttpRetriever, source, options, flag)
    if isinstance(source, str | os.PathLike) and str(source):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{flag}={str(path)!r}: no such file. Pass the path of a JSONL file.")
        status = path.stat()  # what has changed is opened anew
        key = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns, options], sort_keys=True)
        return _shared(key, SearchIndex, path, options, flag)
    if callable(getattr(source, "search", None)) and not isinstance(source, type):
        return source  # type: ignore[return-value]
    raise ValueError(
        f"{flag}={source!r:.200}: must be the path of a corpus, the address of a server, a mapping with "
        "'path' or 'url', or an object with a search method. Set it to one of them."
    )


def _shared(key: str, make: Callable[..., Any], place: object, options: Mapping[str, Any], flag: str) -> Any:
    known = [*inspect.signature(make).parameters][1:]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{flag}: {name!r} is no option beside {str(place)!r}.{did_you_mean(name, known)} There are: "
                f"{', '.join(known)}."
            )
    with _lock:  # so that 256 environments that start together build an index once
        if key not in _opened:
            _opened[key] = make(place, **options)
        return _opened[key]


# -------------------------------------------------------------------- the tool


def make_search_tool(
    retriever: Any, *, top_k: int = 3, max_passage_chars: int = 500, name: str = "search", **settings: Any
) -> Tool:
    """A `search(query)` tool.

    Args:
        retriever: what is searched: a `SearchIndex`, or anything that `open_retriever` takes.
        top_k: passages per search, at least 1.
        max_passage_chars: maximum length of a passage's text; the rest is replaced by "[truncated]".
        name: name of the tool.
        **settings: further arguments of `Tool` (`timeout_s`, `max_result_chars`, ...).
    """
    check_value("top_k", top_k, Count)
    check_value("max_passage_chars", max_passage_chars, Count)
    opened = open_retriever(retriever)

    def search(query: str) -> str:
        """Search a collection of documents and return the passages that match best.

        Args:
            query: The words to look for.
        """
        return render_passages(opened.search(query, top_k), max_passage_chars)

    # A retriever elsewhere repeats its requests itself.
    return Tool(search, name=name, **{"backend": True, "attempts": 1, **settings})


def render_passages(passages: list[Passage], max_passage_chars: int = 500) -> str:
    """Passages as the model reads them: `[1] Title: text`, one per line."""
    if not passages:
        return "No passage matches. Try other words."
    lines = []
    for number, passage in enumerate(passages, start=1):
        text = shown_text(passage)
        if len(text) > max_passage_chars:
            text = text[:max_passage_chars].rstrip() + " [truncated]"
        lines.append(f"[{number}] {passage.title}: {text}" if passage.title else f"[{number}] {text}")
    return "\n".join(lines)


def shown_text(passage: Passage) -> str:
    """The text of a passage in one line."""
    return " ".join(passage.text.split())


# -------------------------------------------------------------------- passages as corpora hold them

Row = tuple[str, str, str]
"""id, title, text"""


def split_contents(contents: str) -> tuple[str, str]:
    r"""Title and text of a passage in one string: the title is the first line, often in quotes.

    >>> split_contents('"Oslo"\nThe capital of Norway.')
    ('Oslo', 'The capital of Norway.')
    >>> split_contents("No title here.")
    ('', 'No title here.')
    """
    title, _, text = contents.partition("\n")
    if not text.strip():
        return "", contents
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def join_contents(title: str, text: str) -> str:
    """A passage in one string; the inverse of `split_contents`."""
    return f'"{title}"\n{text}' if title else text


def read_jsonl(path: Path) -> Iterator[Any]:
    """The records of a JSONL file, one at a time."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # UnicodeDecodeError is one
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}). Pass a JSONL file.") from error


def read_rows(records: Iterable[Any], source: str) -> Iterator[Row]:
    """Id, title and text of each record; the number of the record where it has no id."""
    number = -1
    for number, record in enumerate(records):
        columns = record if isinstance(record, dict) else {}
        text = columns.get("text")
        title = columns.get("title")
        identifier = columns.get("id")
        if text is None and isinstance(columns.get("contents"), str):
            title, text = split_contents(columns["contents"])
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{source}, row {number}: must be a dict whose 'text' is a non-empty string, not {record!r:.200}. "
                "Rename the column that holds the passage to 'text', or to 'contents' if its first line is the title."
            )
        title, identifier = "" if title is None else str(title), str(number if identifier is None else identifier)
        yield _clean(identifier), _clean(title), _clean(text)
    if number < 0:
        raise ValueError(f"{source}: contains no passages.")


def _clean(text: str) -> str:
    """The text without what no database stores."""
    return str(whole(text)).replace("\x00", " ")
