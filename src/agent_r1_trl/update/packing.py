"""Ragged trajectories in one row without padding, each prompt of a group computed once.

A padded batch of B rows becomes one row of the tokens that exist. With `share_prompts`, rows with the same prompt keep
one copy of it, in front of their completions:

    padded            packed             packed, prompts shared
    . p p a b .       p p a b            p p a b
    . p p c . .       p p c              c
    q q q d e f       q q q d e f        q q q d e f

Every token keeps its distance to the tokens before it (`position_ids`) and sees exactly those (`packed_attention`
runs over segments), so log-probs, entropies and gradients are those of the padded batch up to rounding: a shared
prompt's keys, values and hidden states receive the sum of their completions' gradients. The output head runs on the
scored positions alone.

Covered here: causal models that use transformers' attention interface with rotary positions and full attention, on
sdpa. Not covered: images, sliding windows, attention sinks, state-space layers; they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from agent_r1_trl.generation.local.attention import grouped_sdpa

PACKED_ATTENTION = "agent_r1_packed_sdpa"
_FOREIGN_ATTENTION = ("softcap", "s_aux", "position_bias")
"""Arguments with which a model asks its attention function for more than a softmax over the past."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that see themselves causally and, before that, all tokens of an earlier stretch."""

    start: int
    end: int
    prefix: tuple[int, int] = (0, 0)
    """Start and end of that stretch; empty without one."""


