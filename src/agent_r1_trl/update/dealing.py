"""Which rows of a rollout are trained on in which micro-batch, and on which rank.

Trajectories are shuffled and cut into optimizer steps, as TRL does; the rows of a step, all rows of each of its
trajectories, are spread evenly over ranks and micro-batches. Rows that are not kept leave the update; the trajectories
that are left take turns in the steps, so that none has many more than another. The number of micro-batches stays, and
a micro-batch has equally many rows on all ranks: a dummy row without loss fills up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from agent_r1_trl.update.batches import take_rows, trim_padding
from agent_r1_trl.update.entries import COUNT_OF, EXTRA_TOKENS, HAS_SIGNAL, HAS_TERM, IS_KEPT, Inputs
from agent_r1_trl.update.exchange import DUMMY, exchange

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

FOR_TERM = 0.5
"""In a plan, a row that is not kept and comes back for the tokens of a loss term."""


def deal(
    output: Inputs,
    trajectories: torch.Tensor,
    order: torch.Tensor,
    *,
    args: MultiTurnConfig,
    accelerator: Accelerator,
) -> list[Inputs]:
    """The micro-batches of a rollout, `steps_per_generation` of them. All ranks must call it.

    `output` is TRL's batch of this rank's R rows, `trajectories`, (R,), that of each row (-1 for none), and `order`,
    (B,), says in which order these are trained on.
    """
    rows = dict(output)
    is_dealt = trajectories >= 0
    kept = is_dealt.float()
    is_filtered = IS_KEPT in output
    if is_filtered:
        is_kept = rows.pop(IS_KEPT)
        kept = is_dealt * torch.where(is_kept, 1.0, FOR_TERM * _has_terms(rows)).cpu()
        is_dealt = kept > 0
        rows["tool_mask"] = rows["tool_mask"] * is_kept.unsqueeze(1)
        rows["in_baseline"] = rows["in_baseline"] & is_kept
        if "value_mask" in rows:
            rows["value_mask"] = rows["value_mask"] & is_kept.unsqueeze(1)

    place_of_trajectory = order.argsort()
    place = torch.where(is_dealt, place_of_trajectory[trajectories], -1)
    everywhere = gather_object([(place.tolist(), kept.tolist(), len(order))])
    plan, has_signal = plan_deal(
        everywhere, args.steps_per_generation, args.gradient_accumulation_steps, in_turns=is_filtered
    )
    rows, chosen = exchange(rows, plan, accelerator)
    if not is_filtered:
        return [take_rows(rows, places) for places in chosen]
    rows = trim_padding(rows)
    buffer = [take_rows(rows, places) for places in chosen]
    return _mark_signal(buffer, has_signal, accelerator, steps_per_update=args.gradient_accumulation_steps)


def _has_terms(rows: Inputs) -> torch.Tensor:
    """(R,) whether a row has a token of any loss term."""
    found = torch.zeros_like(rows["in_baseline"])
    for name in rows:
        if name.startswith(EXTRA_TOKENS):
            found = found | rows[name].any(dim=1)
    return found


def plan_deal(
    ranks: Sequence[tuple[Sequence[int], Sequence[int], int]],
    num_micro_batches: int,
    steps_per_update: int,
    *,
    in_turns: bool,
) -> tuple[list[list[list[int]]], list[bool]]:
    """Which rows each micro-batch of each rank gets, and of each whether its optimizer step trains on any kept row.

    Args:
        ranks: of each, for each of its rows the place of the row's trajectory in the order of training (-1 for a row
            that nobody gets) and whether the row is kept (`FOR_TERM` for one of a loss term alone; rows with larger
            numbers are dealt first); and its number of trajectories. Rows are numbered throughout.
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
    width = _step_width(num_micro_batches, steps_per_update)
    num_steps = num_micro_batches // width
    num_trajectories = ranks[0][2]
    rank = np.repeat(np.arange(len(ranks)), [len(places) for places, _, _ in ranks])  # (N,), of each row
    place = np.concatenate([places for places, _, _ in ranks]).astype(int)  # (N,)
    is_kept = np.concatenate([kept for _, kept, _ in ranks]).astype(float)  # (N,)
    order = np.lexsort((place, rank, -is_kept))  # kept rows first, then by rank, there by place
    order = order[place[order] >= 0]
    if in_turns:
        # Each trajectory goes to the next step, with all of its rows.
        is_new_rank = np.diff(rank[order], prepend=-1).astype(bool)
        is_new_trajectory = np.diff(place[order], prepend=-1).astype(bool)
        number = np.cumsum(is_new_rank | is_new_trajectory) - 1
        step = number % num_steps  # of each row in the order
    else:
        step = place[order] * num_steps // num_trajectories

    plan: list[list[list[int]]] = [[] for _ in ranks]
    has_signal: list[bool] = []
    for number_of_step in range(num_steps):
        in_step = order[step == number_of_step]
        of_ranks = _balanced([in_step[rank[in_step] == index].tolist() for index in range(len(ranks))])
        for micro_batches, rows in zip(plan, of_ranks, strict=True):
            parts = _parts(rows, width, in_turns=in_turns)
            micro_batches += [part or [DUMMY] for part in parts]
        trains = bool((is_kept[in_step] == 1).any())
        has_signal += [trains] * width
    return plan, has_signal


