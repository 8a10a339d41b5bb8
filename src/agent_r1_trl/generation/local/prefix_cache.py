"""Keys and values of rows that have ended, for the next turn of the same trajectory.

The next turn's prompt begins with everything the last turn saw and sampled, so only what is new since then (the tool
results) has to go through the model. They are stale once the weights change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class ParkedRow:
    """A row without its place in a batch."""

    ids: list[int]
    """(N,) the ids whose keys and values these are."""
    tensors: list[torch.Tensor]
    """Keys and values of layer 0, keys and values of layer 1, ...; each (heads, N, head size)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class PrefixCache:
    """The most recent parked rows, as many as fit; a row is handed out once.

    Args:
        max_bytes: of all rows together.

    >>> cache = PrefixCache(max_bytes=9)
    >>> for ids in ([1, 2], [1, 2, 3], [9]):
    ...     cache.put(ParkedRow(ids=ids, tensors=[torch.zeros(1, len(ids), 2, dtype=torch.uint8)]))
    >>> cache.take([1, 2, 3, 4]).ids, cache.take([1, 2, 3, 4]), cache.take([9])
    ([1, 2, 3], None, None)
    """

    _TAIL = 8

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._rows: list[ParkedRow] = []

    def put(self, row: ParkedRow) -> None:
        """Keep a row; the oldest ones make room."""
        self._rows.append(row)
        while sum(kept.num_bytes for kept in self._rows) > self.max_bytes:
            del self._rows[0]

    def take(self, ids: list[int]) -> ParkedRow | None:
        """The longest row that `ids` continues by at least one token, removed."""
        best = None
        for row in self._rows:
            length = len(row.ids)
            if length >= len(ids) or (best is not None and length <= len(best.ids)):
                continue
            # Rows of one group begin alike, so comparing from the end fails sooner.
            tail = max(0, length - self._TAIL)
            if ids[tail:length] == row.ids[tail:] and ids[:tail] == row.ids[:tail]:
                best = row
        self._rows = [row for row in self._rows if row is not best]
        return best

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = []
