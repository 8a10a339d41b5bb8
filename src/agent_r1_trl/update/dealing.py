"""Deals the training rows of a rollout to optimizer steps, ranks and micro-batches.

Trajectories are shuffled and cut into optimizer steps, as TRL does; the rows of a step, all rows of each of its
trajectories, are spread evenly over ranks and micro-batches. Rows that are not kept leave the update; the trajectories
that are left take turns in the steps, so that none has many more than another.

The number of micro-batches stays, and with it that of forward passes, on every rank. A micro-batch has equally many
rows on all ranks: where there are none left, a dummy row without loss fills up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn import functional

from agent_r1_trl.update.batching import Inputs, has_rows, join_rows, take_rows, trim_padding

IS_KEPT = "is_kept"
"""Entry of TRL's batch, (R,): whether the row is trained on; only where a callback has said so."""
HAS_SIGNAL = "has_signal"
"""Entry of a micro-batch: whether its optimizer step trains on any row of this rollout; only where some may not."""
DUMMY = -1
"""In a plan, a row that fills up."""
_PADDED_LEFT = ("prompt_ids", "prompt_mask", "privileged_ids", "privileged_mask")
_RATIOS = "importance_sampling_ratio"


def deal(
    output: Inputs,
    trajectories: torch.Tensor,
    order: torch.Tensor,
    *,
    num_micro_batches: int,
    steps_per_update: int,
    critic_uses_filtered: bool,
    accelerator: Any,
) -> list[Inputs]:
    """The micro-batches of a rollout. All ranks must call it.

    Args:
        output: TRL's batch of this rank's R rows.
        trajectories: (R,) that of each row, -1 for none.
        order: (B,) the trajectories in the order in which they are trained on.
        num_micro_batches: of the rollout, on each rank.
        steps_per_update: micro-batches of one optimizer step.
        critic_uses_filtered: whether the critic trains on rows that are not kept, too.
        accelerator: of the trainer.
    """
    rows, is_filtered = dict(output), IS_KEPT in output
    is_dealt = trajectories >= 0
    kept = is_dealt
    if is_filtered:
        kept = is_dealt & rows[IS_KEPT].cpu()
        for_critic = _take_out(rows, critic_uses_filtered)
        is_dealt = is_dealt if for_critic else kept
    place = torch.where(is_dealt, order.argsort()[trajectories], -1)
    everywhere = gather_object([(place.tolist(), kept.tolist(), len(order))])
    plan, has_signal = plan_deal(everywhere, num_micro_batches, steps_per_update, in_turns=is_filtered)
    rows, chosen = exchange(rows, plan, accelerator)
    rows = trim_padding(rows) if is_filtered else rows
    buffer = [take_rows(rows, places) for places in chosen]
    return _mark_signal(buffer, has_signal, accelerator) if is_filtered else buffer


def plan_deal(
    ranks: Sequence[tuple[Sequence[int], Sequence[bool], int]],
    num_micro_batches: int,
    steps_per_update: int,
    *,
    in_turns: bool,
) -> tuple[list[list[list[int]]], list[bool]]:
    """Which rows each micro-batch of each rank gets, and of each whether its optimizer step trains on any row.

    Args:
        ranks: of each, for each of its rows the place of the row's trajectory in the order of training (-1 for a row
            that nobody gets) and whether the row is kept; and its number of trajectories. Rows are numbered
            throughout.
        num_micro_batches: of the rollout, on each rank.
        steps_per_update: micro-batches of one optimizer step.
        in_turns: steps, and within them micro-batches, take turns; otherwise each gets a stretch.

    Returns:
        (rank, micro-batch) -> numbers of rows, `DUMMY` where there is none.

    >>> plan_deal([([1, 0, 2, 3], [True] * 4, 4)], 2, 1, in_turns=False)
    ([[[1, 0], [2, 3]]], [True, True])
    >>> plan_deal([([0, 1, 2, 3], [True] * 4, 4)], 2, 1, in_turns=True)[0]
    [[[0, 2], [1, 3]]]
    """
    width = steps_per_update if num_micro_batches % steps_per_update == 0 else num_micro_batches
    num_steps = num_micro_batches // width
    rank = np.repeat(np.arange(len(ranks)), [len(places) for places, _, _ in ranks])  # (N,), of each row
    place, is_kept = (np.concatenate([one[index] for one in ranks]).astype(int) for index in (0, 1))  # (N,)
    order = np.lexsort((place, rank, -is_kept))  # stable
    order = order[place[order] >= 0]
    if in_turns:
        is_next = np.diff(rank[order], prepend=-1).astype(bool) | np.diff(place[order], prepend=-1).astype(bool)
        step = (np.cumsum(is_next) - 1) % num_steps  # of each row in the order
    else:
        step = place[order] * num_steps // ranks[0][2]
    plan: list[list[list[int]]] = [[] for _ in ranks]
    has_signal: list[bool] = []
    for number in range(num_steps):
        in_step = order[step == number]
        own = _balanced([in_step[rank[in_step] == index].tolist() for index in range(len(ranks))])
        for passes, rows in zip(plan, own, strict=True):
            parts = [rows[start::width] for start in range(width)]
            if not in_turns:
                parts = [part.tolist() for part in np.array_split(np.array(rows, dtype=int), width)]
            passes += [part or [DUMMY] for part in parts]
        has_signal += [bool(is_kept[in_step].any())] * width
    return plan, has_signal


