"""Search by meaning: vectors of sentence-transformers in an index of FAISS, beside the passages.

Needs the extra `dense` (faiss-cpu, sentence-transformers), which is imported where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agent_r1_trl.features.search.batching import QueryBatcher
from agent_r1_trl.tools.search import Passage, SearchIndex, check_search
from agent_r1_trl.tools.search_corpus import Row, join_contents

VECTORS = "vectors.faiss"
MAX_BATCH = 64
"""Texts that are encoded at once."""
E5_PROMPTS = {"query": "query: ", "document": "passage: "}


class DenseIndex:
    """Passages by the similarity of their vectors to that of the query; may be searched from many threads at once.

    Queries that come together are encoded together.

    Args:
        passages: the passages, in the order of the vectors.
        folder: where the vectors are.
        encoder: the model that made them.
        device: where it runs; None: a GPU if there is one.

    Raises:
        ValueError: a package, the vectors or the encoder is missing.
    """

    def __init__(self, passages: SearchIndex, folder: Path, encoder: str, device: str | None = None) -> None:
        self.passages, self.folder, self.encoder = passages, folder, encoder
        try:
            self._vectors = _import("faiss").read_index(str(folder / VECTORS))
        except RuntimeError as error:
            raise ValueError(f"{folder / VECTORS}: cannot be read ({error}). Build the index again.") from error
        if self._vectors.ntotal != len(passages):
            raise ValueError(f"{folder}: {self._vectors.ntotal} vectors for {len(passages)} passages.")
        self._model = load_encoder(encoder, device)
        self._batcher = QueryBatcher(self.search_many, max_flights=1, max_batch=MAX_BATCH)
        self.get = passages.get

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The `k` passages whose vectors are most similar, best first; the score is the cosine.

        Raises:
            ValueError: `k` is not an integer >= 1, or `query` is not a string.
        """
        check_search(query, k)
        return list(self._batcher.search(query, k))

    def search_many(self, queries: list[str], k: int = 3) -> list[list[Passage]]:
        """`search` for several queries at once."""
        vectors = self._model.encode_query(queries, batch_size=MAX_BATCH, **_HOW)
        scores, numbers = self._vectors.search(vectors.astype("float32"), min(k, len(self.passages)))
        results = []
        for row_scores, row_numbers in zip(scores.tolist(), numbers.tolist(), strict=True):
            found = [(number, score) for number, score in zip(row_numbers, row_scores, strict=True) if number >= 0]
            rows = self.passages.rows_at([number for number, _ in found])
            results.append(
                [
                    Passage(id=identifier, title=title, text=text, score=score)
                    for (identifier, title, text), (_, score) in zip(rows, found, strict=True)
                ]
            )
        return results

    def __len__(self) -> int:
        """Number of passages."""
        return len(self.passages)

    def __repr__(self) -> str:
        return f"DenseIndex({len(self)} passages, path={str(self.folder)!r}, encoder={self.encoder!r})"


class VectorWriter:
    """Makes the vectors of the rows that pass by.

    Args:
        encoder: a model of sentence-transformers: a directory or a Hub id. The models of the E5 family get their
            prefixes, others what their own configuration says.
        faiss: what FAISS's `index_factory` makes, with inner products: "Flat" is exact, "SQfp16" takes half its
            memory, "HNSW32" is faster and approximate. Kinds that need training are not supported.
        device: where the encoder runs; None: a GPU if there is one.

    Raises:
        ValueError: a package or the encoder is missing, or FAISS knows no such index.
    """

    def __init__(self, encoder: str, faiss: str = "Flat", device: str | None = None) -> None:
        self._faiss = _import("faiss")
        self._model = load_encoder(encoder, device)
        size = len(self._model.encode("size"))
        try:
            self._index = self._faiss.index_factory(size, faiss, self._faiss.METRIC_INNER_PRODUCT)
            is_usable = self._index.is_trained
        except RuntimeError:
            is_usable = False
        if not is_usable:
            raise ValueError(
                f"faiss={faiss!r}: FAISS makes no such index for vectors of {size} numbers, or it has to be trained. "
                "Use 'Flat', 'SQfp16' or 'HNSW32'."
            )
        self._texts: list[str] = []

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass the rows on, and keep their vectors."""
        for row in rows:
            self._texts.append(join_contents(row[1], row[2]))
            if len(self._texts) == MAX_BATCH:
                self._encode()
            yield row

    def write(self, folder: Path) -> None:
        """Write the index of the vectors."""
        self._encode()
        self._faiss.write_index(self._index, str(folder / VECTORS))

    def _encode(self) -> None:
        if self._texts:
            vectors = self._model.encode_document(self._texts, batch_size=MAX_BATCH, **_HOW)
            self._index.add(vectors.astype("float32"))
            self._texts = []


_HOW = {"normalize_embeddings": True, "convert_to_numpy": True, "show_progress_bar": False}


def load_encoder(name: str, device: str | None = None) -> Any:
    """A model of sentence-transformers.

    Raises:
        ValueError: the package is missing, or there is no such model.
    """
    package = _import("sentence_transformers")
    model = Path(name).name.lower()
    prompts = E5_PROMPTS if "e5-" in model and "instruct" not in model else None
    try:
        return package.SentenceTransformer(name, device=device, prompts=prompts)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dense={name!r}: cannot be loaded ({str(error).splitlines()[0]}). Pass the directory or the Hub id of a "
            "model of sentence-transformers."
        ) from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"dense retrieval needs {name} ({error}). Install it: pip install 'agent-r1-trl[dense]'."
        ) from error
