"""Ragged trajectories in one row without padding, each common prefix computed once.

A padded batch of B rows becomes one row of the tokens that are needed: a row ends with the token before its last
scored one, and a row without any is excluded. With `share_prefixes`, rows that begin alike keep one copy of what they
have in common, in front of what differs, and so do these among themselves: the rows are the branches of a tree.

    padded              packed             packed, prefixes shared
    . p p a b c .       p p a b            p p a b
    . p p a d e .       p p a d            d
    . p p f g . .       p p f              f
    q q q h i j k       q q q h i j        q q q h i j

Every token keeps its distance to the tokens before it (`position_ids`) and sees exactly those (`packed_attention.py`
runs over segments), so log-probs, entropies, values and gradients are those of the padded batch up to rounding: the
keys, values and hidden states of what is shared receive the sum of their branches' gradients. The output head runs on
the scored positions alone, once where rows score the same token after the same tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from agent_r1_trl.update.kept_head import kept_head
from agent_r1_trl.update.packed_attention import SEGMENTS, attention_inputs

STEP, STEP_ON_CPU = 1024, 256
"""Tokens of a branch that one call of the attention computes; on a GPU calls cost more than what they compute."""


@dataclass(frozen=True)
class PackedSegment:
    """Consecutive tokens that see themselves causally and, before that, all tokens of earlier stretches."""

    start: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Start and end of each of these stretches, in their order."""


