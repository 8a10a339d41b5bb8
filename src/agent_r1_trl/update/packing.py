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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from agent_r1_trl.update import one_call
from agent_r1_trl.update.kept_head import kept_head
from agent_r1_trl.update.packed_attention import SEGMENTS, attention_inputs
from agent_r1_trl.update.sampling_masks import SamplingMasks

STEP, STEP_ON_CPU = 1024, 256
"""Tokens of a branch that one call of the attention computes, on devices where each segment has a call of its own."""


@dataclass(frozen=True)
class PackedSegment:
    """Consecutive tokens that see themselves causally and, before that, all tokens of earlier stretches."""

    start: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Start and end of each of these stretches, in their order."""


@dataclass
class Layout:
    """The places in a packed row; the model's attention and the critic read it."""

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
    offsets: one_call.Offsets | None = None
    """All segments in one call of the attention; None on devices where each has a call of its own."""
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
            columns = -(-keys // 8) * 8  # the next multiple of 8
            mask = torch.full((queries, columns), float("-inf"), dtype=dtype, device=device)
            too_far = None if window is None else mask.tril(keys - queries - window)
            mask.triu_(keys - queries + 1)  # what follows a query
            if too_far is not None:
                mask.add_(too_far)
            self._masks[name] = mask[:, :keys]
        return self._masks[name]

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each segment."""
        return [segment.end - segment.start for segment in self.segments]

    @cached_property
    def seen(self) -> list[list[int]]:
        """For each segment, which others its prefix consists of; a stretch holds whole segments."""
        starts = [segment.start for segment in self.segments]
        seen = []
        for segment in self.segments:
            numbers: list[int] = []
            for start, end in segment.prefix:
                numbers += range(bisect_left(starts, start), bisect_left(starts, end))
            seen.append(numbers)
        return seen

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(1, S) -> (B, T), 0 where nothing is scored."""
        flat = values.new_zeros(self.scored.numel())
        # By index: the gradient of a mask would make the host wait.
        flat = flat.index_copy(0, self.places, values[0, self.copies])
        return flat.view(self.scored.shape)


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
    """Further arguments for the model's kind of attention."""
    kept_ids: SamplingMasks | None = None
    """(S,) what each of the labels was drawn from; None: the whole vocabulary."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments for a model prepared by `use_packed_attention`."""
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
    kept_ids: SamplingMasks | torch.Tensor | None = None,
    *,
    share_prefixes: bool,
    attention: str = SEGMENTS,
) -> PackedBatch:
    """Pack a batch of prompts (padded on the left) and completions (padded on the right).

    Args:
        input_ids: (B, L), completions in the last T columns.
        attention_mask: (B, L).
        scored: (B, T) bool; padding is left out of it here.
        kept_ids: (B, T) what each token was drawn from, or a tensor (B, T, K), filled up with -1; None: the whole
            vocabulary.
        share_prefixes: keep one copy of what rows have in common at their beginning.
        attention: as `use_packed_attention` found it.
    """
    device = input_ids.device
    num_prompt = input_ids.shape[1] - scored.shape[1]
    ids = input_ids.cpu()
    is_token = attention_mask.cpu().bool()
    scored = scored.cpu().bool() & is_token[:, num_prompt:]

    starts = is_token.int().argmax(dim=1).tolist()
    ends = needed_columns(scored, num_prompt).tolist()
    if not any(ends):  # a forward pass needs a token
        ends[0] = starts[0] + 1
    rows = {row: ids[row, start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True)) if end}
    pieces = _share(rows) if share_prefixes else _put_one_after_another(rows)

    places = _places(pieces, starts, ids.shape)
    sources = places[:, num_prompt - 1 : -1][scored]  # the token before a scored one predicts it
    labels = ids[:, num_prompt:][scored]
    copies = torch.arange(len(sources))
    kept = None if kept_ids is None else SamplingMasks.of(kept_ids).to("cpu")[scored]
    if share_prefixes:
        sources, labels, copies, kept = _one_of_each(sources, labels, kept, pieces)
    segments = [piece.segment for piece in pieces]
    offsets = None
    if one_call.has_one_call(device) and attention == SEGMENTS:
        ranges = [(segment.start, segment.end) for segment in segments]
        offsets = one_call.make_offsets(ranges, [segment.prefix for segment in segments], device)
    else:
        segments = [step for segment in segments for step in _in_steps(segment, device)]
    layout = Layout(
        segments=segments,
        offsets=offsets,
        scored=scored.to(device),
        sources=sources.to(device),
        copies=copies.to(device),
        places=scored.flatten().nonzero().squeeze(1).to(device),
    )
    packed_ids = torch.cat([rows[piece.rows[0]][piece.first : piece.last] for piece in pieces]).to(device)
    positions = torch.cat([torch.arange(piece.first, piece.last) for piece in pieces]).to(device)
    return PackedBatch(
        input_ids=packed_ids[None],
        position_ids=positions[None],
        labels=labels[None].to(device),
        layout=layout,
        attention=attention_inputs(attention, layout, packed_ids[None]),
        kept_ids=None if kept is None else kept.to(device),
    )


