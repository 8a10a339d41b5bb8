"""Micro-batches by tokens (`max_tokens_per_micro_batch`): what an optimizer step computes, in parts of like size.

TRL cuts a rollout into micro-batches of `per_device_train_batch_size` rows, which take as much memory and time as
their tokens. Here the rows of an optimizer step, of all ranks, are dealt out anew: into the fewest micro-batches whose
tokens stay below the limit, of about equal size, the same number on every rank. Rows without loss are excluded; a rank
that has nothing for a micro-batch computes one token. The Trainer's micro-steps stay as many as they were: each runs
its share of the micro-batches, perhaps several, perhaps none.

Tokens are counted as the layout computes them: `packed` adds up the rows, and `shared` counts what rows have in common
at their beginning once (of rows in the order of their tokens, each adds what it does not share with the one before).
There one process cuts where least is shared, and several cut into micro-batches of like size.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from agent_r1_trl.update.batches import join_rows, loss_masks, take_rows, trim_padding, whole_rows
from agent_r1_trl.update.entries import MICRO_BATCHES, STANDS_FOR, Inputs
from agent_r1_trl.update.exchange import DUMMY, exchange
from agent_r1_trl.update.packing import common_length, needed_columns

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


def repack(
    buffer: list[Inputs],
    *,
    max_tokens: int,
    steps_per_update: int,
    share_prefixes: bool,
    accelerator: Accelerator,
    needs_every_step: bool = False,
) -> list[Inputs]:
    """The micro-steps of a rollout with their `MICRO_BATCHES`. All ranks must call it.

    The buffer holds TRL's micro-batches in the order of training, with the scales for lost rows; the micro-steps of an
    optimizer step divide it or are divided by it. A row of more than `max_tokens` stands alone. With
    `needs_every_step` no micro-step may be without a micro-batch.
    """
    width = min(steps_per_update, len(buffer))
    least = width if needs_every_step else 1
    steps: list[Inputs] = []
    for start in range(0, len(buffer), width):
        window = buffer[start : start + width]
        micro_batches = _micro_batches_of(
            window, max_tokens, share_prefixes=share_prefixes, accelerator=accelerator, least=least
        )
        bounds = [index * len(micro_batches) // width for index in range(width + 1)]
        steps += [{MICRO_BATCHES: micro_batches[first:end]} for first, end in pairwise(bounds)]
        for one in micro_batches:
            one[STANDS_FOR] = width / len(micro_batches)
    return steps


def _micro_batches_of(
    window: list[Inputs], max_tokens: int, *, share_prefixes: bool, accelerator: Accelerator, least: int
) -> list[Inputs]:
    """This rank's micro-batches of one optimizer step; on all ranks they are as many, of as many rows."""
    rows = join_rows(window)
    ids = valid_ids(rows)
    # Beyond this rank, only what is shared has to be known by its tokens.
    own_rows = ids if share_prefixes else [len(row) for row in ids]
    everywhere = gather_object(own_rows)
    plan = plan_micro_batches(everywhere, accelerator.num_processes, max_tokens, least=least)
    for at_one_time in zip(*plan, strict=True):  # the micro-batches of all ranks
        most = max(1, *map(len, at_one_time))
        for chosen in at_one_time:
            chosen += [DUMMY] * (most - len(chosen))
    own, parts = exchange(rows, plan, accelerator)
    scale_of_row = window[0]["row_scale"] / len(window[0]["in_baseline"])
    micro_batches = []
    for places in parts:
        inputs = trim_padding(take_rows(own, places))
        inputs["row_scale"] = scale_of_row * len(places)
        inputs["micro_batch_scale"] = torch.tensor(1.0)
        micro_batches.append(inputs)
    return micro_batches


def valid_ids(rows: Inputs) -> list[np.ndarray]:
    """The ids of each row of TRL's batch that a packed forward pass of its loss computes."""
    ids, mask = whole_rows(rows)
    _, scored = loss_masks(rows)
    return computed_ids(ids, mask, scored)


