"""Search over a local corpus: an index on disk, and the tool that lets a model search it.

index = SearchIndex("corpus.jsonl")                 # {"id": ..., "title": ..., "text": ...} per line
index.search("capital of Norway", k=3)              # list[Passage], best first
search = make_search_tool(index, top_k=3)           # a Tool
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1_trl.tools.base import Tool
from agent_r1_trl.tools.search_corpus import read_file, read_rows
from agent_r1_trl.tools.search_store import DamagedIndexError, Row, SearchStore

FORMAT_VERSION = 2
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
        corpus: path of a JSONL or Parquet file, a `datasets.Dataset`, or an iterable of dicts, with the columns
            `text`, `id` (optional, unique; by default the row number) and `title` (optional), or with `contents`,
            whose first line is the title.
        cache_dir: where indexes are kept; by default `$AGENT_R1_TRL_CACHE`, else `~/.cache/agent_r1_trl`.
        title_weight: weight of a word found in the title, relative to the text.

    Raises:
        ValueError: a row without text, an id that occurs twice, an empty corpus, a folder that cannot be written to.
    """

    def __init__(
        self,
        corpus: str | os.PathLike[str] | Iterable[dict[str, Any]],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        title_weight: float = 2.0,
    ) -> None:
        if isinstance(title_weight, bool) or not isinstance(title_weight, (int, float)) or not 0 <= title_weight < 1e6:
            raise ValueError(f"title_weight={title_weight!r}: must be a number >= 0.")
        self.title_weight = float(title_weight)
        is_path = isinstance(corpus, (str, os.PathLike))
        if is_path:
            source = Path(corpus)  # type: ignore[arg-type]
            rows: Iterable[Row] = read_rows(read_file(source), str(source))
            digest = _hash_file(source)
        else:
            checked = list(read_rows(corpus, "corpus"))  # type: ignore[arg-type]
            digest, rows = _hash_rows(checked), checked
        self.path = _cache_folder(cache_dir) / f"{digest}-v{FORMAT_VERSION}.sqlite"
        self._store = self._open(rows)

    @classmethod
    def at(cls, path: Path, *, title_weight: float = 2.0) -> SearchIndex:
        """The index in a file that `SearchStore.build` made.

        Raises:
            ValueError: there is no index in the file.
        """
        index = cls.__new__(cls)
        try:
            index.__setstate__({"title_weight": float(title_weight), "path": path})
        except DamagedIndexError as error:
            raise ValueError(f"{path}: is not a search index ({error}). Build it again.") from error
        return index

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The best `k` passages, best first; an empty list if no word of the query occurs.

        Raises:
            ValueError: `k` is not an integer >= 1, or `query` is not a string.
        """
        check_search(query, k)
        terms = query_terms(query)
        if not terms:
            return []
        found = self._store.search(terms, k)
        return [
            Passage(id=identifier, title=title, text=text, score=score) for (identifier, title, text), score in found
        ]

    def get(self, identifier: str) -> Passage | None:
        """The passage with this id, or None."""
        row = self._store.get(str(identifier))
        return Passage(id=row[0], title=row[1], text=row[2]) if row else None

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Id, title and text of the passages with these places in the corpus, the first being 0."""
        return self._store.rows_at(numbers)

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._store)

    def __repr__(self) -> str:
        return f"SearchIndex({len(self)} passages, path={str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_store"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._store = SearchStore(self.path, self.title_weight)

    def _open(self, rows: Iterable[Row]) -> SearchStore:
        if self.path.exists():
            try:
                return SearchStore(self.path, self.title_weight)
            except DamagedIndexError:  # the disk was full when it was written, say
                self.path.unlink(missing_ok=True)
        SearchStore.build(self.path, rows)
        return SearchStore(self.path, self.title_weight)


def check_search(query: str, k: int) -> None:
    """Refuse what no search can be made of.

    Raises:
        ValueError: `k` is not an integer >= 1, or `query` is not a string.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r}: must be an integer >= 1.")
    if not isinstance(query, str):
        raise ValueError(f"query={query!r}: must be a string.")


def make_search_tool(
    retriever: Any, *, top_k: int = 3, max_passage_chars: int = 500, name: str = "search", **settings: Any
) -> Tool:
    """A `search(query)` tool.

    Args:
        retriever: what is searched: a `SearchIndex`, or anything that `open_retriever` takes.
        top_k: passages per search.
        max_passage_chars: maximum length of a passage's text; the rest is replaced by "[truncated]".
        name: name of the tool.
        **settings: further arguments of `Tool` (`timeout_s`, `max_result_tokens`, ...).

    Raises:
        ValueError: `top_k` or `max_passage_chars` is not an integer >= 1, or there is no such retriever.
    """
    from agent_r1_trl.tools.retrieval import open_retriever

    for label, value in (("top_k", top_k), ("max_passage_chars", max_passage_chars)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{label}={value!r}: must be an integer >= 1.")
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
        text = " ".join(passage.text.split())
        if len(text) > max_passage_chars:
            text = text[:max_passage_chars].rstrip() + " [truncated]"
        lines.append(f"[{number}] {passage.title}: {text}" if passage.title else f"[{number}] {text}")
    return "\n".join(lines)


def query_terms(query: str) -> list[str]:
    """The words of a query, each once: no punctuation, and no stop words unless there is nothing else.

    >>> query_terms('What is the "capital" of Norway?')
    ['capital', 'norway']
    """
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", query[:10_000]).lower())
    kept = [word for word in words if word not in STOP_WORDS] or words
    return list(dict.fromkeys(kept))[:MAX_QUERY_TERMS]


# -------------------------------------------------------------------- reading and caching


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(b"file", digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _hash_rows(rows: Iterable[Row]) -> str:
    digest = hashlib.blake2b(b"rows", digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=True).encode())
    return digest.hexdigest()


def _cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    named = cache_dir if cache_dir is not None else os.environ.get("AGENT_R1_TRL_CACHE")
    folder = Path(named) if named else Path.home() / ".cache" / "agent_r1_trl"
    folder = folder / "search"
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
    folder = Path(tempfile.gettempdir()) / f"agent_r1_trl-{os.getuid() if hasattr(os, 'getuid') else 0}" / "search"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