def _places(pieces: list[_Piece], starts: list[int], shape: torch.Size) -> torch.Tensor:
    """(B, L) index in the packed row of each token that is computed; 0 elsewhere."""
    places = torch.zeros(shape, dtype=torch.long)
    for piece in pieces:
        here = torch.arange(piece.segment.start, piece.segment.end)
        for row in piece.rows:
            first, last = starts[row] + piece.first, starts[row] + piece.last
            places[row, first:last] = here
    return places


def _one_of_each(
    sources: torch.Tensor, labels: torch.Tensor, kept: SamplingMasks | None, pieces: list[_Piece]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingMasks | None]:
    """One of the scored tokens that have the same source, label and sampling mask, and which of these each one is.

    They come in the order of their sources and labels. Only sources in pieces of several rows can have the same: these
    alone are sorted, since sorting all of them would take most of the time of packing.
    """
    size = pieces[-1].segment.end
    in_several_rows = torch.zeros(size, dtype=torch.bool)
    for piece in pieces:
        in_several_rows[piece.segment.start : piece.segment.end] = len(piece.rows) > 1
    may_repeat = in_several_rows[sources]
    columns = [sources[may_repeat], labels[may_repeat]]
    if kept is not None:
        columns.append(kept[may_repeat].numbers())
    repeated, number_of_each = _number_rows(columns)
    single_sources = sources[~may_repeat]

    num_at = single_sources.bincount(minlength=size) + repeated.bincount(minlength=size)
    first_at = num_at.cumsum(0) - num_at  # (N,) number of the first one with this source
    rank = torch.arange(len(repeated)) - torch.searchsorted(repeated, repeated)
    copies = torch.empty_like(sources)
    copies[~may_repeat] = first_at[single_sources]
    copies[may_repeat] = (first_at[repeated] + rank)[number_of_each]

    one_of_each = torch.zeros(int(num_at.sum()), dtype=torch.long).scatter(0, copies, torch.arange(len(copies)))
    if kept is not None:
        kept = kept.select(one_of_each)
    return sources[one_of_each], labels[one_of_each], copies, kept


