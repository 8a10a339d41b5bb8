"""The folders that `agent-r1-trl index` builds, and how they are opened.

DIR/index.json         how it was built; written last, so a folder without it is not finished
DIR/passages.sqlite    the passages and their words (see `search.py`)
DIR/vectors.faiss      one vector per passage, if the index is dense (see `dense.py`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_r1_trl.tools.search import SearchIndex, write_index
from agent_r1_trl.tools.search_corpus import read_rows

MANIFEST = "index.json"
PASSAGES = "passages.sqlite"
FORMAT = 2


# -------------------------------------------------------------------- folders


def build_index(
    records: Iterable[Any],
    folder: str | os.PathLike[str],
    *,
    source: str = "corpus",
    dense: str | None = None,
    faiss: str = "Flat",
    device: str | None = None,
) -> dict[str, Any]:
    """Build an index; the memory that it takes does not grow with the corpus (a dense one holds the vectors).

    Args:
        records: rows of a corpus (see `read_rows`), read once.
        folder: where to put it; is made, and must not hold an index.
        source: name of the corpus, for errors and for the manifest.
        dense: the model of sentence-transformers that makes vectors; None for an index of words alone.
        faiss: the kind of index of these vectors (see `VectorWriter`).
        device: where the model runs.

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
    manifest: dict[str, Any] = {"format": FORMAT, "kind": "bm25", "corpus": source}
    if dense is None:
        write_index(target / PASSAGES, rows)
    else:
        from agent_r1_trl.features.search.dense import VectorWriter

        vectors = VectorWriter(dense, faiss, device)
        write_index(target / PASSAGES, vectors.watch(rows))
        vectors.write(target)
        manifest |= {"kind": "dense", "encoder": dense, "faiss": faiss}
    manifest["num_passages"] = len(SearchIndex.at(target / PASSAGES))
    temporary = target / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, target / MANIFEST)
    return manifest


def open_index(folder: str | os.PathLike[str], *, device: str | None = None) -> Any:
    """The index in a folder: a `SearchIndex` or a `DenseIndex`.

    Args:
        folder: what `build_index` made.
        device: where the encoder of a dense index runs.

    Raises:
        ValueError: there is no finished index in the folder.
    """
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
        is_known = manifest["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        is_known = False
    if not is_known:
        raise ValueError(
            f"{str(folder)!r}: holds no finished index (index.json). Build one: agent-r1-trl index CORPUS "
            f"--output {folder}"
        )
    index = SearchIndex.at(Path(folder) / PASSAGES)
    if manifest["kind"] == "bm25":
        return index
    from agent_r1_trl.features.search.dense import DenseIndex

    return DenseIndex(index, Path(folder), manifest["encoder"], device)
