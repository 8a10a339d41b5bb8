"""Attention in a packed row (`packing.py`), by what the model was loaded with.

- `sdpa`: on a CUDA GPU one call for all segments (`one_call.py`), elsewhere a call for each segment. Sliding windows
  are covered; soft-capped scores and attention sinks are refused.
- `flash_attention_2` and its kin: one call with the lengths of the rows, which transformers passes on. It knows no
  shared prefixes, so the layout `shared` computes these models as `sdpa` ones.

Causal models that use transformers' attention interface are covered; all else is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.generic import is_flash_attention_requested

from agent_r1_trl.update import one_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agent_r1_trl.update.packing import Layout

PACKED_ATTENTION = "agent_r1_packed_sdpa"
SEGMENTS, LENGTHS = "segments", "lengths"
"""How the model's attention is told what a token sees."""
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

    Queries are (1, heads, N, D), keys (1, key heads, N, D), values (1, key heads, N, D'); the mask is not read with a
    layout. Returns (1, N, heads, D') and None.
    """
    if packed_layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    return _attend(module, query, key, value, packed_layout, scaling, dropout, options), None


@torch.compiler.disable  # every row has a layout of its own, so a compiled model would compile anew for each
def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_layout: Layout,
    scaling: float | None,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """(1, N, heads, D') by one call, or by a call for each segment; arguments as of `packed_attention`."""
    window = options.get("sliding_window")
    _check_layer(module, options)
    kernel = one_call.choose_kernel(query, key, value)
    if kernel is not None and packed_layout.offsets is not None:
        offsets = packed_layout.offsets
        return one_call.attend(kernel, query, key, value, offsets, scaling=scaling, dropout=dropout, window=window)
    return _attend_one_by_one(query, key, value, packed_layout, scaling=scaling, dropout=dropout, window=window)


def _attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_layout: Layout,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """(1, N, heads, D') by a call of PyTorch's attention for each segment; arguments as of `one_call.attend`."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    # Split, never sliced: the gradient of each slice is as large as the whole row.
    all_queries, all_keys, all_values = (whole.split(packed_layout.sizes, dim=2) for whole in (query, key, value))
    for number, seen in enumerate(packed_layout.seen):
        queries = all_queries[number]
        keys = all_keys[number]
        values = all_values[number]
        if seen:
            keys = torch.cat([*(all_keys[other] for other in seen), keys], dim=2)
            values = torch.cat([*(all_values[other] for other in seen), values], dim=2)
        has_mask = bool(seen) or (window is not None and window < keys.shape[2])
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                queries,
                # On an H100, masks without gradients gave wrong numbers on heads that are views of one; see
                # pytorch/pytorch#191937.
                repeat_kv(keys, groups).contiguous(),
                repeat_kv(values, groups).contiguous(),
                attn_mask=packed_layout.mask(queries.shape[2], keys.shape[2], query, window) if has_mask else None,
                is_causal=not has_mask,
                dropout_p=dropout,
                scale=scaling,
            )
        )
    # Contiguous, as transformers' own functions return it: some models take a view of it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _check_layer(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse a layer that wants more than causal attention over the past of its own row, or a window of it."""
    asked = [name for name in _FOREIGN_ATTENTION if options.get(name) is not None]
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = None if config is None else getattr(config.get_text_config(), "layer_types", None)
    if kinds and index is not None and kinds[index] == "sliding_attention" and not options.get("sliding_window"):
        asked.append("a sliding window that it does not name")
    asked += ["is_causal=False"] if not getattr(module, "is_causal", True) else []
    if asked:
        raise ValueError(
            f"update_layout: this model's attention uses {', '.join(asked)}, which packed rows do not cover. Set "
            "update_layout='grouped' or 'padded'."
        )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def use_packed_attention(base: PreTrainedModel, *, name: str = "the model", share_prefixes: bool = False) -> str:
    """Prepare a causal LM, or a backbone, for packed rows; nothing else about it changes.

    Returns:
        `SEGMENTS` or `LENGTHS`.

    Raises:
        ValueError: for a model that packed rows do not cover.
    """
    config = base.config
    used = config._attn_implementation
    flaw, fix = _flaw(base, share_prefixes=share_prefixes)
    if flaw:
        raise ValueError(
            f"update_layout: {name} has {flaw}. {fix}{', or set' if fix else 'Set'} update_layout='grouped'."
        )
    if _is_flash(used) and not share_prefixes:
        return LENGTHS
    config._attn_implementation = PACKED_ATTENTION
    return SEGMENTS


def _flaw(base: PreTrainedModel, *, share_prefixes: bool) -> tuple[str, str]:
    """Why packed rows do not cover a model, and what would help; two empty texts for one that they cover."""
    used = base.config._attn_implementation
    what = f"the attention implementation {used!r}"
    if not base._can_set_attn_implementation():
        return "an attention of its own, which packed rows do not cover", ""
    kinds = set(getattr(base.config.get_text_config(), "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        return f"layers of the kinds {', '.join(sorted(others))}, which packed rows do not cover", ""
    if not _is_flash(used) and used not in ("sdpa", PACKED_ATTENTION):
        return f"{what}, which packed rows do not cover", "Load it with attn_implementation='sdpa'"
    if _is_flash(used) and share_prefixes and not one_call.is_on_this_machine():
        fix = "Set update_layout='packed', load it with attn_implementation='sdpa'"
        return f"{what}, which knows no prefix that rows share", fix
    return "", ""


def _is_flash(name: str) -> bool:
    return bool(is_flash_attention_requested(requested_attention_implementation=name))


def attention_inputs(kind: str, layout: Layout, input_ids: torch.Tensor) -> dict[str, Any]:
    """Arguments about a packed row, (1, N), besides its layout, for a model with this kind of attention."""
    if kind == SEGMENTS:
        return {"attention_mask": input_ids.new_ones(1, 1, 1, 1)}  # 4-D ones are passed through, so none is built
    ends = [0, *(segment.end for segment in layout.segments)]
    longest = max(segment.end - segment.start for segment in layout.segments)
    ends_tensor = torch.tensor(ends, dtype=torch.int32, device=input_ids.device)
    return {
        "attention_mask": None,
        "cu_seq_lens_q": ends_tensor,
        "cu_seq_lens_k": ends_tensor,
        "max_length_q": longest,
        "max_length_k": longest,
    }
