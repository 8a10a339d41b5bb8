r"""A retriever behind HTTP, in the protocol of Search-R1, which many retrieval servers speak.

    POST /retrieve {"queries": ["capital of Norway"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\"Oslo\"\nThe capital of Norway."}, "score": 11.2}]]}

Without scores the documents stand alone: {"result": [[{"id": ..., "contents": ...}]]}. Our own server's documents have
their `title` as well, so that the first line of a text without a title is not taken for one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from agent_r1_trl.settings import Count, Seconds, check_value
from agent_r1_trl.tools.faults import OVERLOADED_OR_GONE, InfrastructureError
from agent_r1_trl.tools.search import Passage, check_search
from agent_r1_trl.tools.search_corpus import join_contents, split_contents

if TYPE_CHECKING:
    import httpx

MAX_QUERY_CHARS = 10_000
RETRY_WAIT_S = 0.5
"""Before the second attempt, about; doubled each time, up to `MAX_RETRY_WAIT_S`."""
MAX_RETRY_WAIT_S = 8.0
NUM_KEPT = 10_000
"""Searches whose results are kept, the last ones used."""
_AGAIN = (408, 425, 500, *OVERLOADED_OR_GONE)


class HttpRetriever:
    """Search on another machine; may be used from many threads at once.

    What fails after all attempts is an `InfrastructureError`, which ends the trajectory and is never charged to the
    policy. A request that the server refuses is made again with each query alone, so that one query that it cannot
    stand spoils no other trajectory.

    Args:
        url: address of the server; without a path, `/retrieve` is added.
        timeout_s: seconds that one request may take.
        attempts: how often a request is made when the connection fails or the server is overloaded.
        max_connections: requests under way at the same time, and connections kept open.
        max_batch: queries of one request.
        headers: of every request, such as {"Authorization": ...}.

    Raises:
        ValueError: the address is none, or a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        attempts: int = 3,
        max_connections: int = 4,
        max_batch: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = full_url(url)
        check_value("timeout_s", timeout_s, Seconds)
        for label, value in {"attempts": attempts, "max_connections": max_connections, "max_batch": max_batch}.items():
            check_value(label, value, Count)
        self.timeout_s, self.attempts, self.max_connections = timeout_s, attempts, max_connections
        self.max_batch, self.headers = max_batch, dict(headers or {})
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._made: httpx.Client | None = None
        batcher = QueryBatcher(self._send, max_flights=self.max_connections, max_batch=self.max_batch)
        self._ask_or_remember = functools.lru_cache(NUM_KEPT)(batcher.search)

    def search(self, query: str, k: int = 3) -> list[Passage]:
        """The best `k` passages, best first.

        Raises:
            ValueError: `k` is not an integer >= 1, or `query` is not a string.
            InfrastructureError: the server cannot be reached, refuses, or answers in another form.
        """
        check_search(query, k)
        if self._owner != os.getpid():  # a fork has neither the threads nor the connections
            self._start()
        query = query[:MAX_QUERY_CHARS].encode("utf-8", errors="replace").decode("utf-8")
        if not query.strip():
            return []
        try:
            return list(self._ask_or_remember(query, k)[:k])
        except _RequestError as error:
            raise InfrastructureError(f"retriever={self.url!r}: {error}.") from error

    def __repr__(self) -> str:
        return f"HttpRetriever({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # ---------------------------------------------------------------- requests

    def _send(self, queries: list[str], k: int) -> list[list[Passage] | _RequestError]:
        """The passages of each query, or what it failed with."""
        try:
            return list(self._ask(queries, k, self.attempts))
        except _RequestError as error:
            if not error.is_answered or len(queries) == 1:
                raise
        answers: list[list[Passage] | _RequestError] = []
        for query in queries:
            try:
                answers += self._ask([query], k, attempts=1)
            except _RequestError as failure:
                answers.append(failure)
                if not failure.is_answered:  # the server is gone: it is not waited for once per query
                    return answers + [failure] * (len(queries) - len(answers))
        return answers

    def _ask(self, queries: list[str], k: int, attempts: int) -> list[list[Passage]]:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _RequestError) and error.is_repeatable),
            stop=stop_after_attempt(attempts),
            wait=wait_exponential(RETRY_WAIT_S, max=MAX_RETRY_WAIT_S) + wait_random(0, RETRY_WAIT_S / 2),
            reraise=True,
        )
        return retrying(self._ask_once, queries, k)

    def _ask_once(self, queries: list[str], k: int) -> list[list[Passage]]:
        import httpx

        body = {"queries": queries, "topk": k, "return_scores": True}
        try:
            response = self._client().post(self.url, json=body)
        except httpx.HTTPError as error:
            text = f"no answer ({type(error).__name__}: {error})"
            raise _RequestError(text, is_repeatable=True, is_answered=False) from error
        if response.status_code != 200:
            text = f"answered with status {response.status_code}: {response.text[:200]!r}"
            raise _RequestError(text, is_repeatable=response.status_code in _AGAIN)
        try:
            return read_answer(response.json(), len(queries))
        except ValueError as error:
            raise _RequestError(f"{error}. Is this a server of Search-R1's protocol?") from error

    def _client(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._made is None:
                limits = httpx.Limits(max_connections=self.max_connections)
                self._made = httpx.Client(
                    timeout=self.timeout_s, limits=limits, headers=self.headers, follow_redirects=True
                )
            return self._made


class _RequestError(Exception):
    """A request that failed; `is_answered` if the server is there."""

    def __init__(self, message: str, *, is_repeatable: bool = False, is_answered: bool = True) -> None:
        super().__init__(message)
        self.is_repeatable, self.is_answered = is_repeatable, is_answered


# -------------------------------------------------------------------- few requests


@dataclass(eq=False)
class _Search:
    query: str
    k: int
    answer: Future[Any] = field(default_factory=Future)


class QueryBatcher:
    """Joins the searches of many threads into few requests, without a thread and without a delay of its own.

    A search that finds a free place leaves at once. Searches that come while all places are taken wait; as soon as one
    is free, one of them leaves and takes along as many of the others as one request may hold.

    Args:
        send: takes queries and the `k` that they share; returns an answer, or an exception, for each of them.
        max_flights: requests that are under way at the same time.
        max_batch: queries of one request.
    """

    def __init__(self, send: Callable[[list[str], int], Sequence[Any]], *, max_flights: int, max_batch: int) -> None:
        self._send, self._max_batch = send, max_batch
        self._num_places = max_flights
        self._waiting: list[_Search] = []
        self._changed = threading.Condition()

    def search(self, query: str, k: int) -> Any:
        """The answer to one query; blocks until it is there.

        Raises:
            Exception: what `send` raised or returned for this query.
        """
        mine = _Search(query, k)
        batch: list[_Search] = []
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: mine not in self._waiting or self._num_places > 0)
            if mine in self._waiting:
                others = [search for search in self._waiting if search is not mine and search.k == k]
                batch = [mine, *others][: self._max_batch]
                self._waiting = [search for search in self._waiting if search not in batch]
                self._num_places -= 1
                self._changed.notify_all()
        if batch:
            self._fly(batch)
        return mine.answer.result()

    def _fly(self, batch: list[_Search]) -> None:
        answers: Sequence[Any] = [RuntimeError("the search was interrupted")] * len(batch)  # Ctrl-C frees the others
        try:
            answers = self._send([search.query for search in batch], batch[0].k)
        except Exception as error:
            answers = [error] * len(batch)
        finally:
            for search, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    search.answer.set_exception(answer)
                else:
                    search.answer.set_result(answer)
            with self._changed:
                self._num_places += 1
                self._changed.notify_all()