def _number_rows(columns: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first column of the different rows of a table, in the order of their values, and the number of each row.

    One number stands for each pair of values, since `unique(dim=0)` takes twenty times as long.

    Args:
        columns: (n,) each, not negative.
    """
    numbers = columns[0]
    for column in columns[1:]:
        numbers = numbers.unique(return_inverse=True)[1]
        numbers = numbers * (int(column.max()) + 1 if len(column) else 1) + column
    different, number_of_each = numbers.unique(return_inverse=True)
    first = torch.zeros_like(different).scatter(0, number_of_each, columns[0])
    return first, number_of_each


def needed_columns(scored: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """(B,) the column behind the token that predicts a row's last scored one, of (B, T); 0 for a row without any."""
    last = scored.shape[1] - 1 - scored.flip(1).int().argmax(dim=1)  # (B,)
    return torch.where(scored.any(dim=1), num_prompt + last, 0)


def _put_one_after_another(rows: dict[int, torch.Tensor]) -> list[_Piece]:
    pieces = []
    start = 0
    for row, ids in rows.items():
        segment = PackedSegment(start, start + len(ids))
        pieces.append(_Piece(segment, [row], 0, len(ids)))
        start = segment.end
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
        for group in reversed(groups):
            waiting.append((group, depth, prefix))

    branch(sorted(rows, key=lambda row: tokens[row]), 0, ())
    while waiting:
        group, depth, prefix = waiting.pop()
        end = common_length(rows[group[0]].numpy(), rows[group[-1]].numpy())
        segment = PackedSegment(size, size + end - depth, prefix)
        pieces.append(_Piece(segment, group, depth, end))
        size = segment.end
        longer = [row for row in group if len(tokens[row]) > end]
        branch(longer, end, _with_stretch(prefix, segment))
    return pieces


def _with_stretch(prefix: tuple[tuple[int, int], ...], segment: PackedSegment) -> tuple[tuple[int, int], ...]:
    """The stretches of a prefix and of a segment behind it; two that meet are one."""
    if prefix and prefix[-1][1] == segment.start:
        *others, (start, _) = prefix
        return (*others, (start, segment.end))
    return (*prefix, (segment.start, segment.end))


def _in_steps(segment: PackedSegment, device: torch.device) -> Iterator[PackedSegment]:
    """A branch in short parts, each of which sees those before it.

    Attention under a mask computes what is masked, too: half of the square that a branch is by itself. A row without
    prefix needs no mask.
    """
    if not segment.prefix:
        yield segment
        return
    step = STEP_ON_CPU if device.type == "cpu" else STEP
    for start in range(segment.start, segment.end, step):
        prefix = segment.prefix
        if start > segment.start:
            prefix = (*prefix, (segment.start, start))
        yield PackedSegment(start, min(start + step, segment.end), prefix)


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens two rows, (n,) and (m,), have in common at their beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


# -------------------------------------------------------------------- forward passes


def packed_log_probs(
    model: Callable[..., Any], backbone: nn.Module, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (B, T), 0 where nothing is scored; no entropies from a head that has none.

    Args:
        model: a causal LM with TRL's fused head, wrapped or not, prepared by `use_packed_attention`.
        backbone: the module inside `model` whose output the head reads.
        batch: what `pack` returned.
    """
    is_scored = torch.ones_like(batch.labels, dtype=torch.bool)
    masked = nullcontext() if batch.kept_ids is None else kept_head(batch.kept_ids, is_scored)
    # The router's loss is no part of this layout, and it would take the mask for that of the tokens.
    config: Any = backbone.config
    has_router_logits = getattr(config.get_text_config(), "output_router_logits", False)
    options = {"output_router_logits": False} if has_router_logits else {}
    with _only(backbone, batch.layout.sources), masked:
        output = model(**batch.inputs, shift_labels=batch.labels, fused_lm_head=True, **options)
    entropies = None if output.entropy is None else batch.layout.spread(output.entropy)
    return batch.layout.spread(output.log_probs), entropies


@contextmanager
def _only(backbone: nn.Module, sources: torch.Tensor) -> Iterator[None]:
    """The next pass of the backbone returns the hidden states at `sources` alone: the head computes what is read.

    A critic that runs the same backbone after it, in the same forward of the model, picks its states by itself.
    """

    def select(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        handle.remove()
        output.last_hidden_state = output.last_hidden_state[:, sources]
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
