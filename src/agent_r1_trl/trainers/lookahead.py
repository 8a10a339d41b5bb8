"""Looking ahead in the Trainer's batches, so that the next rollout can begin early (`overlap_rollout`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class Lookahead:
    """Passes on the batches of an epoch and can look at later ones, so that their rollout can begin early.

    Batches are counted in the Trainer's micro-steps, one batch each.
    """

    def __init__(self) -> None:
        self._source: Iterator[Any] | None = None
        self._batches: deque[Any] = deque()
        self._next_step = 0

    def over(self, source: Iterator[Any], step: int) -> Lookahead:
        """An iterator over `source`; if `source` is a new one, its next batch is that of micro-step `step`."""
        if source is not self._source:
            self._source, self._next_step = source, step
            self._batches.clear()
        return self

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Any:
        assert self._source is not None
        batch = self._batches.popleft() if self._batches else next(self._source)
        self._next_step += 1
        return batch

    def at(self, step: int) -> Any:
        """The batch of micro-step `step`, which must still be to come; None if it belongs to another epoch."""
        assert self._source is not None and step >= self._next_step
        while step - self._next_step >= len(self._batches):
            try:
                self._batches.append(next(self._source))
            except StopIteration:
                return None
        return self._batches[step - self._next_step]
