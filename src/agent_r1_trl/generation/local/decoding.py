"""One batch of rows that are being sampled: forward passes with a cache, left padding, position ids, eval mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from agent_r1_trl.generation.local.kv_cache import ParkedRow, RowCache, can_hold, join_rows


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
        self.can_move_rows = can_hold(base.config)
        """Whether rows can join a running batch, leave it, and be continued later."""
        self.config = base.config
        self._prefill_options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(base.forward).parameters:
            self._prefill_options["logits_to_keep"] = 1
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
            logits = self._forward(ids, mask, self._lengths, cache)
        else:
            self._rows.open_column()
            logits = self._forward(ids, self._rows.visible_mask(1), self._lengths, self._rows)
            self._rows.close_column()
        self._lengths = self._lengths + 1
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
        self, ids: list[list[int]], mask: torch.Tensor, positions: torch.Tensor, cache: Any, **options: Any
    ) -> torch.Tensor:
        """Logits at the last position, (n, V)."""
        output = self.model(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        return output.logits[:, -1]
