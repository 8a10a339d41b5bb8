"""A key/value cache whose rows come and go while the others go on.

All rows end at the same column, so one decode step writes one column. Columns before a row's own start are masked
(left padding). In the picture `.` is spare room, `-` is masked, `x` holds a token:

    row 0   . . x x x x x . . .
    row 1   . . - - x x x . . .      first = 2, end = 7: the model sees columns [first, end)

A row joins by copying its prefilled keys and values to the columns that end at `end`; a row leaves by moving the last
row into its place. transformers' own dynamic cache copies everything at every step (`torch.cat`); here a step writes
one column and hands out views.

Covered here: storage. Not covered: forward passes (`decoding.py`). Uses transformers' public cache classes.
"""

from __future__ import annotations

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
    """Keys and values of one layer: (row capacity, heads, column capacity, head size)."""

    is_sliding = False

    def __init__(self, window: RowCache) -> None:
        super().__init__()
        self.window = window
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new columns and return all visible ones, (B, heads, end - first + new, head size)."""
        window = self.window
        rows, first, end = window.num_rows, window.first, window.end
        after = end + key_states.shape[-2]
        assert self.keys is not None and self.values is not None
        self.keys[:rows, :, end:after] = key_states
        self.values[:rows, :, end:after] = value_states
        return self.keys[:rows, :, first:after], self.values[:rows, :, first:after]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.first

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
        self.num_rows = 0
        self.first = 0
        self.end = 0
        self.starts: list[int] = []
        """First column of each row."""
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        """(row capacity, column capacity), 1 where a row has a token."""

    def visible_mask(self, num_new: int = 0) -> torch.Tensor:
        """(B, end - first + num_new), 1 where a row has a token."""
        return self._mask[: self.num_rows, self.first : self.end + num_new]

    def open_column(self) -> None:
        """Make room for one more token in every row and unmask it."""
        if self.end == self._mask.shape[1]:
            self._reallocate(self._mask.shape[0], self.end - self.first)
        self._mask[: self.num_rows, self.end] = 1

    def close_column(self) -> None:
        """The column opened last now holds a token of every row."""
        self.end += 1

    def add_rows(self, prefilled: DynamicCache, mask: torch.Tensor, copies: list[int]) -> None:
        """Append rows.

        Args:
            prefilled: cache of a forward pass over the new rows, left padded.
            mask: (n, L), 1 where the rows have a token.
            copies: for each row to append, its index in the two above; a row may be appended several times.
        """
        length = mask.shape[1]
        if not self.layers:
            self._create(prefilled, len(copies), length, mask.device)
        if self.num_rows == 0:
            self.first = self.end = min(length + _slack(length), self._mask.shape[1])
        rows, needed_rows = self.num_rows, self.num_rows + len(copies)
        if self.end < length or needed_rows > self._mask.shape[0]:
            self._reallocate(max(needed_rows, min(2 * rows, rows + 64)), max(length, self.end - self.first))
        begin, end = self.end - length, self.end
        is_plain = copies == list(range(len(mask)))
        for layer, source in zip(self.layers, prefilled.layers, strict=True):
            for buffer, new in zip(layer.tensors(), (source.keys, source.values), strict=True):
                buffer[rows:needed_rows, :, begin:end] = new if is_plain else new[copies]
        mask = mask[copies]
        self._mask[rows:needed_rows] = 0
        self._mask[rows:needed_rows, begin:end] = mask
        self.starts.extend((end - mask.sum(dim=1)).tolist())
        self.num_rows = needed_rows
        self.first = min(self.starts)

    def copy_row(self, row: int) -> list[torch.Tensor]:
        """Keys and values of one row, layer by layer, each (heads, its length, head size)."""
        columns = slice(self.starts[row], self.end)
        return [buffer[row, :, columns].clone() for layer in self.layers for buffer in layer.tensors()]

    def drop_rows(self, dropped: list[int]) -> list[int]:
        """Remove rows; rows from the end take their places.

        Returns:
            For each remaining row, its index before the call.
        """
        gone = set(dropped)
        remaining = self.num_rows - len(gone)
        order = list(range(remaining))
        holes = [row for row in order if row in gone]
        movers = [row for row in range(remaining, self.num_rows) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            to = torch.tensor(holes, device=self._mask.device)
            source = torch.tensor(movers, device=self._mask.device)
            columns = slice(self.first, self.end)
            for layer in self.layers:
                for buffer in layer.tensors():
                    buffer[to, :, columns] = buffer[source, :, columns]
            self._mask[to] = self._mask[source]
        self.starts = [self.starts[row] for row in order]
        self.num_rows = remaining
        self.first = min(self.starts, default=self.end)
        return order

    def _create(self, prefilled: DynamicCache, num_rows: int, length: int, device: torch.device) -> None:
        """Buffers with the dtypes, devices and head sizes of a first prefill."""
        columns = length + 2 * _slack(length)
        self._mask = torch.zeros(num_rows, columns, dtype=torch.long, device=device)
        for source in prefilled.layers:
            layer = _BufferLayer(self)
            # zeros, not empty: a masked NaN would still poison the product with the values.
            layer.keys, layer.values = (
                torch.zeros(num_rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device)
                for like in (source.keys, source.values)
            )
            self.layers.append(layer)

    def _reallocate(self, row_capacity: int, width: int) -> None:
        """Move the visible rows and columns to buffers that hold `width` columns and spare ones on both sides."""
        rows, first, end = self.num_rows, self.first, self.end
        slack = _slack(width)
        new_end = slack + width
        shift = new_end - end

        def moved(buffer: torch.Tensor, column_dim: int) -> torch.Tensor:
            shape = list(buffer.shape)
            shape[0], shape[column_dim] = row_capacity, new_end + slack
            larger = buffer.new_zeros(shape)
            used = buffer[:rows].narrow(column_dim, first, end - first)
            larger[:rows].narrow(column_dim, first + shift, end - first).copy_(used)
            return larger

        for layer in self.layers:
            keys, values = layer.tensors()
            layer.keys, layer.values = moved(keys, 2), moved(values, 2)
        self._mask = moved(self._mask, 1)
        self.first, self.end = first + shift, new_end
        self.starts = [start + shift for start in self.starts]


def _slack(length: int) -> int:
    """Spare columns on each side: enough that reallocation is rare."""
    return max(64, length // 4)
