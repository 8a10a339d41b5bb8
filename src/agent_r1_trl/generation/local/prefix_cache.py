"""Keys and values of rows that have ended, for the next turn of the same trajectory.

The next turn's prompt begins with everything the last turn saw and sampled, so only what is new since then (the tool
results) has to go through the model. They are stale once the weights change, which `WeightsWatch` notices.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import nn


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
    """The most recent parked rows, up to a number of tokens; a row is handed out once.

    Args:
        max_tokens: of all rows together.
        free_bytes: rows that together need less memory than this are kept, however many tokens they have.

    >>> cache = PrefixCache(max_tokens=5)
    >>> for ids in ([1, 2], [1, 2, 3], [9]):
    ...     cache.put(ParkedRow(ids=ids, tensors=[]))
    >>> cache.take([1, 2, 3, 4]).ids, cache.take([1, 2, 3, 4]), cache.take([9])
    ([1, 2, 3], None, None)
    """

    _TAIL = 8

    def __init__(self, max_tokens: int, *, free_bytes: int = 0) -> None:
        self.max_tokens = max_tokens
        self._free_bytes = free_bytes
        self._rows: deque[ParkedRow] = deque()
        self._num_tokens = self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: ParkedRow) -> None:
        """Keep a row; the oldest ones make room."""
        self._rows.append(row)
        self._count(row, 1)
        while self._num_tokens > self.max_tokens and self._num_bytes >= self._free_bytes:
            self._count(self._rows.popleft(), -1)

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
        if best is not None:
            self._rows = deque(row for row in self._rows if row is not best)
            self._count(best, -1)
        return best

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self._num_tokens = self._num_bytes = 0

    def _count(self, row: ParkedRow, sign: int) -> None:
        self._num_tokens += sign * len(row.ids)
        self._num_bytes += sign * row.num_bytes


class WeightsWatch:
    """Notices that a model's weights have changed.

    PyTorch counts in-place changes of a tensor, but not those made through `.data`, as some optimisers do; therefore
    three values of every trainable weight are compared as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: tuple[list[int], torch.Tensor] | None = None

    def has_changed(self) -> bool:
        """Whether the weights are not those of the last call; True for the first one."""
        last, self._last = self._last, self._look()
        return last is None or last[0] != self._last[0] or not torch.equal(last[1], self._last[1])

    @torch.no_grad()
    def _look(self) -> tuple[list[int], torch.Tensor]:
        parameters = list(self._model.parameters())
        counts = [parameter.data_ptr() for parameter in parameters]
        counts += [parameter._version for parameter in parameters if not parameter.is_inference()]
        samples = [
            parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 2)][:3].float().cpu()
            for parameter in parameters
            if parameter.requires_grad and parameter.numel()
        ]
        return counts, torch.cat([torch.zeros(1), *samples])
