r"""Search-R1's protocol between a retriever and those who search, as JSON; both ends read and write it here.

    POST /retrieve {"queries": ["capital of Norway"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\"Oslo\"\nThe capital of Norway."}, "score": 11.2}]]}

Without scores the documents stand alone: {"result": [[{"id": ..., "contents": ...}]]}. Some servers take one query,
{"query": "...", "topk": 3, "return_scores": true}, and answer with one list, inside another or not. Our own documents
have their `title` as well, so that the first line of a text without a title is not taken for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.tools.search import Passage
from agent_r1_trl.tools.search_corpus import join_contents, split_contents

MAX_QUERIES = 4096
MAX_K = 1000
DEFAULT_K = 3


class ProtocolError(ValueError):
    """A request or an answer does not have the form of the protocol."""


def make_request(queries: Sequence[str], k: int, *, singular: bool = False) -> dict[str, Any]:
    """The body of a request; with `singular`, of one for the first query alone."""
    asked: dict[str, Any] = {"query": queries[0]} if singular else {"queries": list(queries)}
    return {**asked, "topk": k, "return_scores": True}


@dataclass(kw_only=True, frozen=True)
class Request:
    """What a client asks a server."""

    queries: list[str]
    k: int
    with_scores: bool


def read_request(body: Any) -> Request:
    """A request with several queries or one. Three passages each, and no scores, unless it says otherwise.

    Raises:
        ProtocolError: the request has another form.
    """
    if not isinstance(body, Mapping):
        raise ProtocolError(f'a request must be {{"queries": [...], "topk": 3}}, not {body!r:.200}')
    queries = [body["query"]] if "query" in body and "queries" not in body else body.get("queries")
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ProtocolError(f"'queries' must be a list of strings, not {queries!r:.200}")
    if len(queries) > MAX_QUERIES:
        raise ProtocolError(f"'queries' has {len(queries)} items, at most {MAX_QUERIES} are answered at once")
    k = body.get("topk")
    k = DEFAULT_K if k is None else k
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ProtocolError(f"'topk' must be a whole number from 1 to {MAX_K}, not {k!r:.200}")
    return Request(queries=queries, k=k, with_scores=bool(body.get("return_scores")))


def read_answer(answer: Any, num_queries: int) -> list[list[Passage]]:
    """The passages of each query.

    Raises:
        ProtocolError: the answer has another form.
    """
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, list):
        raise ProtocolError(f'the answer must be {{"result": [...]}}, not {answer!r:.200}')
    if num_queries == 1 and not any(isinstance(hits, list) for hits in result) and result:
        result = [result]  # one list for the one query
    if len(result) != num_queries or not all(isinstance(hits, list) for hits in result):
        raise ProtocolError(f"the answer must have one list for each of {num_queries} queries, not {result!r:.200}")
    return [[read_hit(hit) for hit in hits] for hits in result]


def read_hit(hit: Any) -> Passage:
    """One search result: `{"document": ..., "score": ...}`, or the document alone.

    Raises:
        ProtocolError: there is no text in it.
    """
    score = hit.get("score", 0.0) if isinstance(hit, Mapping) else 0.0
    document = hit["document"] if isinstance(hit, Mapping) and "document" in hit else hit
    if isinstance(document, str):
        document = {"contents": document}
    text = (document.get("contents") or document.get("text")) if isinstance(document, Mapping) else None
    if not isinstance(text, str):
        raise ProtocolError(f'a result must be {{"document": {{"id", "contents"}}, "score"}}, not {hit!r:.200}')
    title, body = document.get("title"), text
    if not isinstance(title, str):
        title, body = split_contents(text)
    elif text.startswith(start := join_contents(title, "")):
        body = text[len(start) :]
    identifier = document.get("id")
    if identifier is None:  # results of a web search; the same page is the same passage
        identifier = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return Passage(id=str(identifier), title=title, text=body, score=float(score) if is_number else 0.0)


def write_hit(passage: Passage, *, with_score: bool) -> dict[str, Any]:
    """One search result as JSON."""
    contents = join_contents(passage.title, passage.text)
    document = {"id": passage.id, "title": passage.title, "contents": contents}
    return {"document": document, "score": passage.score} if with_score else document
