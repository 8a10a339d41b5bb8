"""Attention over all segments of a packed row in one kernel call, on a CUDA GPU.

A segment sees its prefix and then itself, causally. The keys of each segment are gathered into one line, behind those
of the segment before it, and one variable-length call computes all segments. It needs no mask and cuts no branch:

    row         p p | a b | d | f         d follows p p a, f follows p p
    queries     p p | a b | d | f
    keys        p p | p p a b | p p a d | p p f

The last query of a segment sees all of the segment's keys, each query before it one key fewer.

PyTorch ships two such kernels: FlashAttention, for 16 bits on Ampere and later, and the memory-efficient one, for
float32 and older GPUs. Neither has to plan for a new length. A CPU has none, nor do AMD's GPUs: `packed_attention.py`
calls the attention once for each segment there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.autograd.function import once_differentiable

FLASH_MAX_HEAD_DIM = 256
"""Largest head dimension of PyTorch's FlashAttention."""
HEAD_DIM_MULTIPLE = 8
"""Both kernels read heads in vectors of 16 bytes at most."""
_FROM_BOTTOM_RIGHT = 2
"""The memory-efficient kernel's name for a causal mask in which the last query sees all keys."""


@dataclass(frozen=True, kw_only=True)
class Offsets:
    """Offsets with which one call computes the M keys and N queries of all S segments."""

    query_ends: torch.Tensor
    """(S + 1,) int32 from 0: where the queries of each segment end."""
    key_ends: torch.Tensor
    """(S + 1,) int32 from 0: where the keys of each segment end."""
    longest_queries: int
    longest_keys: int
    key_places: torch.Tensor | None
    """(M,) int32 index in the row of each key; None: every segment sees itself alone, so M = N, in order."""


