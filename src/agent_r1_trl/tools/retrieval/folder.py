"""An index in a folder of its own, which `agent-r1-trl index` builds.

DIR/index.json         how it was built; written last, so a folder without it is not finished
DIR/passages.sqlite    the passages and their words (see `search_store.py`)
DIR/vectors.faiss      one vector per passage, if the index is dense (see `dense.py`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.tools.search import SearchIndex
from agent_r1_trl.tools.search_corpus import read_rows
from agent_r1_trl.tools.search_store import Row, SearchStore

if TYPE_CHECKING:
    from agent_r1_trl.tools.retrieval.dense import DenseIndex, DenseSettings

MANIFEST = "index.json"
PASSAGES = "passages.sqlite"
FORMAT = 1
KINDS = ("bm25", "dense")


def build_index(
    records: Iterable[Any],
    folder: str | os.PathLike[str],
    *,
    source: str = "corpus",
    title_weight: float = 2.0,
    dense: DenseSettings | None = None,
    on_passages: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Build an index; the memory that it takes does not grow with the corpus (a dense one holds the vectors).

    Args:
        records: rows of a corpus (see `read_rows`), read once.
        folder: where to put it; is made, and must not hold an index.
        source: name of the corpus, for errors and for the manifest.
        title_weight: weight of a word found in the title, relative to the text.
        dense: how to make vectors; None for an index of words alone.
        on_passages: is told how many passages were taken in since its last call.

    Returns:
        The manifest.

    Raises:
        ValueError: there is an index already, a row is unusable, or a package is missing.
    """
    target = Path(folder)
    if (target / MANIFEST).exists():
        raise ValueError(f"output={str(target)!r}: holds an index already. Pass another folder, or remove this one.")
    target.mkdir(parents=True, exist_ok=True)
    rows = read_rows(records, source)
    SearchStore.build(target / PASSAGES, _counted(rows, on_passages) if dense is None else rows)
    index = SearchIndex.at(target / PASSAGES, title_weight=title_weight)
    manifest = {
        "format": FORMAT,
        "kind": "bm25",
        "num_passages": len(index),
        "title_weight": title_weight,
        "corpus": source,
    }
    if dense is not None:
        from agent_r1_trl.tools.retrieval.dense import build_vectors

        manifest |= {"kind": "dense", **build_vectors(index, target, dense, on_passages or (lambda number: None))}
    temporary = target / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, target / MANIFEST)
    return manifest


def open_index(
    folder: str | os.PathLike[str],
    *,
    flag: str = "retriever",
    kind: str | None = None,
    title_weight: float | None = None,
    device: str | None = None,
) -> SearchIndex | DenseIndex:
    """The index in a folder.

    Args:
        folder: what `build_index` made.
        flag: the setting that names it, for errors.
        kind: "bm25" or "dense"; None: as it was built. A dense index can also be searched by words.
        title_weight: of BM25; None: as it was built.
        device: where the encoder of a dense index runs.

    Raises:
        ValueError: there is no finished index in the folder, or none of this kind.
    """
    manifest = read_manifest(folder, flag)
    built = str(manifest["kind"])
    if kind not in (None, *KINDS) or (kind == "dense" and built != "dense"):
        rule = "was built without vectors" if kind in KINDS else f"must be one of {', '.join(KINDS)}"
        raise ValueError(f"kind={kind!r}: {rule} ({folder}). Leave it out, or build the index with --dense MODEL.")
    weight = manifest["title_weight"] if title_weight is None else title_weight
    index = SearchIndex.at(Path(folder) / PASSAGES, title_weight=weight)
    if (kind or built) == "bm25":
        return index
    from agent_r1_trl.tools.retrieval.dense import DenseIndex

    return DenseIndex(index, Path(folder), manifest, device=device)


def read_manifest(folder: str | os.PathLike[str], flag: str = "retriever") -> dict[str, Any]:
    """How the index in a folder was built.

    Raises:
        ValueError: there is no finished index in the folder.
    """
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and manifest["kind"] in KINDS
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(
            f"{flag}={str(folder)!r}: holds no finished index (index.json). Build one: agent-r1-trl index CORPUS "
            f"--output {folder}"
        )
    return dict(manifest)


def is_index(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is or was to become an index."""
    return any((Path(folder) / name).exists() for name in (MANIFEST, PASSAGES))


def _counted(rows: Iterable[Row], on_passages: Callable[[int], None] | None) -> Iterator[Row]:
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if on_passages is not None and number % 1000 == 0:
            on_passages(1000)
    if on_passages is not None:
        on_passages(number % 1000)