def _balanced(ranks: list[list[int]]) -> list[list[int]]:
    """Rows of each rank, moved from those with many to those with few; then dummies make them equally many."""
    total, num = sum(map(len, ranks)), len(ranks)
    shares = [total // num + (index < total % num) for index in range(num)]
    moving = [row for rows, share in zip(ranks, shares, strict=True) for row in rows[share:]]
    balanced = []
    for rows, share in zip(ranks, shares, strict=True):
        missing = max(0, share - len(rows))
        balanced.append([*rows[:share], *moving[:missing], *[DUMMY] * (shares[0] - share)])
        moving = moving[missing:]
    return balanced


def _take_out(rows: Inputs, critic_uses_filtered: bool) -> bool:
    """Take the tokens of rows that are not kept out of the losses.

    Returns:
        Whether the critic trains on them nevertheless.
    """
    kept = rows.pop(IS_KEPT)
    rows["tool_mask"] = rows["tool_mask"] * kept.unsqueeze(1)
    rows["in_baseline"] = rows["in_baseline"] & kept
    for_critic = "value_mask" in rows and critic_uses_filtered
    if "value_mask" in rows and not for_critic:
        rows["value_mask"] = rows["value_mask"] & kept.unsqueeze(1)
    return for_critic


def _mark_signal(buffer: list[Inputs], has_signal: Sequence[bool], accelerator: Any) -> list[Inputs]:
    """Say which micro-batches belong to a step that is made, and divide by the mean over these steps alone.

    All ranks must call it.
    """
    counted = {"num_items_in_batch": "tool_mask", "num_value_items": "value_mask"}
    live = max(1, sum(has_signal)) / len(buffer)  # TRL divides by the mean over all optimizer steps
    for name, mask in counted.items():
        if mask in buffer[0]:
            own = [inputs[mask].sum() * signal for inputs, signal in zip(buffer, has_signal, strict=True)]
            count = accelerator.gather(torch.stack(own).sum()).sum()
            for inputs in buffer:
                inputs[name] = count / live
    for inputs, signal in zip(buffer, has_signal, strict=True):
        inputs[HAS_SIGNAL] = torch.tensor(signal)
    return buffer


# -------------------------------------------------------------------- moving rows


def exchange(rows: Inputs, plan: list[list[list[int]]], accelerator: Any) -> tuple[Inputs, list[torch.Tensor]]:
    """This rank's rows under a plan, and a dummy behind them. Only those that move are sent, to all ranks.

    Args:
        rows: that this rank has; they are numbered throughout the ranks.
        plan: (rank, micro-batch) -> numbers of rows.
        accelerator: of the trainer.

    Returns:
        The rows, and for each micro-batch of this rank the places of its rows among them.
    """
    rank, counts = accelerator.process_index, gather_object([len(rows["completion_ids"])])
    home = np.repeat(np.arange(len(counts)), counts).tolist()
    owner = {row: place for place, parts in enumerate(plan) for part in parts for row in part if row != DUMMY}
    first, device = sum(counts[:rank]), rows["completion_ids"].device
    moving = [row for row in sorted(owner) if owner[row] != home[row]]
    staying = [row for row in range(first, first + counts[rank]) if owner.get(row) == rank]
    dummy = dummy_row(take_rows(rows, slice(0, 1)))
    numbers = [*staying, *(row for row in moving if owner[row] == rank)]
    parts = [take_rows(rows, _index(row - first for row in staying)), dummy]
    if moving:
        everywhere = gather_object([row_widths(rows)])
        widths = {name: max(one[name] for one in everywhere) for name in everywhere[0]}
        leaving = take_rows(rows, _index(row - first for row in moving if home[row] == rank))
        pool = join_rows(gather_object([to_device(pad_rows(leaving, widths), torch.device("cpu"))]))
        arriving = take_rows(pool, _index(place for place, row in enumerate(moving) if owner[row] == rank))
        parts = [pad_rows(part, widths) for part in (parts[0], to_device(arriving, device), dummy)]
    place_of = {row: place for place, row in enumerate(numbers)} | {DUMMY: len(numbers)}
    return join_rows(parts), [_index(place_of[row] for row in part) for part in plan[rank]]


def _index(places: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*places], dtype=torch.long)


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