def make_offsets(
    segments: Sequence[tuple[int, int]], prefixes: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> Offsets:
    """The offsets for a packed row, in one copy to the device.

    Args:
        segments: start and end of each segment, in order and without gaps.
        prefixes: for each segment the stretches before it that it sees, as starts and ends.
        device: of the row.
    """
    seen = [[*prefix, segment] for prefix, segment in zip(prefixes, segments, strict=True)]
    num_queries = [end - start for start, end in segments]
    num_keys = [sum(end - start for start, end in stretches) for stretches in seen]
    query_ends = np.cumsum([0, *num_queries])
    key_ends = np.cumsum([0, *num_keys])
    places = np.empty(0, dtype=np.int64)
    if any(prefixes):
        places = np.concatenate([np.arange(start, end) for stretches in seen for start, end in stretches])
    together = torch.from_numpy(np.concatenate([query_ends, key_ends, places]).astype(np.int32))
    on_device = together.to(device, non_blocking=True)
    query_ends_there, key_ends_there, places_there = on_device.split([len(query_ends), len(key_ends), len(places)])
    return Offsets(
        query_ends=query_ends_there,
        key_ends=key_ends_there,
        longest_queries=max(num_queries),
        longest_keys=max(num_keys),
        key_places=places_there if len(places) else None,
    )


# -------------------------------------------------------------------- the choice of a kernel


class Kernel(Protocol):
    """Attention over all segments of a packed row."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        offsets: Offsets,
        scale: float,
        dropout: float,
        window: int | None,
        /,
    ) -> torch.Tensor:
        """(N, heads, D') of queries (N, heads, D), keys (M, key heads, D) and values (M, key heads, D')."""


def has_one_call(device: torch.device) -> bool:
    """Whether packed rows on this device are computed by one call per layer, so that no branch is cut into steps."""
    return device.type == "cuda" and torch.version.hip is None


def is_on_this_machine() -> bool:
    """Whether there is a GPU here on which models will be computed by one call per layer."""
    return torch.cuda.is_available() and has_one_call(torch.device("cuda"))


def choose_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """The kernel for queries (1, heads, N, D), keys (1, key heads, N, D) and values (1, key heads, N, D').

    None where neither kernel computes them: on other devices, in float64, and for odd head dimensions.
    """
    if not has_one_call(query.device):
        return None
    dtype = compute_dtype(query)
    dim, value_dim = query.shape[3], value.shape[3]
    if dim % HEAD_DIM_MULTIPLE or value_dim % HEAD_DIM_MULTIPLE or dtype == torch.float64:
        return None
    has_flash = dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(query.device)[0] >= 8
    if has_flash and dim == value_dim and dim <= FLASH_MAX_HEAD_DIM:
        return flash_call
    return efficient_call


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype in which scaled_dot_product_attention would compute: autocast's, where it is on."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return query.dtype


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: Offsets,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """(1, N, heads, D') of queries (1, heads, N, D), keys (1, key heads, N, D) and values (1, key heads, N, D').

    Args:
        kernel: what `choose_kernel` returned.
        query: see above; as keys and values, a view of (1, N, heads, D) as a rule, so that the kernel gets it back
            without a copy.
        key: see above.
        value: see above.
        offsets: of the row.
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: probability.
        window: number of keys, its own included, that a query sees; None: all before it.
    """
    dtype = compute_dtype(query)
    queries, keys, values = (whole[0].transpose(0, 1).to(dtype) for whole in (query, key, value))
    if offsets.key_places is not None:
        keys = _Gather.apply(keys, offsets.key_places)
        values = _Gather.apply(values, offsets.key_places)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if window is not None and window >= offsets.longest_keys:
        window = None
    return kernel(queries, keys, values, offsets, scale, dropout, window)[None]


class _Saved(Protocol):
    """The context of an autograd function, with the numbers that its backward pass needs."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors."""


class _SavedGather(_Saved, Protocol):
    num_rows: int


class _SavedAttention(_Saved, Protocol):
    offsets: Offsets
    scale: float
    dropout: float
    window: int | None


class _Gather(torch.autograd.Function):
    """Rows of (N, ...) by index. The gradients of a row's copies are added up in float32.

    PyTorch would add them up in the dtype of the row, and lose bits of bfloat16 over many branches.
    """

    @staticmethod
    def forward(ctx: _SavedGather, whole: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (M, ...)."""
        ctx.save_for_backward(index)
        ctx.num_rows = len(whole)
        return whole.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedGather, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """(M, ...) -> (N, ...)."""
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros((ctx.num_rows, *gradient.shape[1:]), dtype=dtype, device=gradient.device)
        total.index_add_(0, index, gradient.to(dtype))
        return total.to(gradient.dtype), None


# -------------------------------------------------------------------- the kernels


def flash_call(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: Offsets,
    scale: float,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """FlashAttention as PyTorch ships it; a `Kernel`.

    `torch.nn.attention.varlen.varlen_attn` is the public name of this call, but takes neither a scale nor a window in
    PyTorch 2.10, and refuses fewer key heads than query heads from 2.12 on.
    """
    # Without a window none is named: FlashAttention 4, which PyTorch can be told to use instead, refuses named ones in
    # its backward pass.
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    output, *_ = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        offsets.query_ends,
        offsets.key_ends,
        offsets.longest_queries,
        offsets.longest_keys,
        dropout,
        window is None,  # causal; a window says so itself
        False,
        scale=scale,
        **sides,
    )
    return output


def efficient_call(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: Offsets,
    scale: float,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """The memory-efficient kernel; a `Kernel`. It does not know shared key heads, so these are repeated."""
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys = keys.repeat_interleave(groups, dim=1)
        values = values.repeat_interleave(groups, dim=1)
    output: torch.Tensor = _Efficient.apply(queries[None], keys[None], values[None], offsets, scale, dropout, window)
    return output[0]


class _Efficient(torch.autograd.Function):
    """The memory-efficient kernel with a backward pass that knows the window.

    PyTorch's own formula for this operator's gradient leaves `window_size` out, without a word.
    """

    @staticmethod
    def forward(
        ctx: _SavedAttention,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        offsets: Offsets,
        scale: float,
        dropout: float,
        window: int | None,
    ) -> torch.Tensor:
        """(1, N, heads, D), (1, M, heads, D), (1, M, heads, D') -> (1, N, heads, D')."""
        output, log_sums, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
            queries,
            keys,
            values,
            None,
            offsets.query_ends,
            offsets.key_ends,
            offsets.longest_queries,
            offsets.longest_keys,
            dropout,
            _FROM_BOTTOM_RIGHT,
            True,
            scale=scale,
            window_size=window,
        )
        ctx.save_for_backward(queries, keys, values, output, log_sums, seed, offset)
        ctx.offsets = offsets
        ctx.scale = scale
        ctx.dropout = dropout
        ctx.window = window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedAttention, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Gradients of queries, keys and values."""
        queries, keys, values, output, log_sums, seed, offset = ctx.saved_tensors
        offsets: Offsets = ctx.offsets
        of_queries, of_keys, of_values, _ = torch.ops.aten._efficient_attention_backward(
            gradient,
            queries,
            keys,
            values,
            None,
            output,
            offsets.query_ends,
            offsets.key_ends,
            offsets.longest_queries,
            offsets.longest_keys,
            log_sums,
            ctx.dropout,
            seed,
            offset,
            _FROM_BOTTOM_RIGHT,
            False,
            scale=ctx.scale,
            window_size=ctx.window,
        )
        return of_queries, of_keys, of_values, None, None, None, None
