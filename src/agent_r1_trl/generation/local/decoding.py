"""One batch of rows that are being sampled: forward passes with a key/value cache whose rows come and go.

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

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument that is a model's cache: from transformers 5.24 on, before, and before in Mamba's."""


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
        self.cache = cache
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
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


def can_hold(config: PretrainedConfig) -> bool:
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

    def open_column(self) -> torch.Tensor:
        """Make room for one more token in every row; returns the mask with it, (B, end + 1)."""
        if self.end == self._mask.shape[1]:
            self._rebuild(list(range(len(self._mask))))
        self._mask[:, self.end] = 1
        return self._mask[:, : self.end + 1]

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

    @cached_property
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
        self._num_bytes = 0

    def put(self, row: ParkedRow) -> None:
        """Keep a row; the oldest ones make room."""
        self._rows.append(row)
        self._num_bytes += row.num_bytes
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= self._rows.pop(0).num_bytes

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
            self._rows = [row for row in self._rows if row is not best]
            self._num_bytes -= best.num_bytes
        return best

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self._num_bytes = [], 0


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, afterwards exactly the modules that were training train again.

    Eval mode also keeps the cache: transformers drops it in training mode under gradient checkpointing. A plain
    `model.train()` afterwards would be wrong: a frozen reference adapter, say, was in eval mode before.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class ModelRunner:
    """Forward passes of a causal LM over rows that come and go.

    Rows are addressed by their index; `drop_rows` says how the indices change. For models with recurrent state rows
    cannot join a running batch (`accepts_rows`), nor leave it early.
    """

    def __init__(self, model: nn.Module, pad_token_id: int) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        base: Any = getattr(model, "get_base_model", lambda: model)()
        self.what_it_needs = (
            f"{type(base).__name__} fails in the transformers generator, which samples with a cache, from rows "
            "padded on the left. Set use_vllm=True if vLLM has it, or take another model"
        )
        """End of a message about a model that has sampled nothing yet."""
        self.has_decoded = False
        """Whether a decode step has worked, so that no later failure is the architecture's."""
        self.can_move_rows = can_hold(base.config)
        """Whether rows can join a running batch, leave it, and be continued later."""
        self.config = base.config
        parameters = dict(inspect.signature(base.forward).parameters)
        if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):  # it may stand for the class's
            parameters |= inspect.signature(type(base).forward).parameters
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # With them a model computes the loss of its router, which compares the tokens of a pass with the whole mask.
        has_router_logits = getattr(base.config.get_text_config(), "output_router_logits", False)
        self._options: dict[str, Any] = {"output_router_logits": False} if has_router_logits else {}
        # What a model does not name goes into its **kwargs, and it would read each token as if it were the first.
        names = [name for name in CACHE_NAMES if name in parameters]
        if not names:
            raise ValueError(
                f"{type(base).__name__}: its forward takes none of {', '.join(CACHE_NAMES)}, so it would sample "
                "without the earlier tokens. Set use_vllm=True if vLLM has it, or take another model."
            )
        self._cache_name = names[0]
        self.device = base.get_input_embeddings().weight.device
        self.clear()

    def clear(self) -> None:
        """Forget all rows and free their cache."""
        self._rows = RowCache()
        self._fixed: tuple[DynamicCache, torch.Tensor] | None = None
        self._lengths = torch.zeros(0, 1, dtype=torch.long, device=self.device)  # (B, 1)

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return self._lengths.shape[0]

    @property
    def accepts_rows(self) -> bool:
        """Whether `prefill` may be called now."""
        return self.can_move_rows or self.num_rows == 0

    def prefill(self, sequences: list[list[int]], parked: list[ParkedRow] | None = None) -> torch.Tensor:
        """Add rows and return the logits after each of them, (n, V).

        Equal sequences (the members of a group) go through the model once. With `parked`, only the ids that the
        sequences add to the parked rows do. All rows then pass the same number of tokens: a row that adds fewer
        passes its last known ones again, which costs no more than padding and leaves no holes between old and new
        columns.
        """
        if parked is None:
            places = {tuple(sequence): None for sequence in sequences}
            distinct = [list(sequence) for sequence in places] if self.can_move_rows else sequences
            index_of = {sequence: index for index, sequence in enumerate(places)}
            copies = [index_of[tuple(sequence)] for sequence in sequences]
            known = [0] * len(distinct)
        else:
            distinct, copies = sequences, list(range(len(sequences)))
            num_new = max(len(sequence) - len(row.ids) for sequence, row in zip(sequences, parked, strict=True))
            known = [max(0, len(sequence) - num_new) for sequence in sequences]
        logits, cache, mask = self._pass(distinct, known, parked)
        lengths = mask.sum(dim=1, keepdim=True)
        if self.can_move_rows:
            self._rows.add_rows(cache, mask, copies)
            logits, lengths = logits[copies], lengths[copies]
        else:
            self._fixed = (cache, mask)
        self._lengths = torch.cat([self._lengths, lengths])
        return logits

    def _pass(
        self, sequences: list[list[int]], known: list[int], parked: list[ParkedRow] | None
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        """Run the ids after the first `known[i]` of each sequence: logits (n, V), the cache, its mask (n, L)."""
        num_known = max(known)
        num_new = max(len(sequence) - skipped for sequence, skipped in zip(sequences, known, strict=True))
        ids = [
            [self.pad_token_id] * (num_new - (len(sequence) - skipped)) + sequence[skipped:]
            for sequence, skipped in zip(sequences, known, strict=True)
        ]
        width = num_known + num_new
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=self.device).unsqueeze(1)  # (n, 1)
        positions = torch.arange(width, device=self.device) - (width - lengths)  # (n, L)
        mask = (positions >= 0).long()
        if parked is not None and num_known > 0:
            cache = join_rows([row.tensors for row in parked], known)
        else:
            cache = DynamicCache() if self.can_move_rows else DynamicCache(config=self.config)
        new_positions = positions[:, num_known:].clamp(min=0)
        return self._forward(ids, mask, new_positions, cache, **self._prefill_options), cache, mask

    def park(self, row: int, ids: list[int]) -> ParkedRow:
        """A copy of a row for a later `prefill`; `ids` are all its ids, even if the last one has not been read yet."""
        tensors = self._rows.copy_row(row)
        return ParkedRow(ids=ids[: tensors[0].shape[1]], tensors=tensors)

    def decode(self, token_ids: list[int]) -> torch.Tensor:
        """Append one token to every row and return the logits after it, (B, V)."""
        ids = [[token_id] for token_id in token_ids]
        if self._fixed is not None:
            cache, mask = self._fixed
            mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=1)
            self._fixed = (cache, mask)
            # A state holds no padding that is to be masked, and Mamba would take the mask for that of the new tokens.
            has_attention = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
            logits = self._forward(ids, mask if has_attention else None, self._lengths, cache)
        else:
            logits = self._forward(ids, self._rows.open_column(), self._lengths, self._rows)
            self._rows.close_column()
        self._lengths = self._lengths + 1
        self.has_decoded = True
        return logits

    def drop_rows(self, dropped: list[int]) -> list[int]:
        """Remove rows that need no more tokens; returns the former index of each remaining row.

        All stay if they cannot be moved and one is needed.
        """
        if len(set(dropped)) == self.num_rows:
            self.clear()
            return []
        if self._fixed is not None:
            return list(range(self.num_rows))
        order = self._rows.drop_rows(dropped)
        self._lengths = self._lengths[order]
        return order

    def _forward(
        self, ids: list[list[int]], mask: torch.Tensor | None, positions: torch.Tensor, cache: Cache, **options: object
    ) -> torch.Tensor:
        """Logits at the last position, (n, V)."""
        output = self.model(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache, **self._options, **options},
        )
        return output.logits[:, -1]
