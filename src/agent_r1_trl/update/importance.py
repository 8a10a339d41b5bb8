"""Importance ratios between trainer and sampler, per token, turn or trajectory, on ragged action masks.

A sampling engine rounds differently from the trainer, so the tokens come from a slightly different policy. TRL weighs
the loss with exp(trainer's - sampler's log-probability), per token or per sequence. A long trajectory's product of
ratios is dominated by noise; here a turn can be the unit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.update.batching import TrainingRows, pad_tokens

UNITS = ("token", "turn", "sequence")


def weigh_mismatch(output: dict[str, Any], rows: TrainingRows, args: Any, accelerator: Any) -> dict[str, float]:
    """Put the importance ratios of trainer to sampler into TRL's batch, (R, T); returns `sampling/*` of all ranks."""
    difference = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (R, T)
    in_time = rows.to_time(difference)  # (B, T')
    length, device = in_time.shape[1], in_time.device
    mask = pad_tokens(rows.trajectories, "action_mask", 0, length).to(device)
    turn_ids = pad_tokens(rows.trajectories, "turn_ids", -1, length).to(device)
    unit, _, constraint = args.vllm_importance_sampling_mode.partition("_")
    unit = args.importance_sampling_unit or unit
    ratio = sampling_ratio(
        in_time,
        mask,
        turn_ids,
        unit=unit,
        bounds=(args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max),
        is_masked=constraint == "mask",
    )
    ratio = output["importance_sampling_ratio"] = rows.to_rows(ratio, output["completion_mask"], fill=1.0)
    by_turn = mismatch_metrics(in_time, mask, turn_ids)

    in_loss = (output["completion_mask"] * output["tool_mask"]).bool()
    gap = difference.abs()[in_loss & ~difference.isnan()]  # NaN: the engine could not tell
    # A ratio counts once a token, that of a `sequence` once a row in the loss.
    first = in_loss.int().argmax(dim=1, keepdim=True)
    ratio = ratio.gather(1, first)[in_loss.any(dim=1)].flatten() if unit == "sequence" else ratio[in_loss]
    nothing = torch.full((1,), torch.nan, device=device)  # of a rank without tokens in the loss
    gap, ratio = (x.to(nothing.dtype) if x.numel() else nothing for x in (gap, ratio))
    own = torch.stack([gap.mean(), gap.max(), ratio.min(), ratio.mean(), ratio.max()])
    columns = accelerator.gather(own).view(-1, 5).unbind(dim=1)
    mean, most, low, middle, high = (x if x.isnan().all() else x[~x.isnan()] for x in columns)
    return by_turn | {
        "sampling/sampling_logp_difference/mean": mean.mean().item(),
        "sampling/sampling_logp_difference/max": most.max().item(),
        "sampling/importance_sampling_ratio/min": low.min().item(),
        "sampling/importance_sampling_ratio/mean": middle.mean().item(),
        "sampling/importance_sampling_ratio/max": high.max().item(),
    }


@torch.no_grad()
def sampling_ratio(
    difference: torch.Tensor,
    mask: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    unit: str,
    bounds: tuple[float | None, float | None] = (None, None),
    is_masked: bool = False,
) -> torch.Tensor:
    """Ratios of the trainer's probability to the sampler's, the same for every token of a unit.

    Args:
        difference: (B, T) trainer's minus sampler's log-probability; NaN (the engine could not tell) counts as 0.
        mask: (B, T) action tokens; bool, int or float.
        turn_ids: (B, T) which turn, -1 outside action tokens.
        unit: `token`, `turn` or `sequence`.
        bounds: least and largest ratio; None for no bound.
        is_masked: ratios out of bounds become 0 (the unit leaves the loss) instead of the bound.

    Returns:
        (B, T), exactly 1 at mask 0.

    >>> half = torch.tensor([[0.5]]).log().expand(1, 3)
    >>> ids = torch.tensor([[0, 0, 1]])
    >>> sampling_ratio(half, torch.ones(1, 3), ids, unit="turn").tolist()
    [[0.25, 0.25, 0.5]]
    """
    keep = mask.bool()
    logs = torch.where(keep, difference.double().nan_to_num(0.0), 0.0)  # (B, T)
    if unit != "token":
        index = {"turn": turn_ids.clamp(min=0), "sequence": torch.zeros_like(turn_ids)}[unit]  # (B, T)
        sums = torch.zeros_like(logs).scatter_add(1, index, logs)  # (B, T): by unit, of which there are at most T
        logs = sums.gather(1, index)
    ratio = logs.exp()
    low, high = (limit if bound is None else bound for bound, limit in zip(bounds, (0.0, math.inf), strict=True))
    bounded = torch.where((ratio < low) | (ratio > high), 0.0, ratio) if is_masked else ratio.clamp(low, high)
    return torch.where(keep, bounded, 1.0).to(difference.dtype)


def mismatch_metrics(difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor) -> dict[str, float]:
    """Mean ratio of the trainer's probability to the sampler's, turn by turn, over the rows of all ranks.

    Later turns drift further.
    """
    keep = mask.bool() & ~difference.isnan()
    ratios = difference.double().exp()
    own: dict[int, tuple[float, int]] = {}
    metrics: dict[str, float] = {}
    for turn in turn_ids[keep].unique().tolist():
        of_turn = ratios[keep & (turn_ids == turn)]
        own[turn] = of_turn.sum().item(), len(of_turn)
    ranks = gather_object([own])
    for turn in sorted({turn for one in ranks for turn in one}):
        sums, counts = zip(*(one[turn] for one in ranks if turn in one), strict=True)
        metrics[f"sampling/ratio_turn_{turn}"] = sum(sums) / sum(counts)
    return metrics
