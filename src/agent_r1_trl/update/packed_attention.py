"""Attention over the segments of a packed row (`packing.py`), and which models can have it.

Covered here: causal models that use transformers' attention interface with full attention, on sdpa. Not covered:
sliding windows, soft-capped scores, attention sinks, state-space layers; they are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from agent_r1_trl.generation.local.attention import grouped_sdpa

if TYPE_CHECKING:
    from agent_r1_trl.update.packing import Layout

PACKED_ATTENTION = "agent_r1_packed_sdpa"
_FOREIGN_ATTENTION = ("softcap", "s_aux", "position_bias")
"""Arguments with which a model asks its attention function for more than a softmax over the past."""


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
    _check_layer(module, options)
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for segment in packed_layout.segments:
        own = slice(segment.start, segment.end)
        queries, keys, values = query[:, :, own], key[:, :, own], value[:, :, own]
        if segment.prefix:
            before = [slice(*stretch) for stretch in segment.prefix]
            keys = torch.cat([*(key[:, :, part] for part in before), keys], dim=2)
            values = torch.cat([*(value[:, :, part] for part in before), values], dim=2)
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                queries,
                repeat_kv(keys, groups),
                repeat_kv(values, groups),
                attn_mask=packed_layout.mask(queries.shape[2], keys.shape[2], query) if segment.prefix else None,
                is_causal=not segment.prefix,
                dropout_p=dropout,
                scale=scaling,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _check_layer(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse a layer that wants more than causal attention over the past of its own row."""
    asked = [name for name in _FOREIGN_ATTENTION if options.get(name) is not None]
    asked += ["sliding_window"] if options.get("sliding_window") else []
    asked += ["is_causal=False"] if not getattr(module, "is_causal", True) else []
    if asked:
        raise ValueError(
            f"update_layout: this model's attention uses {', '.join(asked)}, which packed rows do not cover. Set "
            "update_layout='grouped' or 'padded'."
        )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def use_packed_attention(base: Any, *, name: str = "the model") -> None:
    """Prepare a causal LM, or a backbone, for packed rows; nothing else about it changes.

    Args:
        base: without a PeftModel around it.
        name: of the model, for messages.

    Raises:
        ValueError: for a model that packed rows do not cover.
    """
    config = base.config
    if config._attn_implementation == PACKED_ATTENTION:
        return
    if config._attn_implementation != "sdpa" or not base._can_set_attn_implementation():
        raise ValueError(
            f"update_layout: the attention implementation of {name} is {config._attn_implementation!r}; packed rows "
            "need transformers' 'sdpa'. Load it with attn_implementation='sdpa', or set update_layout='grouped'."
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"update_layout: {name} has layers of the kinds {', '.join(sorted(kinds))}; packed rows cover "
            "'full_attention'. Set update_layout='grouped' or 'padded'."
        )
    config._attn_implementation = PACKED_ATTENTION
