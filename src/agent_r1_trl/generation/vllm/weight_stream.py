"""Weights as pieces of bytes, and back: what lets a transfer need little memory besides the model.

    weights   a (4 KiB)  b (2 KiB)  c (200 MiB)
    pieces    [a b]      [c]                        a buffer of 16 MiB, then c's own memory
    parts                [c: 16, 16, ... 8 MiB]      what travels at a time

Small weights are gathered in one buffer, which is used again for every piece; a weight that does not fit in is a piece
of its own and is read where it lies. So a sender needs one buffer, and one weight where it is made for the transfer (a
merged adapter, the shards of ZeRO-3); a receiver needs one piece.

Covered here: order, shapes, dtypes and places in memory. Not covered: how bytes travel (`weight_transfer.py`,
`nccl_group.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

PART_BYTES = 16 * 2**20
"""How many bytes travel at a time, and how many the buffer for small weights has."""
_ALIGNMENT = 16  # of a weight in a piece, so that a receiver can use it in place

Named = tuple[str, torch.Tensor]
Entry = tuple[str, str, list[int]]
"""Name, dtype (`bfloat16`) and shape."""


class Piece(NamedTuple):
    """Some weights in a row."""

    entries: list[Entry]
    payload: torch.Tensor
    """Their bytes, (num_bytes,) uint8, each weight's first at a multiple of 16; only good until the next piece."""


def pack(
    weights: Iterable[Named], *, device: torch.device | None = None, part_bytes: int = PART_BYTES
) -> Iterator[Piece]:
    """Cut weights into pieces, in order.

    Args:
        weights: name and tensor. Each is read before the next one is asked for.
        device: where the payloads shall be; None for that of the first weight.
        part_bytes: size of the buffer for small weights.
    """
    entries: list[Entry] = []
    buffer, used = torch.empty(0, dtype=torch.uint8), 0
    for name, value in weights:
        device = value.device if device is None else device
        flat = _as_bytes(value)  # (num_bytes,)
        entry = (name, str(value.dtype).removeprefix("torch."), list(value.shape))
        if entries and used + len(flat) > part_bytes:
            yield Piece(entries, buffer[:used])
            entries, used = [], 0
        if len(flat) > part_bytes:
            yield Piece([entry], flat.to(device))
            continue
        if not len(buffer):
            buffer = torch.empty(part_bytes, dtype=torch.uint8, device=device)
        buffer[used : used + len(flat)].copy_(flat)
        entries.append(entry)
        used = _aligned(used + len(flat))
    if entries:
        yield Piece(entries, buffer[:used])


def unpack(piece: Piece) -> Iterator[Named]:
    """The weights of a piece; they share the payload's memory."""
    start = 0
    for name, dtype_name, shape in piece.entries:
        dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        yield name, piece.payload[start:end].view(dtype).reshape(shape)
        start = _aligned(end)


def parts(payload: torch.Tensor, part_bytes: int = PART_BYTES) -> Iterator[torch.Tensor]:
    """A payload in pieces of at most `part_bytes`; nothing is copied."""
    for start in range(0, len(payload), part_bytes):
        yield payload[start : start + part_bytes]


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