def _parts(rows: list[int], num_parts: int, *, in_turns: bool) -> list[list[int]]:
    """Rows of a step on one rank, dealt out to its micro-batches."""
    if in_turns:
        return [rows[start::num_parts] for start in range(num_parts)]
    return [part.tolist() for part in np.array_split(np.array(rows, dtype=int), num_parts)]


def _balanced(ranks: list[list[int]]) -> list[list[int]]:
    """Rows of each rank, moved from those with many to those with few; then dummies make them equally many."""
    total = sum(len(rows) for rows in ranks)
    share, remainder = divmod(total, len(ranks))
    shares = [share + (index < remainder) for index in range(len(ranks))]
    moving = []
    for rows, share in zip(ranks, shares, strict=True):
        moving += rows[share:]
    balanced = []
    for rows, share in zip(ranks, shares, strict=True):
        num_missing = max(0, share - len(rows))
        arriving, moving = moving[:num_missing], moving[num_missing:]
        dummies = [DUMMY] * (shares[0] - share)
        balanced.append([*rows[:share], *arriving, *dummies])
    return balanced


def _step_width(num_micro_batches: int, steps_per_update: int) -> int:
    """Micro-batches of an optimizer step; all of a rollout where these are not a multiple."""
    return steps_per_update if num_micro_batches % steps_per_update == 0 else num_micro_batches


def _mark_signal(
    buffer: list[Inputs], has_signal: Sequence[bool], accelerator: Accelerator, *, steps_per_update: int
) -> list[Inputs]:
    """Say what each micro-batch's optimizer step trains on, and count the tokens of the steps that have any.

    TRL divides by the mean number of tokens over all optimizer steps of a rollout. Here that is the mean over the
    steps with kept rows, for the policy and the critic, and for a loss term over the steps with tokens of the term:
    neither depends on the other. All ranks must call it.
    """
    num_items = _mean_count(_totals(buffer, "tool_mask", accelerator), has_signal)
    for inputs, signal in zip(buffer, has_signal, strict=True):
        inputs["num_items_in_batch"] = num_items
        inputs[HAS_SIGNAL] = torch.tensor(signal)
    if "value_mask" in buffer[0]:
        num_value_items = _mean_count(_totals(buffer, "value_mask", accelerator), has_signal)
        for inputs in buffer:
            inputs["num_value_items"] = num_value_items

    width = _step_width(len(buffer), steps_per_update)
    for term in [name for name in buffer[0] if name.startswith(EXTRA_TOKENS)]:
        totals = _totals(buffer, term, accelerator)
        has_tokens = totals.view(-1, width).sum(dim=1) > 0  # (steps,)
        of_micro_batches = has_tokens.repeat_interleave(width).tolist()
        num_tokens = _mean_count(totals, of_micro_batches)
        for inputs, has_any in zip(buffer, of_micro_batches, strict=True):
            inputs[COUNT_OF + term] = num_tokens
            inputs[HAS_TERM + term] = torch.tensor(has_any)
    return buffer


def _totals(buffer: list[Inputs], mask: str, accelerator: Accelerator) -> torch.Tensor:
    """(M,) tokens of a mask in each micro-batch of all ranks."""
    own = torch.stack([inputs[mask].sum() for inputs in buffer])
    return accelerator.gather(own.unsqueeze(0)).sum(dim=0)


def _mean_count(totals: torch.Tensor, counts: Sequence[bool]) -> torch.Tensor:
    """() the number that M micro-batches get in place of their totals, (M,): the mean over the steps that count."""
    count = (totals * torch.tensor(counts, device=totals.device)).sum()
    share = max(1, sum(counts)) / len(totals)
    return count / share