def computed_ids(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor) -> list[np.ndarray]:
    """The ids of each row, (B, P + T), that a packed forward pass computes: up to the last that predicts a scored one.

    None of a row where none of its completion tokens, (B, T), is scored.
    """
    ids = input_ids.cpu().numpy()
    is_token = attention_mask.cpu().bool()
    num_prompt = input_ids.shape[1] - scored.shape[1]
    scored_tokens = scored.cpu().bool() & is_token[:, num_prompt:]
    starts = is_token.int().argmax(dim=1).tolist()
    ends = needed_columns(scored_tokens, num_prompt).tolist()
    computed = []
    for row, start, end in zip(ids, starts, ends, strict=True):
        computed.append(row[start:end] if end else row[:0])
    return computed


# -------------------------------------------------------------------- which row, which rank, which micro-batch


def plan_micro_batches(
    rows: Sequence[Any], num_ranks: int, max_tokens: int, *, least: int = 1
) -> list[list[list[int]]]:
    """Deal rows out to ranks and micro-batches; the largest come first, and those of one time have like sizes.

    Args:
        rows: of all ranks; their ids where common beginnings are computed once, else their numbers of tokens. Rows
            without tokens are excluded.
        num_ranks: ranks.
        max_tokens: of a micro-batch, unless a single row has more.
        least: as many micro-batches on each rank at least.

    Returns:
        Of each rank, of each of its micro-batches, the numbers of the rows.

    >>> plan_micro_batches([5, 3, 0, 4, 2], num_ranks=1, max_tokens=8)
    [[[0, 4], [3, 1]]]
    """
    shares_prefixes = bool(rows) and not isinstance(rows[0], int)
    valid = [row for row, ids in enumerate(rows) if (len(ids) if shares_prefixes else ids)]
    if valid and shares_prefixes:
        bins = _stretches(rows, valid, num_ranks, max_tokens, least)
    else:
        bins = _bins(rows, valid, num_ranks, max_tokens, least)
    num_micro_batches = max(least, _divided_up(len(bins), num_ranks))
    num_missing = num_micro_batches * num_ranks - len(bins)
    bins += [[] for _ in range(num_missing)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _divided_up(number: int, by: int) -> int:
    """Number / by, rounded up."""
    return -(-number // by)


def _bins(sizes: Sequence[int], valid: list[int], num_ranks: int, max_tokens: int, least: int) -> list[list[int]]:
    """The longest row first, always into the emptiest bin; as few bins as stay below the limit."""
    limit = max([max_tokens, *(sizes[row] for row in valid)])
    total = sum(sizes[row] for row in valid)
    num_micro_batches = max(least, _divided_up(total, limit * num_ranks))
    largest_first = sorted(valid, key=lambda row: -sizes[row])
    while True:
        num_bins = num_micro_batches * num_ranks
        heap: list[tuple[int, int, list[int]]] = [(0, index, []) for index in range(num_bins)]
        for row in largest_first:
            size, index, chosen = heap[0]  # the emptiest
            heapq.heapreplace(heap, (size + sizes[row], index, [*chosen, row]))
        if max(size for size, _, _ in heap) <= limit:
            fullest_first = sorted(heap, key=lambda item: (-item[0], item[1]))
            return [chosen for _, _, chosen in fullest_first]
        num_micro_batches += 1


def _stretches(
    rows: Sequence[np.ndarray], valid: list[int], num_ranks: int, max_tokens: int, least: int
) -> list[list[int]]:
    """Rows in the order of their tokens, cut into stretches that share as much as they can.

    Where several micro-batches have to be of like size, they are few first, and the largest is as small as it can be.
    """
    order = sorted(valid, key=lambda row: sort_key(rows[row]))
    sizes = [len(rows[row]) for row in order]
    new = sizes[:1]  # tokens of each row that the row before it does not begin with
    for before, row in pairwise(order):
        new.append(len(rows[row]) - common_length(rows[before], rows[row]))
    limit = max([max_tokens, *sizes])
    needs_balance = num_ranks * least > 1
    if needs_balance:
        limit = _smallest_limit(sizes, new, limit, num_ranks, least)
    stretches = _cut(sizes, new, limit, few_first=needs_balance)
    largest_first = sorted(stretches, key=lambda stretch: -stretch[0])
    return [order[first:end] for _, first, end in largest_first]


def _smallest_limit(sizes: list[int], new: list[int], limit: int, num_ranks: int, least: int) -> int:
    """The smallest limit of tokens that needs no more micro-batches than `limit` does."""
    num_bins = len(_cut(sizes, new, limit))
    num_micro_batches = max(least, _divided_up(num_bins, num_ranks))
    num_stretches = num_micro_batches * num_ranks
    low, high = max(sizes, default=0), limit
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sizes, new, middle)) <= num_stretches:
            high = middle
        else:
            low = middle + 1
    return high


