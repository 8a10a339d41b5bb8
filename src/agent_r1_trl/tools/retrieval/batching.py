"""Searches of many threads joined into few requests, without a thread and without a delay of its own.

A search that finds a free place leaves at once. Searches that come while all places are taken wait; as soon as one is
free, the first of them leaves and takes along as many of the others as one request may hold. Equal searches that are
under way at the same time are one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

Answers = Sequence[Any]
"""One item per query: what was found, or the exception that this query ends with."""


class QueryBatcher:
    """Calls `send` with several queries at once.

    Args:
        send: takes queries and the `k` that they share; returns one answer or exception for each of them.
        max_flights: requests that are under way at the same time.
        max_batch: queries of one request; may be changed at any time.
    """

    def __init__(self, send: Callable[[list[str], int], Answers], *, max_flights: int, max_batch: int) -> None:
        self.max_batch = max_batch
        self._send = send
        self._max_flights = max_flights
        self._lock = threading.Lock()
        self._num_flights = 0
        self._waiting: deque[_Search] = deque()
        self._under_way: dict[tuple[str, int], _Search] = {}

    def search(self, query: str, k: int) -> Any:
        """The answer to one query; blocks until it is there.

        Raises:
            Exception: what `send` raised or returned for this query.
        """
        key = (query, k)
        with self._lock:
            known = self._under_way.get(key)
            search = known or _Search(key)
            if known is None:
                self._under_way[key] = search
                if self._num_flights < self._max_flights:
                    self._num_flights += 1
                    search.lead([search])
                else:
                    self._waiting.append(search)
        if known is None:
            search.called.wait()
            if search.batch:
                self._fly(search.batch)
        return search.future.result()

    def _fly(self, batch: list[_Search]) -> None:
        answers: Answers = []
        try:
            answers = self._send([search.key[0] for search in batch], batch[0].key[1])
        except BaseException as error:
            answers = [error] * len(batch)
            if not isinstance(error, Exception):  # Ctrl-C, which must not leave the others waiting
                raise
        finally:
            self._land(batch, answers)

    def _land(self, batch: list[_Search], answers: Answers) -> None:
        with self._lock:
            for search in batch:
                del self._under_way[search.key]
            following = self._next_batch()
            if following:
                following[0].lead(following)
            else:
                self._num_flights -= 1
        for search, answer in zip(batch, answers, strict=True):
            search.end(answer)

    def _next_batch(self) -> list[_Search]:
        """Searches with the `k` of the one that waits longest; the others keep their order."""
        if not self._waiting:
            return []
        k = self._waiting[0].key[1]
        chosen = [search for search in self._waiting if search.key[1] == k][: max(1, self.max_batch)]
        taken = set(map(id, chosen))
        self._waiting = deque(search for search in self._waiting if id(search) not in taken)
        return chosen


class _Search:
    """A query under way: who waits for it, and, if its thread is to make the next request, for whom."""

    def __init__(self, key: tuple[str, int]) -> None:
        self.key = key
        self.batch: list[_Search] = []
        self.called = threading.Event()
        """Set when the thread that brought this query has to lead a batch, or when the answer is there."""
        self.future: Future[Any] = Future()

    def lead(self, batch: list[_Search]) -> None:
        self.batch = batch
        self.called.set()

    def end(self, answer: Any) -> None:
        if isinstance(answer, BaseException):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)
        self.called.set()
