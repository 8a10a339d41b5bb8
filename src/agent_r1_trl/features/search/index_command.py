"""`agent-r1-trl index`: build a search index from a corpus.

    agent-r1-trl index corpus.jsonl --output indexes/wiki

The corpus is a JSONL or Parquet file or a data set (a directory or a Hub id), with the columns `text` and, if you have
them, `id` and `title`, or with `contents`, whose first line is the title.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import PlainParser, users_mistakes

COMMAND = "agent-r1-trl index"


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__)
    parser.add_argument("corpus", metavar="CORPUS", help="A corpus to index.")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="Folder to build the index in; must not hold one."
    )
    parser.add_argument("--name", help="Configuration of a data set on the Hub.")
    parser.add_argument("--split", default="train", help="Split of a data set on the Hub or in a directory (train).")
    dense = parser.add_argument_group("dense retrieval", "needs the extra: pip install 'agent-r1-trl[dense]'")
    dense.add_argument("--dense", metavar="MODEL", help="Add vectors of this model of sentence-transformers.")
    dense.add_argument(
        "--faiss", default="Flat", help="What FAISS's index_factory makes: Flat (the default), SQfp16, HNSW32, ..."
    )
    dense.add_argument("--device", help="Where the encoder runs; by default a GPU if there is one.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Build an index, with a progress bar; returns the exit code.

    Raises:
        UsageError: the corpus cannot be read, or there is an index already.
    """
    arguments = make_parser().read(argv)
    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.cli.progress import make_progress
    from agent_r1_trl.features.search import build_index

    console, folder = PlainConsole(soft_wrap=True), Path(arguments.output)

    def counted(records: Iterable[Any]) -> Iterator[Any]:
        with make_progress(console) as progress:
            task = progress.add_task("passages", total=None, note="")
            for record in records:
                progress.advance(task)
                yield record

    with users_mistakes(OSError):
        manifest = build_index(
            counted(open_corpus(arguments.corpus, arguments.name, arguments.split)),
            folder,
            source=arguments.corpus,
            dense=arguments.dense,
            faiss=arguments.faiss,
            device=arguments.device,
        )
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    console.print(
        f"{folder}: {manifest['num_passages']} passages, {manifest['kind']}, {size:.1f} MiB\n"
        f"  agent-r1-trl serve-retriever {folder}"
    )
    return 0


def open_corpus(corpus: str, name: str | None, split: str) -> Iterable[Any]:
    """The records of a corpus.

    Raises:
        ValueError: there is no such file or data set, or a line is not JSON.
    """
    from agent_r1_trl.environments.data_files import load_rows
    from agent_r1_trl.tools.search_corpus import read_file

    path = Path(corpus)
    if path.suffix.lower() in (".jsonl", ".parquet"):  # a few rows at a time, however many there are
        return read_file(path)
    rows: Iterable[Any] = load_rows("CORPUS", corpus, config=name, split=split)
    return rows
