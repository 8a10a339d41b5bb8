"""Importance ratios between trainer and sampler, per token, turn or trajectory, on ragged action masks.

A sampling engine rounds differently from the trainer, so the tokens come from a slightly different policy. TRL weighs
the loss with exp(trainer's - sampler's log-probability), per token or per sequence. A long trajectory's product of
ratios is dominated by noise; here a turn can be the unit, and the mean of the log-ratios can stand for their sum.
"""

from __future__ import annotations

import torch
from accelerate.utils import gather_object

UNITS = ("token", "turn", "sequence")


@torch.no_grad()
def sampling_ratio(
    difference: torch.Tensor,
    mask: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    unit: str,
    length_normalized: bool = False,
    bounds: tuple[float | None, float | None] = (None, None),
    is_masked: bool = False,
) -> torch.Tensor:
    """Ratios of the trainer's probability to the sampler's, the same for every token of a unit.

    Args:
        difference: (B, T) trainer's minus sampler's log-probability; NaN (the engine could not tell) counts as 0.
        mask: (B, T) action tokens; bool, int or float.
        turn_ids: (B, T) which turn, -1 outside action tokens.
        unit: `token`, `turn` or `sequence`.
        length_normalized: the unit's geometric mean instead of its product.
        bounds: least and largest ratio; None for no bound.
        is_masked: ratios out of bounds become 0 (the unit leaves the loss) instead of the bound.

    Returns:
        (B, T), exactly 1 at mask 0.

    Raises:
        ValueError: for an unknown unit.

    >>> half = torch.tensor([[0.5]]).log().expand(1, 3)
    >>> ids = torch.tensor([[0, 0, 1]])
    >>> sampling_ratio(half, torch.ones(1, 3), ids, unit="turn").tolist()
    [[0.25, 0.25, 0.5]]
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is not one of {', '.join(map(repr, UNITS))}. Set unit to one of them.")
    keep = mask.bool()
    logs = torch.where(keep, difference.double().nan_to_num(0.0), 0.0)  # (B, T)
    if unit != "token":
        index = turn_ids.clamp(min=0) if unit == "turn" else torch.zeros_like(turn_ids)  # (B, T)
        sums = torch.zeros_like(logs).scatter_add(1, index, logs)  # (B, T): by unit, of which there are at most T
        if length_normalized:
            sums = sums / torch.zeros_like(logs).scatter_add(1, index, keep.double()).clamp(min=1)
        logs = sums.gather(1, index)
    ratio = logs.exp()
    low, high = bounds
    if is_masked:
        outside = torch.zeros_like(keep)
        outside = outside | (ratio < low) if low is not None else outside
        outside = outside | (ratio > high) if high is not None else outside
        ratio = torch.where(outside, 0.0, ratio)
    elif low is not None or high is not None:
        ratio = ratio.clamp(low, high)
    return torch.where(keep, ratio, 1.0).to(difference.dtype)


def ratio_by_turn(
    difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor
) -> dict[int, tuple[float, int]]:
    """Turn index -> (sum over its tokens of exp(difference), number of tokens): later turns drift further."""
    keep = mask.bool() & ~difference.isnan()
    ratios = difference.double().exp()
    sums = {}
    for turn in turn_ids[keep].unique().tolist():
        here = keep & (turn_ids == turn)
        sums[int(turn)] = (ratios[here].sum().item(), int(here.sum()))
    return sums


def mismatch_metrics(difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor) -> dict[str, float]:
    """Mean ratio of the trainer's probability to the sampler's, turn by turn, over the rows of all ranks."""
    sums: dict[int, list[float]] = {}
    for local in gather_object([ratio_by_turn(difference, mask, turn_ids)]):
        for turn, (total, count) in local.items():
            entry = sums.setdefault(turn, [0.0, 0])
            entry[0] += total
            entry[1] += count
    return {f"sampling/ratio_turn_{turn}": total / count for turn, (total, count) in sorted(sums.items())}
