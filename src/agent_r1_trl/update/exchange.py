"""Rows between ranks: each rank gets the rows that a plan gives it, and only those that move are sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from agent_r1_trl.update.batches import dummy_row, has_rows, join_rows, pad_rows, take_rows, to_device
from agent_r1_trl.update.entries import Inputs

if TYPE_CHECKING:
    from accelerate import Accelerator

DUMMY = -1
"""In a plan, a row that fills up."""


def exchange(rows: Inputs, plan: list[list[list[int]]], accelerator: Accelerator) -> tuple[Inputs, list[torch.Tensor]]:
    """This rank's rows under a plan, and a dummy behind them. Rows that move are sent to all ranks; all must call it.

    The plan is (rank, micro-batch) -> numbers of rows, which go on from rank to rank. Returns the rows, and for each
    micro-batch of this rank the places of its rows among them.
    """
    rank = accelerator.process_index
    counts = gather_object([len(rows["completion_ids"])])
    home = [place for place, count in enumerate(counts) for _ in range(count)]  # the rank that has each row
    owner = _owners(plan)  # and the one that gets it
    first = sum(counts[:rank])

    staying = [row for row in range(first, first + counts[rank]) if owner.get(row) == rank]
    moving = [row for row in sorted(owner) if owner[row] != home[row]]
    leaving = [row for row in moving if home[row] == rank]
    arriving = [row for row in moving if owner[row] == rank]

    dummy = dummy_row(take_rows(rows, slice(0, 1)))
    parts = [take_rows(rows, _index(row - first for row in staying)), dummy]
    if moving:
        widths = _common_widths(rows)
        sent = pad_rows(take_rows(rows, _index(row - first for row in leaving)), widths)
        pool = join_rows(gather_object([to_device(sent, torch.device("cpu"))]))  # in the order of `moving`
        place_in_pool = {row: place for place, row in enumerate(moving)}
        received = take_rows(pool, _index(place_in_pool[row] for row in arriving))
        received = to_device(received, rows["completion_ids"].device)
        parts = [pad_rows(parts[0], widths), received, pad_rows(dummy, widths)]

    numbers = staying + arriving
    place_of = {row: place for place, row in enumerate(numbers)}
    place_of[DUMMY] = len(numbers)
    places = [_index(place_of[row] for row in micro_batch) for micro_batch in plan[rank]]
    return join_rows(parts), places


def _owners(plan: list[list[list[int]]]) -> dict[int, int]:
    """The rank that each row goes to."""
    owner = {}
    for rank, micro_batches in enumerate(plan):
        for micro_batch in micro_batches:
            for row in micro_batch:
                if row != DUMMY:
                    owner[row] = rank
    return owner


def _common_widths(rows: Inputs) -> dict[str, int]:
    """Columns of each entry with columns, as many as on the rank that has most. All ranks must call it."""
    own = {}
    for name, value in rows.items():
        if has_rows(value) and value.dim() >= 2:
            own[name] = value.shape[1]
    everywhere = gather_object([own])
    return {name: max(one[name] for one in everywhere) for name in everywhere[0]}


def _index(places: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*places], dtype=torch.long)
