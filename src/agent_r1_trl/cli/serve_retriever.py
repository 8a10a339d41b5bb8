"""`agent-r1-trl serve-retriever`: serve an index over HTTP, in Search-R1's protocol.

    agent-r1-trl serve-retriever indexes/wiki --host 0.0.0.0 --port 8010

Then set `retriever: http://THIS-MACHINE:8010` in the recipe. Ends on Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_trl.cli.errors import InfrastructureError, UsageError, run_command
from agent_r1_trl.cli.index import PlainParser

COMMAND = "agent-r1-trl serve-retriever"


def run(argv: Sequence[str]) -> int:
    """Serve until told to end; returns the exit code."""
    arguments = make_parser().read(argv)
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port}: must be from 0 (any free one) to 65535. Pass such a number.")
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: must be >= 1. Pass such a number, or leave it out.")
    from agent_r1_trl.tools.retrieval import open_retriever
    from agent_r1_trl.tools.retrieval.server import serve

    options = {"kind": arguments.kind, "device": arguments.device}
    options = {name: value for name, value in options.items() if value is not None}
    source: Any = {"path": arguments.index, **options} if options else arguments.index
    try:
        retriever = open_retriever(source, flag="INDEX")
    except ValueError as error:
        raise UsageError(str(error)) from error

    def show(place: Mapping[str, Any]) -> None:
        url = f"http://{place['host']}:{place['port']}"
        curl = f"curl -s {url}/retrieve -H 'Content-Type: application/json'"
        print(f'{retriever!r}\nretriever: {url}\n{curl} -d \'{{"queries": ["..."], "topk": 3}}\'', flush=True)

    try:
        serve(retriever, host=arguments.host, port=arguments.port, max_workers=arguments.workers, on_start=show)
    except OSError as error:
        raise InfrastructureError(
            f"--host {arguments.host} --port {arguments.port}: cannot listen there ({error.strerror or error}). Pass "
            "another port, or 0 for a free one."
        ) from error
    return 0


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(
        prog=COMMAND, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", metavar="INDEX", help="Folder of an index, or a JSONL or Parquet corpus.")
    parser.add_argument("--host", default="127.0.0.1", help="Address; 0.0.0.0 for other machines (127.0.0.1).")
    parser.add_argument("--port", type=int, default=8010, help="Port; 0 for a free one (8010).")
    parser.add_argument("--workers", type=int, help="Searches at the same time; by default two for each processor.")
    parser.add_argument("--kind", choices=("bm25", "dense"), help="How to search a dense index; by default as built.")
    parser.add_argument("--device", help="Where the encoder of a dense index runs.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.serve_retriever`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
