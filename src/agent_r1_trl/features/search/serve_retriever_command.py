"""`agent-r1-trl serve-retriever`: serve a corpus over HTTP, in Search-R1's protocol.

    agent-r1-trl serve-retriever corpus.jsonl --host 0.0.0.0 --port 8010

The corpus is indexed first, once. Then set `retriever: http://THIS-MACHINE:8010` in the recipe. Ends on Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1_trl.cli.errors import PlainParser, users_mistakes
from agent_r1_trl.cli.web import Port, serve_app
from agent_r1_trl.settings import check_value


def run(argv: Sequence[str]) -> int:
    """Serve until told to end; returns the exit code."""
    arguments = make_parser().read(argv)
    with users_mistakes():
        check_value("--port", arguments.port, Port)
    from agent_r1_trl.features.search.server import make_app
    from agent_r1_trl.tools.search import open_retriever

    with users_mistakes():
        retriever = open_retriever(arguments.corpus, flag="CORPUS")

    def show(url: str) -> None:
        curl = f"curl -s {url}/retrieve -H 'Content-Type: application/json'"
        print(f'{retriever!r}\nretriever: {url}\n{curl} -d \'{{"queries": ["..."], "topk": 3}}\'', flush=True)

    serve_app(make_app(retriever), arguments.host, arguments.port, show)
    return 0


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser("agent-r1-trl serve-retriever", __doc__)
    parser.add_argument("corpus", metavar="CORPUS", help="A JSONL file.")
    parser.add_argument("--host", default="127.0.0.1", help="Address; 0.0.0.0 for other machines (127.0.0.1).")
    parser.add_argument("--port", type=int, default=8010, help="Port; 0 for a free one (8010).")
    return parser