@dataclass
class Layout:
    """The segments of a packed row, in order and without gaps."""

    segments: list[Segment]
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def mask(self, queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """(queries, keys) additive: the last query sees all keys, each one before it one fewer; made once."""
        name = (queries, keys, like.dtype, like.device)
        if name not in self._masks:
            closed = torch.full((queries, keys), float("-inf"), dtype=like.dtype, device=like.device)
            self._masks[name] = closed.triu(keys - queries + 1)
        return self._masks[name]


@dataclass(frozen=True)
class PackedBatch:
    """A padded batch of B rows with T completion columns, packed into one row of N tokens, S of them scored."""

    input_ids: torch.Tensor
    """(1, N)."""
    position_ids: torch.Tensor
    """(1, N), from 0 in every sequence."""
    layout: Layout
    scored: torch.Tensor
    """(B, T) bool: the completion tokens that need a log-prob."""
    sources: torch.Tensor
    """(S,) index in the row of the token that predicts each scored one, in the order of `scored`."""
    labels: torch.Tensor
    """(1, S) the scored tokens."""


# -------------------------------------------------------------------- packing


def pack(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor, *, share_prompts: bool
) -> PackedBatch:
    """Pack a batch of prompts (padded on the left) and completions (padded on the right).

    Args:
        input_ids: (B, L), completions in the last T columns.
        attention_mask: (B, L).
        scored: (B, T) bool; padding is left out of it here.
        share_prompts: keep one copy of equal prompts.
    """
    is_token = attention_mask.bool()
    num_prompt = input_ids.shape[1] - scored.shape[1]
    scored = scored.bool() & is_token[:, num_prompt:]
    columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    positions = columns - is_token.int().argmax(dim=1, keepdim=True)  # (B, L)
    places = torch.zeros_like(input_ids)  # (B, L) index in the row
    pieces: list[torch.Tensor] = []
    segments: list[Segment] = []
    size = 0

    def append(row: int, first: int, last: int, prefix: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        nonlocal size
        kept = columns[row, first:last][is_token[row, first:last]]
        start, size = size, size + len(kept)
        places[row, kept] = torch.arange(start, size, device=places.device)
        pieces.append(row * input_ids.shape[1] + kept)
        if len(kept):
            segments.append(Segment(start, size, prefix))
        return start, size

    length = input_ids.shape[1]
    if share_prompts:
        for rows in _rows_by_prompt(input_ids[:, :num_prompt], is_token[:, :num_prompt]):
            prefix = append(rows[0], 0, num_prompt)
            places[rows, :num_prompt] = places[rows[0], :num_prompt].clone()
            for row in rows:
                append(row, num_prompt, length, prefix)
    else:
        for row in range(len(input_ids)):
            append(row, 0, length)

    order = torch.cat(pieces)
    return PackedBatch(
        input_ids=input_ids.flatten()[order].unsqueeze(0),
        position_ids=positions.flatten()[order].unsqueeze(0),
        layout=Layout(segments),
        scored=scored,
        sources=places[:, num_prompt - 1 : -1][scored],
        labels=input_ids[:, num_prompt:][scored].unsqueeze(0),
    )


def _rows_by_prompt(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """Indices of the rows with equal prompts, by first occurrence."""
    groups: dict[tuple, list[int]] = {}
    for row, (ids, mask) in enumerate(zip(prompt_ids.tolist(), prompt_mask.tolist(), strict=True)):
        groups.setdefault((tuple(ids), tuple(mask)), []).append(row)
    return list(groups.values())


def packed_log_probs(model: Any, backbone: nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (B, T), 0 where nothing is scored; no entropies from a head that has none.

    Args:
        model: a causal LM with TRL's fused head, wrapped or not, prepared by `use_packed_attention`.
        backbone: the module inside `model` whose output the head reads.
        batch: what `pack` returned.
    """
    with _only(backbone, batch.sources):
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.input_ids.new_ones(1, 1, 1, 1),  # a 4-D mask is passed through, so no mask is built
            packed_layout=batch.layout,
            shift_labels=batch.labels,
            fused_lm_head=True,
        )
    entropies = None if output.entropy is None else _spread(output.entropy, batch.scored)
    return _spread(output.log_probs, batch.scored), entropies


def _spread(values: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """(1, S) -> (B, T)."""
    return values.new_zeros(scored.shape).masked_scatter(scored, values)


@contextmanager
def _only(backbone: nn.Module, sources: torch.Tensor) -> Iterator[None]:
    """The backbone returns only the hidden states at `sources`, so that the head computes nothing that is not read."""

    def select(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, sources]
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


# -------------------------------------------------------------------- attention


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention over the segments of a packed row; without a layout, transformers' sdpa.

    Args:
        module: the attention layer.
        query: (1, heads, N, D).
        key: (1, key heads, N, D).
        value: (1, key heads, N, D').
        attention_mask: not read with a layout.
        packed_layout: of the row.
        scaling: of the scores; None is 1 / sqrt(D).
        dropout: of the attention weights.
        **options: what transformers passes besides.

    Returns:
        (1, N, heads, D') and None.
    """
    if packed_layout is None:
        return grouped_sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    asked = [name for name in _FOREIGN_ATTENTION if options.get(name) is not None]
    if asked or options.get("sliding_window"):
        raise ValueError(
            f"update_layout: this model's attention uses {', '.join(asked) or 'sliding_window'}, which packed rows do "
            "not cover. Set update_layout='grouped' or 'padded'."
        )
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for segment in packed_layout.segments:
        own, before = slice(segment.start, segment.end), slice(*segment.prefix)
        queries, keys, values = query[:, :, own], key[:, :, own], value[:, :, own]
        has_prefix = before.stop > before.start
        if has_prefix:
            keys = torch.cat([key[:, :, before], keys], dim=2)
            values = torch.cat([value[:, :, before], values], dim=2)
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                queries,
                repeat_kv(keys, groups),
                repeat_kv(values, groups),
                attn_mask=packed_layout.mask(queries.shape[2], keys.shape[2], query) if has_prefix else None,
                is_causal=not has_prefix,
                dropout_p=dropout,
                scale=scaling,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def use_packed_attention(base: Any) -> None:
    """Prepare a causal LM for packed rows; nothing else about it changes.

    Raises:
        ValueError: for a model that packed rows do not cover.
    """
    config = base.config
    if config._attn_implementation == PACKED_ATTENTION:
        return
    if config._attn_implementation != "sdpa" or not base._can_set_attn_implementation():
        raise ValueError(
            f"update_layout: the model's attention implementation is {config._attn_implementation!r}; packed rows "
            "need transformers' 'sdpa'. Load the model with attn_implementation='sdpa', or set "
            "update_layout='grouped'."
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"update_layout: the model has layers of the kinds {', '.join(sorted(kinds))}; packed rows cover "
            "'full_attention'. Set update_layout='grouped' or 'padded'."
        )
    config._attn_implementation = PACKED_ATTENTION