@dataclass
class Layout:
    """What stands where in a packed row; the model's attention and the critic read it."""

    segments: list[PackedSegment]
    """In order and without gaps."""
    scored: torch.Tensor
    """(B, T) bool: the completion tokens that need a log-prob or a value."""
    sources: torch.Tensor
    """(S,) index in the row of the tokens that predict scored ones."""
    copies: torch.Tensor
    """(number of scored tokens,) which of the S stands for each of them."""
    places: torch.Tensor
    """(number of scored tokens,) where each of them stands in the flattened (B, T)."""
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def mask(self, queries: int, keys: int, like: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """(queries, keys) additive: the last query sees all keys, each one before it one fewer; made once.

        PyTorch's attention copies a mask in every layer, and keeps the copy for the backward pass, if its dtype is
        not the one that is computed in (that of `like`, or autocast's) or its rows do not begin at multiples of 8
        numbers: this one's are so. With a `window` a query sees so many tokens, itself included.
        """
        dtype, device = like.dtype, like.device
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        name = (queries, keys, dtype, device, window)
        if name not in self._masks:
            closed = torch.full((queries, -(-keys // 8) * 8), float("-inf"), dtype=dtype, device=device)
            far = None if window is None else closed.tril(keys - queries - window)
            mask = closed.triu_(keys - queries + 1)
            self._masks[name] = (mask if far is None else mask.add_(far))[:, :keys]
        return self._masks[name]

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each segment."""
        return [segment.end - segment.start for segment in self.segments]

    @cached_property
    def seen(self) -> list[list[int]]:
        """For each segment, which others its prefix consists of; a stretch holds whole segments."""
        starts = [segment.start for segment in self.segments]
        return [
            [
                number
                for start, end in segment.prefix
                for number in range(bisect_left(starts, start), bisect_left(starts, end))
            ]
            for segment in self.segments
        ]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(1, S) -> (B, T), 0 where nothing is scored."""
        flat = values.new_zeros(self.scored.numel())  # by index: the gradient of a mask would make the host wait
        return flat.index_copy(0, self.places, values[0, self.copies]).view(self.scored.shape)


@dataclass(frozen=True)
class PackedBatch:
    """A padded batch of B rows with T completion columns, packed into one row of N tokens."""

    input_ids: torch.Tensor
    """(1, N)."""
    position_ids: torch.Tensor
    """(1, N), from 0 in every sequence."""
    labels: torch.Tensor
    """(1, S) the token that follows each of the layout's sources."""
    layout: Layout
    attention: dict[str, Any]
    """What the model's kind of attention is told besides."""
    kept_ids: torch.Tensor | None = None
    """(S, K) what each of the labels was drawn from, filled up with -1; None: the whole vocabulary."""

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model prepared by `use_packed_attention` is called with."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, "packed_layout": self.layout}
        return inputs | self.attention

    def for_another_pass(self) -> PackedBatch:
        """This row for another pass; the masks that the pass will make go away with it."""
        return replace(self, layout=replace(self.layout, _masks={}))


# -------------------------------------------------------------------- packing


@dataclass(frozen=True)
class _Piece:
    """A segment, and what it holds: the tokens `first` to `last` of some rows, the same in all of them."""

    segment: PackedSegment
    rows: list[int]
    first: int
    last: int


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    scored: torch.Tensor,
    kept_ids: torch.Tensor | None = None,
    *,
    share_prefixes: bool,
    attention: str = SEGMENTS,
) -> PackedBatch:
    """Pack a batch of prompts (padded on the left) and completions (padded on the right).

    Args:
        input_ids: (B, L), completions in the last T columns.
        attention_mask: (B, L).
        scored: (B, T) bool; padding is left out of it here.
        kept_ids: (B, T, K) what each token was drawn from, filled up with -1; None: the whole vocabulary.
        share_prefixes: keep one copy of what rows have in common at their beginning.
        attention: as `use_packed_attention` found it.
    """
    device, (num_rows, length) = input_ids.device, input_ids.shape
    ids, is_token, scored = input_ids.cpu(), attention_mask.cpu().bool(), scored.cpu().bool()
    num_prompt = length - scored.shape[1]
    scored = scored & is_token[:, num_prompt:]
    starts = is_token.int().argmax(dim=1).tolist()
    ends = needed_columns(scored, num_prompt).tolist()
    if not any(ends):  # a forward pass needs a token
        ends[0] = starts[0] + 1
    rows = {row: ids[row, starts[row] : ends[row]] for row in range(num_rows) if ends[row]}
    pieces = _share(rows) if share_prefixes else _put_one_after_another(rows)

    places = torch.zeros(num_rows, length, dtype=torch.long)  # index in the packed row
    for piece in pieces:
        here = torch.arange(piece.segment.start, piece.segment.end)
        for row in piece.rows:
            places[row, starts[row] + piece.first : starts[row] + piece.last] = here
    sources, labels = places[:, num_prompt - 1 : -1][scored], ids[:, num_prompt:][scored]
    copies, kept = torch.arange(len(sources)), None if kept_ids is None else kept_ids.cpu()[scored]
    if share_prefixes:
        alike = [sources[:, None], labels[:, None], *([] if kept is None else [kept])]
        alike, copies = torch.cat(alike, dim=1).unique(dim=0, return_inverse=True)
        sources, labels, kept = alike[:, 0], alike[:, 1], None if kept is None else alike[:, 2:].int()
    layout = Layout(
        segments=[part for piece in pieces for part in _in_steps(piece.segment, device)],
        scored=scored.to(device),
        sources=sources.to(device),
        copies=copies.to(device),
        places=scored.flatten().nonzero().squeeze(1).to(device),
    )
    packed_ids = torch.cat([rows[piece.rows[0]][piece.first : piece.last] for piece in pieces])[None].to(device)
    return PackedBatch(
        input_ids=packed_ids,
        position_ids=torch.cat([torch.arange(piece.first, piece.last) for piece in pieces])[None].to(device),
        labels=labels[None].to(device),
        layout=layout,
        attention=attention_inputs(attention, layout, packed_ids),
        kept_ids=None if kept is None else kept.to(device),
    )


def needed_columns(scored: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """(B,) the column behind the token that predicts a row's last scored one, of (B, T); 0 for a row without any."""
    last = scored.shape[1] - 1 - scored.flip(1).int().argmax(dim=1)  # (B,)
    return torch.where(scored.any(dim=1), num_prompt + last, 0)


def _put_one_after_another(rows: dict[int, torch.Tensor]) -> list[_Piece]:
    pieces, size = [], 0
    for row, ids in rows.items():
        pieces.append(_Piece(PackedSegment(size, size + len(ids)), [row], 0, len(ids)))
        size += len(ids)
    return pieces


def _share(rows: dict[int, torch.Tensor]) -> list[_Piece]:
    """The tree of these rows, what is common to several before what follows it."""
    tokens = {row: tuple(ids.tolist()) for row, ids in rows.items()}
    pieces: list[_Piece] = []
    size = 0
    waiting: list[tuple[list[int], int, tuple[tuple[int, int], ...]]] = []
    """Rows in the order of their tokens, how many tokens all of them share already, and where these stand."""

    def branch(row_numbers: list[int], depth: int, prefix: tuple[tuple[int, int], ...]) -> None:
        groups = [list(group) for _, group in groupby(row_numbers, key=lambda row: tokens[row][depth])]
        waiting.extend((group, depth, prefix) for group in reversed(groups))

    branch(sorted(rows, key=lambda row: tokens[row]), 0, ())
    while waiting:
        group, depth, prefix = waiting.pop()
        end = common_length(rows[group[0]].numpy(), rows[group[-1]].numpy())
        segment = PackedSegment(size, size + end - depth, prefix)
        pieces.append(_Piece(segment, group, depth, end))
        size = segment.end
        is_adjacent = bool(prefix) and prefix[-1][1] == segment.start
        joined = (prefix[-1][0], segment.end) if is_adjacent else (segment.start, segment.end)
        longer = [row for row in group if len(tokens[row]) > end]
        branch(longer, end, (*(prefix[:-1] if is_adjacent else prefix), joined))
    return pieces


def _in_steps(segment: PackedSegment, device: torch.device) -> Iterator[PackedSegment]:
    """A branch in short parts, each of which sees those before it.

    Attention under a mask computes what is masked, too: half of the square that a branch is by itself. A row without
    prefix needs no mask.
    """
    whole = segment.end - segment.start
    step = whole if not segment.prefix else STEP_ON_CPU if device.type == "cpu" else STEP
    for start in range(segment.start, segment.end, step):
        before = ((segment.start, start),) if start > segment.start else ()
        yield PackedSegment(start, min(start + step, segment.end), segment.prefix + before)


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens two rows, (n,) and (m,), have in common at their beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


# -------------------------------------------------------------------- forward passes


def packed_log_probs(model: Any, backbone: nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (B, T), 0 where nothing is scored; no entropies from a head that has none.

    Args:
        model: a causal LM with TRL's fused head, wrapped or not, prepared by `use_packed_attention`.
        backbone: the module inside `model` whose output the head reads.
        batch: what `pack` returned.
    """
    is_scored = torch.ones_like(batch.labels, dtype=torch.bool)
    masked = nullcontext() if batch.kept_ids is None else kept_head(batch.kept_ids, is_scored)
    with _only(backbone, batch.layout.sources), masked:
        output = model(**batch.inputs, shift_labels=batch.labels, fused_lm_head=True)
    entropies = None if output.entropy is None else batch.layout.spread(output.entropy)
    return batch.layout.spread(output.log_probs), entropies


@contextmanager
def _only(backbone: nn.Module, sources: torch.Tensor) -> Iterator[None]:
    """The next pass of the backbone returns the hidden states at `sources` alone: the head computes what is read.

    A critic that runs the same backbone after it, in the same forward of the model, picks its states by itself.
    """

    def select(module: nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        output.last_hidden_state = output.last_hidden_state[:, sources]
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
