"""`agent-r1-trl index`: build a search index from a corpus, or search one.

    agent-r1-trl index corpus.jsonl --output indexes/wiki
    agent-r1-trl index indexes/wiki --query "capital of Norway"

The corpus is a JSONL or Parquet file or a data set (a directory or a Hub id), with the columns `text` and, if you have
them, `id` and `title`, or with `contents`, whose first line is the title.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agent_r1_trl.cli.errors import InfrastructureError, UsageError, explain_argparse, run_command
from agent_r1_trl.objects import did_you_mean

COMMAND = "agent-r1-trl index"
BUILD_ONLY = ("dense", "faiss", "query_prefix", "passage_prefix", "batch_size", "name", "split", "num_passages")


class PlainParser(argparse.ArgumentParser):
    """A parser whose mistakes are `UsageError`s."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UsageError`."""
        raise UsageError(f"{explain_argparse(message)} {self.prog} --help lists the options.")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments.

        Raises:
            UsageError: there is a mistake.
        """
        arguments, unknown = self.parse_known_args(argv)
        if not unknown:
            return arguments
        flags = [option for action in self._actions for option in action.option_strings]
        hint = did_you_mean(unknown[0], flags)
        raise UsageError(f"{unknown[0]}: there is no such option.{hint} {self.prog} --help lists them all.")


def run(argv: Sequence[str]) -> int:
    """Build or search an index; returns the exit code."""
    arguments = make_parser().read(argv)
    if arguments.query is not None and arguments.output is not None:
        raise UsageError("--query and --output: one searches an index, the other builds one. Remove one of them.")
    if arguments.query is not None:
        return search(arguments)
    if arguments.output is None:
        raise UsageError(
            f"--output: not set. Pass the folder to build the index of {arguments.corpus} in, or --query to search it."
        )
    return build(arguments)


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(
        prog=COMMAND, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "corpus", metavar="CORPUS", help="A corpus to index; with --query, what to search: an index, a file or a URL."
    )
    parser.add_argument("--output", metavar="DIR", help="Folder to build the index in; must not hold one.")
    parser.add_argument("--query", help="Search for these words and print what is found.")
    parser.add_argument("--top_k", "--top-k", type=int, default=3, help="Passages to print for --query (3).")
    parser.add_argument(
        "--title_weight", "--title-weight", type=float, help="Weight of a word in the title, relative to the text (2)."
    )
    parser.add_argument("--name", help="Configuration of a data set on the Hub.")
    parser.add_argument("--split", help="Split of a data set on the Hub or in a directory (train).")
    parser.add_argument("--num_passages", "--num-passages", type=int, help="Index only the first ones.")
    dense = parser.add_argument_group("dense retrieval", "needs the extra: pip install 'agent-r1-trl[dense]'")
    dense.add_argument("--dense", metavar="MODEL", help="Add vectors of this model of sentence-transformers.")
    dense.add_argument("--faiss", help="What FAISS's index_factory makes: Flat (the default), SQfp16, HNSW32, ...")
    dense.add_argument("--query_prefix", help="Put before each query (E5: 'query: ').")
    dense.add_argument("--passage_prefix", help="Put before each passage (E5: 'passage: ').")
    dense.add_argument("--batch_size", type=int, help="Passages that are encoded at once (64).")
    dense.add_argument("--device", help="Where the encoder runs; by default a GPU if there is one.")
    return parser


def search(arguments: argparse.Namespace) -> int:
    """Print the passages that match best.

    Raises:
        UsageError: there is nothing to search, or an option makes no sense.
        InfrastructureError: the server does not answer.
    """
    from agent_r1_trl.safe_text import visible
    from agent_r1_trl.tools.faults import InfrastructureError as SearchFailure
    from agent_r1_trl.tools.retrieval import open_retriever
    from agent_r1_trl.tools.search import check_search

    for name in BUILD_ONLY:
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name}: is for building an index, not for searching one. Remove it.")
    options = {name: getattr(arguments, name) for name in ("title_weight", "device")}
    options = {name: value for name, value in options.items() if value is not None}
    source: Any = {"path": arguments.corpus, **options} if options else arguments.corpus
    try:
        check_search(arguments.query, arguments.top_k)
        retriever = open_retriever(source, flag="CORPUS")
        start = time.perf_counter()
        passages = retriever.search(arguments.query, arguments.top_k)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except SearchFailure as error:
        raise InfrastructureError(str(error)) from error
    seconds = time.perf_counter() - start
    for number, passage in enumerate(passages, start=1):
        title = f"{passage.title}: " if passage.title else ""
        text = " ".join(passage.text.split())
        sys.stdout.write(visible(f"[{number}] {passage.score:.3f}  {passage.id}\n    {title}{text}\n"))
    sys.stdout.write(f"{len(passages)} passages in {1000 * seconds:.1f} ms\n")
    return 0


def build(arguments: argparse.Namespace) -> int:
    """Build an index, with a progress bar.

    Raises:
        UsageError: the corpus cannot be read, or there is an index already.
    """
    from agent_r1_trl.cli.console import PlainConsole
    from agent_r1_trl.cli.progress import make_progress
    from agent_r1_trl.tools.retrieval import build_index

    console = PlainConsole(soft_wrap=True)
    start = time.perf_counter()
    try:
        records, total = open_corpus(arguments)
        weight = 2.0 if arguments.title_weight is None else arguments.title_weight
        with make_progress(console) as progress:
            task = progress.add_task("passages", total=total, note="")
            manifest = build_index(
                records,
                arguments.output,
                source=arguments.corpus,
                title_weight=weight,
                dense=_dense_settings(arguments),
                on_passages=lambda number: progress.update(task, advance=number),
            )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    folder = Path(arguments.output)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    console.print(
        f"{folder}: {manifest['num_passages']} passages, {manifest['kind']}, {size:.1f} MiB, "
        f"{time.perf_counter() - start:.0f} s\n"
        f'  {COMMAND} {folder} --query "..."\n'
        f"  agent-r1-trl serve-retriever {folder}"
    )
    return 0


def open_corpus(arguments: argparse.Namespace) -> tuple[Iterable[Any], int | None]:
    """The records of a corpus and about how many they are, None if that is not known.

    Raises:
        UsageError: there is no such corpus.
    """
    from itertools import islice

    from agent_r1_trl.tools.search_corpus import SUFFIXES, count_records, read_file

    records: Iterable[Any]
    total: int | None
    limit, path = arguments.num_passages, Path(arguments.corpus)
    if limit is not None and limit < 1:
        raise UsageError(f"--num_passages {limit}: must be a whole number >= 1. Pass such a number, or leave it out.")
    if path.suffix.lower() in SUFFIXES or path.is_file():
        records, total = read_file(path), count_records(path)
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"CORPUS {str(path)!r}: must be a .jsonl or .parquet file. Convert it to one of them.")
        for name in ("name", "split"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} {getattr(arguments, name)}: a file has none. Remove it.")
    else:
        records, total = _open_dataset(arguments.corpus, arguments.name, arguments.split or "train")
    if limit is None:
        return records, total
    return islice(records, limit), limit if total is None else min(limit, total)


def _open_dataset(name: str, config: str | None, split: str) -> tuple[Iterable[Any], int | None]:
    from agent_r1_trl.cli.resolve import load_rows

    if Path(name).is_dir():
        rows = load_rows("CORPUS", name, config=config, split=split)
        return rows, len(rows)
    from datasets import load_dataset

    try:  # streamed, so that a corpus is never on the disk twice
        return load_dataset(name, config, split=split, streaming=True), None
    except Exception as error:  # a wrong name, no network: of many types
        raise UsageError(
            f"CORPUS {name!r}: no such file, and it cannot be loaded from the Hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Pass a .jsonl or .parquet "
            "file, a directory, or the id of a data set with one of its splits."
        ) from error


def _dense_settings(arguments: argparse.Namespace) -> Any:
    given = {
        name: getattr(arguments, name) for name in ("faiss", "query_prefix", "passage_prefix", "batch_size", "device")
    }
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.dense is None:
        if given:
            raise UsageError(f"--{next(iter(given))}: belongs to --dense MODEL. Pass both or neither.")
        return None
    if given.get("batch_size", 1) < 1:
        raise UsageError(f"--batch_size {given['batch_size']}: must be a whole number >= 1. Pass such a number.")
    from agent_r1_trl.tools.retrieval.dense import DenseSettings

    return DenseSettings(encoder=arguments.dense, **given)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.index`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
