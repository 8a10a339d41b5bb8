"""A key/value cache whose rows come and go while the others go on.

All rows end at the same column, so one decode step writes one column. Columns before a row's own first token are
masked (left padding). In the picture `-` is masked, `x` holds a token, `.` is spare room:

    row 0   x x x x x . . .
    row 1   - - x x x . . .      end = 5: the model sees columns [0, end)

Rows that join, leave or need more room make new buffers, as wide as the longest row. transformers' own dynamic cache
copies everything at every step (`torch.cat`); here a step writes one column and hands out views.

A row that has ended may be parked for the next turn of its trajectory, whose prompt begins with everything that the
last turn saw and sampled, so that only what is new (the tool results) has to go through the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def join_rows(rows: list[list[torch.Tensor]], lengths: list[int]) -> DynamicCache:
    """A left-padded cache of the first `lengths[i]` tokens of each row (as `RowCache.copy_row` returns them)."""
    longest = max(lengths)
    joined = []
    for tensors in zip(*rows, strict=True):
        heads, _, size = tensors[0].shape
        buffer = tensors[0].new_zeros(len(rows), heads, longest, size)
        for target, tensor, length in zip(buffer, tensors, lengths, strict=True):
            target[:, longest - length :] = tensor[:, :length]
        joined.append(buffer)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(joined[::2], joined[1::2], strict=True)):
        cache.update(keys, values, layer)
    return cache


class _BufferLayer(CacheLayerMixin):
    """Keys and values of one layer, each (B, heads, column capacity, head size)."""

    is_sliding = False

    def __init__(self, cache: RowCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.cache, self.keys, self.values = cache, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns and return all visible ones, (B, heads, end + new, head size)."""
        keys, values = self.tensors()
        after = self.cache.end + key_states.shape[-2]
        keys[:, :, self.cache.end : after] = key_states
        values[:, :, self.cache.end : after] = value_states
        return keys[:, :, :after], values[:, :, :after]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.end + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.end

    def get_max_length(self) -> int:
        return -1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values


def can_hold(config: Any) -> bool:
    """Whether the model's cache is plain attention in every layer, so that rows can be moved.

    A sliding window is kept by the mask alone here; recurrent state (linear attention) cannot be padded on the left.
    """
    layers = DynamicCache(config=config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class RowCache(Cache):
    """The cache of a batch whose rows come and go; see the module's picture."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.end = 0
        """Number of columns that are in use."""
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        """(B, column capacity), 1 where a row has a token."""

    def visible_mask(self, num_new: int = 0) -> torch.Tensor:
        """(B, end + num_new), 1 where a row has a token."""
        return self._mask[:, : self.end + num_new]

    def open_column(self) -> None:
        """Make room for one more token in every row and unmask it."""
        if self.end == self._mask.shape[1]:
            self._rebuild(list(range(len(self._mask))))
        self._mask[:, self.end] = 1

    def close_column(self) -> None:
        """The column opened last now holds a token of every row."""
        self.end += 1

    def add_rows(self, prefilled: DynamicCache, mask: torch.Tensor, copies: list[int]) -> None:
        """Append the rows `copies` of a left-padded forward pass; a row may be appended several times.

        `mask` is (n, L), 1 where the rows have a token.
        """
        if not self.layers:
            self._mask = mask.new_zeros(0, 0)
            for layer in prefilled.layers:
                self.layers.append(_BufferLayer(self, layer.keys[:0, :, :0], layer.values[:0, :, :0]))
        self._rebuild(list(range(len(self._mask))), (prefilled, mask, copies))

    def drop_rows(self, dropped: list[int]) -> list[int]:
        """Remove rows, and the columns that only they needed; returns the former index of each remaining row."""
        kept = [row for row in range(len(self._mask)) if row not in set(dropped)]
        self._rebuild(kept)
        return kept

    def copy_row(self, row: int) -> list[torch.Tensor]:
        """Keys and values of one row, layer by layer, each (heads, its length, head size)."""
        columns = slice(self.end - int(self._mask[row, : self.end].sum()), self.end)
        return [buffer[row, :, columns].clone() for layer in self.layers for buffer in layer.tensors()]

    def _rebuild(self, kept: list[int], new: tuple[DynamicCache, torch.Tensor, list[int]] | None = None) -> None:
        """Move the rows with these indices, and what `add_rows` was given, to buffers with spare columns."""
        parts = [(self._mask[:, : self.end], kept)] + ([new[1:]] if new else [])
        width = max(int(mask[rows].sum(dim=1).max()) if rows else 0 for mask, rows in parts)
        columns = width + max(64, width // 4)  # so many spare ones that this is rare

        def joined(sources: list[torch.Tensor], column_dim: int) -> torch.Tensor:
            shape = list(sources[0].shape)
            shape[0], shape[column_dim] = sum(len(rows) for _, rows in parts), columns
            # Zeros, not empty: a masked NaN would still poison the product with the values.
            buffer = sources[0].new_zeros(shape)
            begin = 0
            for source, (_, rows) in zip(sources, parts, strict=True):
                used = min(width, source.shape[column_dim])
                target = buffer[begin : begin + len(rows)].narrow(column_dim, width - used, used)
                target.copy_(source.narrow(column_dim, source.shape[column_dim] - used, used)[rows])
                begin += len(rows)
            return buffer

        for index, layer in enumerate(self.layers):
            old = [buffer[:, :, : self.end] for buffer in layer.tensors()]
            added = [new[0].layers[index].keys, new[0].layers[index].values] if new else []
            layer.keys, layer.values = (
                joined([buffer, *added[which : which + 1]], 2) for which, buffer in enumerate(old)
            )
        self._mask = joined([mask for mask, _ in parts], 1)
        self.end = width


# -------------------------------------------------------------------- rows that have ended


@dataclass(kw_only=True)
class ParkedRow:
    """A row without its place in a batch; stale once the weights change."""

    ids: list[int]
    """(N,) the ids whose keys and values these are."""
    tensors: list[torch.Tensor]
    """Keys and values of layer 0, keys and values of layer 1, ...; each (heads, N, head size)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class PrefixCache:
    """The most recent parked rows, as many as fit into `max_bytes`; a row is handed out once.

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
