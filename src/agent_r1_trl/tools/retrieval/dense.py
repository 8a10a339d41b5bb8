"""Search by meaning: vectors of sentence-transformers in an index of FAISS, beside the passages.

Needs the extra `dense` (faiss-cpu, sentence-transformers), which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1_trl.tools.retrieval.batching import QueryBatcher
from agent_r1_trl.tools.search import Passage, SearchIndex, check_search
from agent_r1_trl.tools.search_corpus import join_contents

VECTORS = "vectors.faiss"
TRAINED_ON = 65_536
"""Vectors on which FAISS trains an index that has to be trained."""
MAX_BATCH = 64


@dataclass(kw_only=True, frozen=True)
class DenseSettings:
    """How vectors are made.

    Args:
        encoder: a model of sentence-transformers: a directory or a Hub id.
        faiss: what FAISS's `index_factory` makes, with inner products: "Flat" is exact, "SQfp16" takes half its
            memory, "HNSW32" or "IVF4096,Flat" are faster and approximate.
        batch_size: passages that are encoded at once.
        query_prefix: is put before each query; None: "query: " for the models of the E5 family, else nothing.
        passage_prefix: is put before each passage; None: "passage: " for the models of the E5 family, else nothing.
        device: where the encoder runs; None: a GPU if there is one.
    """

    encoder: str
    faiss: str = "Flat"
    batch_size: int = 64
    query_prefix: str | None = None
    passage_prefix: str | None = None
    device: str | None = None

    def prefixes(self) -> tuple[str, str]:
        """Of queries and of passages."""
        is_e5 = "e5-" in Path(self.encoder).name.lower()
        query, passage = self.query_prefix, self.passage_prefix
        return ("query: " if is_e5 else "") if query is None else query, (
            ("passage: " if is_e5 else "") if passage is None else passage
        )


class DenseIndex:
    """Passages by the similarity of their vectors to that of the query; may be searched from many threads at once.

    Queries that come together are encoded together.

    Args:
        passages: the passages, in the order of the vectors.
        folder: where the vectors are.
        manifest: what `build_vectors` returned.
        device: where the encoder runs; None: a GPU if there is one.

    Raises:
        ValueError: a package, the vectors or the encoder is missing.
    """

    def __init__(
        self, passages: SearchIndex, folder: Path, manifest: dict[str, Any], *, device: str | None = None
    ) -> None:
        self.passages, self.folder, self.manifest, self.device = passages, folder, manifest, device
        self._load()

    def _load(self) -> None:
        faiss = _import("faiss")
        try:
            self._vectors = faiss.read_index(str(self.folder / VECTORS))
        except RuntimeError as error:
            raise ValueError(f"{self.folder / VECTORS}: cannot be read ({error}). Build the index again.") from error
        if self._vectors.ntotal != len(self.passages):
            raise ValueError(f"{self.folder}: {self._vectors.ntotal} vectors for {len(self.passages)} passages.")
        self._encoder = load_encoder(self.manifest["encoder"], self.device)
        self._batcher = QueryBatcher(self.search_many, max_flights=1, max_batch=MAX_BATCH)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The `k` passages whose vectors are most similar, best first; the score is the cosine.

        Raises:
            ValueError: `k` is not an integer >= 1, or `query` is not a string.
        """
        check_search(query, k)
        return list(self._batcher.search(query, k))

    def search_many(self, queries: list[str], k: int = 3) -> list[list[Passage]]:
        """`search` for several queries at once."""
        vectors = _encode(self._encoder, queries, self.manifest["query_prefix"], MAX_BATCH)
        scores, numbers = self._vectors.search(vectors, min(k, len(self.passages)))
        return [
            self._passages_of([(int(n), float(s)) for n, s in zip(row, row_scores, strict=True) if n >= 0])
            for row, row_scores in zip(numbers, scores, strict=True)
        ]

    def _passages_of(self, found: list[tuple[int, float]]) -> list[Passage]:
        rows = self.passages.rows_at([number for number, _ in found])
        return [
            Passage(id=identifier, title=title, text=text, score=score)
            for (identifier, title, text), (_, score) in zip(rows, found, strict=True)
        ]

    def get(self, identifier: str) -> Passage | None:
        """The passage with this id, or None."""
        return self.passages.get(identifier)

    def __len__(self) -> int:
        """Number of passages."""
        return len(self.passages)

    def __repr__(self) -> str:
        return f"DenseIndex({len(self)} passages, path={str(self.folder)!r}, encoder={self.manifest['encoder']!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()


def build_vectors(
    passages: SearchIndex, folder: Path, settings: DenseSettings, on_passages: Callable[[int], None]
) -> dict[str, Any]:
    """Encode the passages and write the index of their vectors; returns what the manifest has to say about it.

    Raises:
        ValueError: a package or the encoder is missing, or FAISS knows no such index.
    """
    faiss, numpy = _import("faiss"), _import("numpy")
    encoder = load_encoder(settings.encoder, settings.device)
    query_prefix, passage_prefix = settings.prefixes()
    size = len(_encode(encoder, ["size"], "", 1)[0])
    try:
        index = faiss.index_factory(size, settings.faiss, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"faiss={settings.faiss!r}: FAISS makes no such index for vectors of {size} numbers. Use 'Flat', 'SQfp16' "
            "or 'HNSW32'."
        ) from error
    waiting: list[Any] = []
    for texts in _batches(passages, settings.batch_size):
        vectors = _encode(encoder, texts, passage_prefix, settings.batch_size)
        waiting.append(vectors)
        on_passages(len(texts))
        if not index.is_trained and sum(map(len, waiting)) < TRAINED_ON:
            continue
        _add(index, numpy.concatenate(waiting))
        waiting = []
    if waiting:
        _add(index, numpy.concatenate(waiting))
    faiss.write_index(index, str(folder / VECTORS))
    return {
        "encoder": settings.encoder,
        "faiss": settings.faiss,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
    }


def load_encoder(name: str, device: str | None = None) -> Any:
    """A model of sentence-transformers.

    Raises:
        ValueError: the package is missing, or there is no such model.
    """
    package = _import("sentence_transformers")
    try:
        return package.SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dense={name!r}: cannot be loaded ({str(error).splitlines()[0]}). Pass the directory or the Hub id of a "
            "model of sentence-transformers."
        ) from error


def _add(index: Any, vectors: Any) -> None:
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)


def _encode(encoder: Any, texts: list[str], prefix: str, batch_size: int) -> Any:
    """Vectors of length 1, (len(texts), size), float32."""
    vectors = encoder.encode(
        [prefix + text for text in texts],
        batch_size=batch_size,
        normalize_embeddings=True,
        convert_to_numpy=True,
        show_progress_bar=False,
    )
    return vectors.astype("float32")


def _batches(passages: SearchIndex, size: int) -> Iterator[list[str]]:
    for start in range(0, len(passages), size):
        rows = passages.rows_at(list(range(start, min(start + size, len(passages)))))
        yield [join_contents(title, text) for _, title, text in rows]


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"dense retrieval needs {name} ({error}). Install it: pip install 'agent-r1-trl[dense]'."
        ) from error