# -------------------------------------------------------------------- the protocol


def read_answer(answer: Any, num_queries: int) -> list[list[Passage]]:
    """The passages of each query.

    Raises:
        ValueError: the answer has another form.
    """
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, list):
        raise ValueError(f'the answer must be {{"result": [...]}}, not {answer!r:.200}')
    if num_queries == 1 and not any(isinstance(hits, list) for hits in result) and result:
        result = [result]  # one list for the one query
    if len(result) != num_queries or not all(isinstance(hits, list) for hits in result):
        raise ValueError(f"the answer must have one list for each of {num_queries} queries, not {result!r:.200}")
    return [[read_hit(hit) for hit in hits] for hits in result]


def read_hit(hit: Any) -> Passage:
    """One search result: `{"document": ..., "score": ...}`, or the document alone.

    Raises:
        ValueError: there is no text in it.
    """
    score = hit.get("score", 0.0) if isinstance(hit, Mapping) else 0.0
    document = hit["document"] if isinstance(hit, Mapping) and "document" in hit else hit
    if isinstance(document, str):
        document = {"contents": document}
    text = (document.get("contents") or document.get("text")) if isinstance(document, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f'a result must be {{"document": {{"id", "contents"}}, "score"}}, not {hit!r:.200}')
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


# -------------------------------------------------------------------- addresses


def is_url(source: object) -> bool:
    """Whether it is an address of HTTP."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def full_url(url: str) -> str:
    """The address with its path.

    >>> full_url("http://10.0.0.7:8010")
    'http://10.0.0.7:8010/retrieve'

    Raises:
        ValueError: it is no address of HTTP.
    """
    try:
        parts = urlsplit(str(url))
        is_address = is_url(url) and bool(parts.hostname) and (parts.port or 1) > 0  # a port may be out of range
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(
            f"url={url!r}: is no address of HTTP. Pass an address such as http://127.0.0.1:8010/retrieve."
        )
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path="/retrieve"))
