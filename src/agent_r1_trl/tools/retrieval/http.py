"""A retriever behind HTTP, in Search-R1's protocol (see `protocol.py`).

Connections stay open, searches of many threads share requests, answers are kept, lost requests are repeated.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from agent_r1_trl.tools.faults import OVERLOADED_OR_GONE, InfrastructureError
from agent_r1_trl.tools.retrieval.batching import QueryBatcher
from agent_r1_trl.tools.retrieval.protocol import ProtocolError, make_request, read_answer
from agent_r1_trl.tools.search import Passage, check_search

if TYPE_CHECKING:
    import httpx

DIALECTS = ("auto", "queries", "query")
MAX_QUERY_CHARS = 10_000
MAX_RETRY_WAIT_S = 8.0
_AGAIN = (408, 425, 500, *OVERLOADED_OR_GONE)
_NOT_THIS_FORM = (400, 422)


class HttpRetriever:
    """Search on another machine; may be used from many threads at once.

    What fails after all attempts is an `InfrastructureError`, which ends the trajectory and is never charged to the
    policy. A request that the server refuses is made again with each query alone, so that one query that it cannot
    stand spoils no other trajectory.

    Args:
        url: address of the server; without a path, `/retrieve` is added.
        timeout_s: seconds that one request may take.
        attempts: how often a request is made when the connection fails or the server is overloaded.
        retry_wait_s: seconds before the second attempt; doubled each time, up to 8. A server's `Retry-After` goes
            first.
        max_connections: requests under way at the same time, and connections kept open.
        max_batch: queries of one request.
        cache_size: searches whose results are kept in this process, the last ones used; 0 for none.
        dialect: "queries" (several queries a request), "query" (one), or "auto": the first, and the second if the
            server refuses its form.
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
        retry_wait_s: float = 0.5,
        max_connections: int = 4,
        max_batch: int = 64,
        cache_size: int = 10_000,
        dialect: str = "auto",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = full_url(url)
        for label, value in {"timeout_s": timeout_s, "retry_wait_s": retry_wait_s}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3600:
                raise ValueError(f"{label}={value!r}: must be a number of seconds > 0. Set {label} to such a number.")
        counts = {"attempts": attempts, "max_connections": max_connections, "max_batch": max_batch}
        for label, value, least in [
            *((label, value, 1) for label, value in counts.items()),
            ("cache_size", cache_size, 0),
        ]:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{label}={value!r}: must be an integer >= {least}. Set {label} to such a number.")
        if dialect not in DIALECTS:
            raise ValueError(
                f"dialect={dialect!r}: must be one of {', '.join(map(repr, DIALECTS))}. Set it to one of them."
            )
        self.timeout_s, self.attempts, self.retry_wait_s = timeout_s, attempts, retry_wait_s
        self.max_connections, self.max_batch, self.cache_size = max_connections, max_batch, cache_size
        self.dialect, self.headers = dialect, dict(headers or {})
        self._start()

    def _start(self) -> None:
        self._singular = self.dialect == "query"
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        max_batch = 1 if self._singular else self.max_batch
        self._batcher = QueryBatcher(self._send, max_flights=self.max_connections, max_batch=max_batch)
        self._owner = os.getpid()
        self._made: httpx.Client | None = None

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
        key = (query, k)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return list(self._kept[key])
        try:
            found: list[Passage] = self._batcher.search(query, k)[:k]
        except _RequestError as error:
            raise InfrastructureError(f"retriever={self.url!r}: {error}.") from error
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > self.cache_size:
                self._kept.popitem(last=False)
        return list(found)

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
        if self._singular:
            return list(self._ask(queries, k))
        try:
            return list(self._ask(queries, k))
        except _RefusedError as error:
            if self.dialect == "auto" and error.status in _NOT_THIS_FORM and self._takes_one(queries[0], k):
                self._singular, self._batcher.max_batch = True, 1
            elif len(queries) == 1:
                raise
        return self._ask_one_by_one(queries, k)

    def _ask_one_by_one(self, queries: list[str], k: int) -> list[list[Passage] | _RequestError]:
        answers: list[list[Passage] | _RequestError] = []
        for query in queries:
            try:
                answers += self._ask([query], k, attempts=1)
            except _RefusedError as error:
                answers.append(error)
            except _RequestError as error:  # the server is gone: it is not waited for once per query
                return answers + [error] * (len(queries) - len(answers))
        return answers

    def _takes_one(self, query: str, k: int) -> bool:
        try:
            self._ask_once(make_request([query], k, singular=True), 1)
        except _RequestError:
            return False
        return True

    def _ask(self, queries: list[str], k: int, *, attempts: int | None = None) -> list[list[Passage]]:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt

        body = make_request(queries, k, singular=self._singular)
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _RequestError) and error.is_repeatable),
            stop=stop_after_attempt(attempts or self.attempts),
            wait=self._wait_s,
            reraise=True,
        )
        return retrying(self._ask_once, body, len(queries))

    def _ask_once(self, body: dict[str, Any], num_queries: int) -> list[list[Passage]]:
        import httpx

        try:
            response = self._client().post(self.url, json=body)
        except httpx.HTTPError as error:
            raise _RequestError(f"no answer ({type(error).__name__}: {error})", is_repeatable=True) from error
        if response.status_code != 200:
            status, text = response.status_code, response.text[:200]
            raise _RefusedError(status, text, retry_after=response.headers.get("Retry-After"))
        try:
            return read_answer(response.json(), num_queries)
        except ProtocolError as error:
            raise _RequestError(f"{error}. Is this a server of Search-R1's protocol?") from error
        except ValueError as error:
            raise _RequestError(f"the answer is not JSON ({response.text!r:.100})") from error

    def _wait_s(self, state: Any) -> float:
        from tenacity import wait_exponential, wait_random

        asked = getattr(state.outcome.exception(), "retry_after_s", None)
        if asked is not None:
            return float(min(asked, MAX_RETRY_WAIT_S))
        wait = wait_exponential(self.retry_wait_s, max=MAX_RETRY_WAIT_S) + wait_random(0, self.retry_wait_s / 2)
        return float(wait(state))

    def _client(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._made is None:
                limits = httpx.Limits(
                    max_connections=self.max_connections, max_keepalive_connections=self.max_connections
                )
                self._made = httpx.Client(
                    timeout=self.timeout_s, limits=limits, headers=self.headers, follow_redirects=True
                )
            return self._made


class _RequestError(Exception):
    def __init__(self, message: str, *, is_repeatable: bool = False) -> None:
        super().__init__(message)
        self.is_repeatable = is_repeatable


class _RefusedError(_RequestError):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str, *, retry_after: str | None) -> None:
        super().__init__(f"answered with status {status}: {text!r}", is_repeatable=status in _AGAIN)
        self.status = status
        self.retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else None


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
    problem = "" if is_url(url) else "must begin with http:// or https://"
    try:
        parts = urlsplit(str(url))
        if not problem and not parts.hostname:
            problem = "names no host"
        _ = parts.port  # is computed, and may be out of range
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"url={url!r}: {problem}. Pass an address such as http://127.0.0.1:8010/retrieve.")
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path="/retrieve"))