def _cut(sizes: list[int], new: list[int], limit: int, *, few_first: bool = True) -> list[tuple[int, int, int]]:
    """Stretches within a limit: the fewest, and of these those with the fewest tokens; or the other way round.

    `new` counts the tokens that each row does not share with the row before. What is left is decided by the largest
    stretch. Returns tokens, first row and end of each stretch.
    """
    best = [((0, 0), 0, 0)]  # of the rows before each: the costs, the largest stretch, and where the last begins
    for end in range(1, len(sizes) + 1):
        ways = []
        num_new = 0  # tokens that the rows behind the first one add
        for first in range(end - 1, -1, -1):
            size = sizes[first] + num_new
            if size <= limit:
                costs, largest, _ = best[first]
                added = (1, size) if few_first else (size, 1)
                total = (costs[0] + added[0], costs[1] + added[1])
                ways.append((total, max(largest, size), first))
            num_new += new[first]
            if num_new > limit:
                break
        best.append(min(ways))
    stretches = []
    end = len(sizes)
    while end:
        _, _, first = best[end]
        size = sizes[first] + sum(new[first + 1 : end])
        stretches.append((size, first, end))
        end = first
    return stretches[::-1]


def sort_key(ids: np.ndarray) -> bytes:
    """Bytes that sort as the ids, (n,), do: rows that begin alike stand together."""
    return ids.astype(">i4").tobytes()


def plan_scoring(ids: Sequence[np.ndarray], max_tokens: int, *, share_prefixes: bool) -> list[list[int]]:
    """Rows of each micro-batch that scores this rank's rows (`computed_ids`); none for one that others need.

    All ranks must call it: they get equally many.
    """
    rows = ids if share_prefixes else [len(row) for row in ids]
    (micro_batches,) = plan_micro_batches(rows, 1, max_tokens)
    most = max(gather_object([len(micro_batches)]))  # sharded weights are gathered by all ranks together
    return micro_batches + [[]] * (most - len(micro_batches))


# -------------------------------------------------------------------- running micro-batches


def run_micro_batches(
    compute_loss: Callable[[Inputs], torch.Tensor],
    model: nn.Module,
    micro_batches: list[Inputs],
    accelerator: Accelerator,
) -> torch.Tensor:
    """The loss of a micro-step, whose gradients so far are those of all micro-batches but the last.

    Gradients are reduced between ranks with the last micro-batch alone, if at all. There may be none.
    """
    if not micro_batches:
        return torch.zeros((), device=accelerator.device, requires_grad=True)
    *others, last = micro_batches
    options = {"scale_wrt_gas": False} if accelerator.distributed_type == "DEEPSPEED" else {}  # as the Trainer does
    total = torch.zeros((), device=accelerator.device)
    with _held_back(accelerator):
        for inputs in others:
            with accelerator.no_sync(model):
                loss = compute_loss(inputs)
                accelerator.backward(loss, **options)
            total += loss.detach()
    return compute_loss(last) + total


@contextlib.contextmanager
def _held_back(accelerator: Accelerator) -> Iterator[None]:
    """For DeepSpeed, which makes its step in the backward pass, no micro-batch inside is the last of the step."""
    is_last = accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        yield
    finally:
        accelerator.gradient_state._set_sync_gradients(is_last)
