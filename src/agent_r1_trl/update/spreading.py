"""Spreads the rows that are trained on evenly over ranks and micro-batches, once the others have left the update.

The number of micro-batches stays, and with it that of forward passes, on every rank; they have fewer rows. A
micro-step has equally many rows on all ranks: where there are none left, a dummy row without loss fills up.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn import functional

from agent_r1_trl.update.batching import Inputs, has_rows, join_rows, take_rows, trim_padding

_PADDED_LEFT = ("prompt_ids", "prompt_mask", "privileged_ids", "privileged_mask")
_RATIOS = "importance_sampling_ratio"


def spread_rows(
    rows: Inputs, keep: torch.Tensor, *, num_micro_batches: int, steps_per_update: int, accelerator: Any
) -> tuple[list[Inputs], list[bool]]:
    """New micro-batches of the rows to keep, without the padding that the others needed. All ranks must call it.

    Args:
        rows: this rank's B rows, at least one; scalars are passed on.
        keep: (B,) bool.
        num_micro_batches: of the rollout, on each rank.
        steps_per_update: micro-batches of one optimizer step.
        accelerator: of the trainer.

    Returns:
        The micro-batches, and of each whether its optimizer step holds a row to train on, on any rank.
    """
    kept, most = balance(take_rows(rows, keep), accelerator)
    count = len(kept["completion_ids"])
    dummy = pad_rows(dummy_row(take_rows(rows, slice(0, 1))), row_widths(kept))
    kept = trim_padding(join_rows([kept, dummy]))
    places = deal(most, num_micro_batches, steps_per_update)
    micro_batches = []
    for index in range(num_micro_batches):
        chosen = [min(row, count) for row, place in enumerate(places) if place == index] or [count]
        micro_batches.append(take_rows(kept, torch.tensor(chosen)))
    is_live = _is_live(set(places), num_micro_batches, steps_per_update)
    return micro_batches, is_live


def deal_all_rows(
    rows: Inputs, keep: torch.Tensor, *, num_micro_batches: int, steps_per_update: int, accelerator: Any
) -> tuple[list[Inputs], list[bool]]:
    """New micro-batches of all rows, the ones to keep spread as evenly as can be. All ranks must call it.

    Arguments and result are those of `spread_rows`; no row changes its rank.
    """
    order = torch.cat([keep.nonzero().flatten(), (~keep).nonzero().flatten()])
    places = torch.tensor(deal(len(keep), num_micro_batches, steps_per_update), device=order.device)
    micro_batches = [take_rows(rows, order[places == index]) for index in range(num_micro_batches)]
    most = max(gather_object([int(keep.sum())]))
    return micro_batches, _is_live(set(places[:most].tolist()), num_micro_batches, steps_per_update)


def _is_live(places: set[int], num_micro_batches: int, steps_per_update: int) -> list[bool]:
    """Whether each micro-batch has one of its optimizer step among `places`."""
    width = steps_per_update if num_micro_batches % steps_per_update == 0 else num_micro_batches
    live_steps = {place // width for place in places}
    return [index // width in live_steps for index in range(num_micro_batches)]


def deal(num_rows: int, num_micro_batches: int, steps_per_update: int) -> list[int]:
    """The micro-batch of each row: optimizer steps take turns, and within each its micro-batches.

    >>> deal(5, 4, 2)  # two optimizer steps of two micro-batches
    [0, 2, 1, 3, 0]
    """
    order = list(range(num_micro_batches))
    if num_micro_batches % steps_per_update == 0:
        order.sort(key=lambda index: index % steps_per_update)
    return [order[row % num_micro_batches] for row in range(num_rows)]


def balance(rows: Inputs, accelerator: Any) -> tuple[Inputs, int]:
    """Move rows from ranks with many to ranks with few, until the numbers differ by one at most.

    Only those that move are sent, to all ranks. All ranks must call it.

    Args:
        rows: this rank's rows, perhaps none.
        accelerator: of the trainer.

    Returns:
        This rank's rows, and how many the rank with the most has.
    """
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    counts = gather_object([len(rows["completion_ids"])])
    shares = [sum(counts) // num_ranks + (index < sum(counts) % num_ranks) for index in range(num_ranks)]
    if counts == shares:
        return rows, shares[0]
    device, share = rows["completion_ids"].device, shares[rank]
    everywhere = gather_object([row_widths(rows)])
    rows = pad_rows(rows, {name: max(widths[name] for widths in everywhere) for name in everywhere[0]})
    pool = join_rows(gather_object([to_device(take_rows(rows, slice(share, None)), torch.device("cpu"))]))
    missing = [max(0, wanted - count) for wanted, count in zip(shares, counts, strict=True)]
    first = sum(missing[:rank])
    received = to_device(take_rows(pool, slice(first, first + missing[rank])), device)
    return join_rows([take_rows(rows, slice(0, share)), received]), shares[0]


def row_widths(rows: Inputs) -> dict[str, int]:
    """Columns of everything in TRL's batch that has them."""
    return {name: value.shape[1] for name, value in rows.items() if has_rows(value) and value.dim() == 2}


def pad_rows(rows: Inputs, widths: dict[str, int]) -> Inputs:
    """The rows in these widths, none of which is smaller than theirs."""
    padded = dict(rows)
    for name, width in widths.items():
        missing = width - rows[name].shape[1]
        padded[name] = functional.pad(rows[name], (missing, 0) if name in _PADDED_LEFT else (0, missing))
    return padded


def dummy_row(row: Inputs) -> Inputs:
    """One row of two tokens that no loss, no statistic and no critic counts."""
    dummy = {}
    for name, value in row.items():
        if has_rows(value) and not name.endswith("_ids"):
            value = torch.ones_like(value) if name == _RATIOS else torch.zeros_like(value)
        dummy[name] = value
    dummy["prompt_mask"][:, -1] = 1
    dummy["completion_mask"][:, 0] = 1
    return dummy


def to_device(rows: Inputs, device: torch.device) -> Inputs:
    """The rows on a device."""
    return {name: value.to(device) if has_rows(value) else value for name, value in rows.items()}
