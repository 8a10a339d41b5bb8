"""Searches of many threads joined into few requests, without a thread and without a delay of its own.

A search that finds a free place leaves at once. Searches that come while all places are taken wait; as soon as one is
free, one of them leaves and takes along as many of the others as one request may hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class _Search:
    query: str
    k: int
    answer: Future[Any] = field(default_factory=Future)


class QueryBatcher:
    """Calls `send` with several queries at once.

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
