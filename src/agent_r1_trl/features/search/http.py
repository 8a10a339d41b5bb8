r"""A retriever behind HTTP, in the protocol of Search-R1, which many retrieval servers speak.

    POST /retrieve {"queries": ["capital of Norway"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\"Oslo\"\nThe capital of Norway."}, "score": 11.2}]]}

Without scores the documents stand alone: {"result": [[{"id": ..., "contents": ...}]]}. Where documents have their
`title` as well, the first line of a text without a title is not taken for one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from agent_r1_trl.settings import Count, Seconds, check_value
from agent_r1_trl.tools.faults import OVERLOADED_OR_GONE, InfrastructureError
from agent_r1_trl.tools.search import Passage, check_search, join_contents, split_contents

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
    policy.

    Args:
        url: address of the server; without a path, `/retrieve` is added.
        timeout_s: seconds that one request may take.
        attempts: how often a request is made when the connection fails or the server is overloaded.
        max_connections: requests in flight at the same time, and connections kept open.
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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = full_url(url)
        check_value("timeout_s", timeout_s, Seconds)
        for label, value in {"attempts": attempts, "max_connections": max_connections}.items():
            check_value(label, value, Count)
        self.timeout_s = timeout_s
        self.attempts = attempts
        self.max_connections = max_connections
        self.headers = {name: str(value) for name, value in (headers or {}).items()}  # a recipe's may be a number
        if not all(text.isascii() and text.isprintable() for pair in self.headers.items() for text in pair):
            raise ValueError(f"headers: {', '.join(self.headers)}: must be printable ASCII. Correct name or value.")
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._made: httpx.Client | None = None
        self._places = threading.BoundedSemaphore(self.max_connections)
        self._ask_or_remember = functools.lru_cache(NUM_KEPT)(self._ask)

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

    def _ask(self, query: str, k: int) -> list[Passage]:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _RequestError) and error.is_repeatable),
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(RETRY_WAIT_S, max=MAX_RETRY_WAIT_S) + wait_random(0, RETRY_WAIT_S / 2),
            reraise=True,
        )
        with self._places:
            return retrying(self._ask_once, query, k)

    def _ask_once(self, query: str, k: int) -> list[Passage]:
        import httpx

        body = {"queries": [query], "topk": k, "return_scores": True}
        try:
            response = self._client().post(self.url, json=body)
        except httpx.HTTPError as error:
            raise _RequestError(f"no answer ({type(error).__name__}: {error})", is_repeatable=True) from error
        if response.status_code != 200:
            text = f"answered with status {response.status_code}: {response.text[:200]!r}"
            raise _RequestError(text, is_repeatable=response.status_code in _AGAIN)
        try:
            return read_answer(response.json())
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
    """A request that failed."""

    def __init__(self, message: str, *, is_repeatable: bool = False) -> None:
        super().__init__(message)
        self.is_repeatable = is_repeatable


# -------------------------------------------------------------------- the protocol


def read_answer(answer: object) -> list[Passage]:
    """The passages of the one query.

    Raises:
        ValueError: the answer has another form.
    """
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, list):
        raise ValueError(f'the answer must be {{"result": [...]}}, not {answer!r:.200}')
    if not any(isinstance(hits, list) for hits in result) and result:
        result = [result]  # some servers give one query one list
    if len(result) != 1 or not isinstance(result[0], list):
        raise ValueError(f"the answer must have one list for the one query, not {result!r:.200}")
    return [read_hit(hit) for hit in result[0]]


def read_hit(hit: Any) -> Passage:
    """One search result: `{"document": ..., "score": ...}`, or the document alone.

    Raises:
        ValueError: there is no text in it.
    """
    score = hit.get("score", 0.0) if isinstance(hit, Mapping) else 0.0
    document = hit["document"] if isinstance(hit, Mapping) and "document" in hit else hit
    if isinstance(document, str):
        document = {"contents": document}
    texts = [document.get(key) for key in ("contents", "text")] if isinstance(document, Mapping) else []
    text = next((text for text in texts if text), "" if "" in texts else None)  # a page may be empty
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


def full_url(url: str) -> str:
    """The address with its path.

    >>> full_url("http://10.0.0.7:8010")
    'http://10.0.0.7:8010/retrieve'

    Raises:
        ValueError: it is no address of HTTP.
    """
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        is_http = parts.scheme in ("http", "https")
        is_address = is_http and bool(parts.hostname) and (parts.port or 1) > 0  # a port may be out of range
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(
            f"url={url!r}: is no address of HTTP. Pass an address such as http://127.0.0.1:8010/retrieve."
        )
    return urlunsplit(parts if parts.path.strip("/") else parts._replace(path="/retrieve"))
