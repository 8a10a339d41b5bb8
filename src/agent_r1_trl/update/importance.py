"""Importance ratios between trainer and sampler, per token, turn or trajectory, on ragged action masks.

A sampling engine rounds differently from the trainer, so the tokens come from a slightly different policy. TRL weighs
the loss with exp(trainer's - sampler's log-probability), per token or per sequence. A long trajectory's product of
ratios is dominated by noise; here a turn can be the unit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from agent_r1_trl.update.entries import EFFECTIVE_SHARE, Inputs
from agent_r1_trl.update.rows import TrainingRows, pad_tokens

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

UNITS = ("token", "turn", "sequence")
MAX_LOG_RATIO = 20.0
"""Beyond it a ratio is as good as infinite, and its square need not overflow."""


def weigh_mismatch(
    output: Inputs, rows: TrainingRows, args: MultiTurnConfig, accelerator: Accelerator
) -> dict[str, float]:
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
    ratio = rows.to_rows(ratio, output["completion_mask"], fill=1.0)
    output["importance_sampling_ratio"] = ratio

    in_loss = (output["completion_mask"] * output["tool_mask"]).bool()
    metrics = mismatch_metrics(in_time, mask, turn_ids)
    share = effective_share(difference, in_loss, accelerator)
    metrics["sampling/effective_share"] = share
    if args.rollouts_ahead:
        output[EFFECTIVE_SHARE] = torch.tensor(share, device=device)
    metrics |= weight_metrics(ratio, in_loss, accelerator)
    gaps = difference.abs()[in_loss & ~difference.isnan()]  # NaN: the engine could not tell
    if unit == "sequence":  # a ratio counts once a row in the loss, else once a token
        first = in_loss.int().argmax(dim=1, keepdim=True)
        ratios = ratio.gather(1, first)[in_loss.any(dim=1)].flatten()
    else:
        ratios = ratio[in_loss]
    return metrics | _range_metrics(gaps, ratios, accelerator)


def _range_metrics(gaps: torch.Tensor, ratios: torch.Tensor, accelerator: Accelerator) -> dict[str, float]:
    """TRL's metrics of gaps and ratios, (n,) and (m,) on this rank. All ranks must call it."""
    nothing = torch.full((1,), torch.nan, device=gaps.device)  # of a rank without tokens in the loss
    gaps = gaps.to(nothing.dtype) if gaps.numel() else nothing
    ratios = ratios.to(nothing.dtype) if ratios.numel() else nothing
    own = torch.stack([gaps.mean(), gaps.max(), ratios.min(), ratios.mean(), ratios.max()])
    columns = accelerator.gather(own).view(-1, 5).unbind(dim=1)
    mean_gap, largest_gap, smallest, mean_ratio, largest = (_known(column) for column in columns)
    return {
        "sampling/sampling_logp_difference/mean": mean_gap.mean().item(),
        "sampling/sampling_logp_difference/max": largest_gap.max().item(),
        "sampling/importance_sampling_ratio/min": smallest.min().item(),
        "sampling/importance_sampling_ratio/mean": mean_ratio.mean().item(),
        "sampling/importance_sampling_ratio/max": largest.max().item(),
    }


def _known(of_ranks: torch.Tensor) -> torch.Tensor:
    """The numbers of the ranks that have any; all NaN where none has."""
    is_known = ~of_ranks.isnan()
    return of_ranks[is_known] if is_known.any() else of_ranks


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
    low = 0.0 if bounds[0] is None else bounds[0]
    high = math.inf if bounds[1] is None else bounds[1]
    bounded = ratio.clamp(low, high)
    if is_masked:
        bounded = torch.where(ratio == bounded, ratio, 0.0)
    return torch.where(keep, bounded, 1.0).to(difference.dtype)


@torch.no_grad()
def weight_metrics(weights: torch.Tensor, in_loss: torch.Tensor, accelerator: Accelerator) -> dict[str, float]:
    """How much of a batch is left once tokens are weighted, over the rows of all ranks. All ranks must call it.

    The effective sample size of n weights is (sum w)^2 / sum w^2 (Kish 1965), here as a share of n: 1 where all weigh
    the same, 1/n where a single one has all the weight, 0 where none has any. The weight of a row is the mean of its
    tokens' weights.

    Args:
        weights: (R, T) >= 0.
        in_loss: (R, T) bool, tokens in the loss; a row without any is not counted.
        accelerator: of the trainer.

    Returns:
        Share of the rows whose tokens all have weight 0; effective sample size of rows and of tokens. NaN where no
        token is in the loss.
    """
    of_tokens = weights.double() * in_loss  # (R, T)
    num_tokens = in_loss.sum(dim=1)  # (R,)
    is_counted = num_tokens > 0
    of_rows = of_tokens.sum(dim=1)[is_counted] / num_tokens[is_counted]
    own = [
        is_counted.sum(),
        (of_rows == 0).sum(),
        of_rows.sum(),
        of_rows.square().sum(),
        num_tokens.sum(),
        of_tokens.sum(),
        of_tokens.square().sum(),
    ]
    sums = accelerator.reduce(torch.stack([value.double() for value in own]), reduction="sum")
    num_rows, num_zero_rows, row_sum, row_squares, num_all_tokens, token_sum, token_squares = sums.tolist()
    return {
        "sampling/zero_weight_rows": num_zero_rows / num_rows if num_rows else math.nan,
        "sampling/effective_rows": _effective_share(num_rows, row_sum, row_squares),
        "sampling/effective_tokens": _effective_share(num_all_tokens, token_sum, token_squares),
    }


@torch.no_grad()
def effective_share(difference: torch.Tensor, in_loss: torch.Tensor, accelerator: Accelerator) -> float:
    """Effective sample size of the tokens' ratios, before any bound, as a share of their number. A collective call.

    Args:
        difference: (R, T) trainer's minus sampler's log-probability; NaN where the engine could not tell.
        in_loss: (R, T) bool, tokens in the loss.
        accelerator: of the trainer.

    Returns:
        1 where the trainer's policy is the one that sampled the tokens of all ranks; NaN where no token is known.
    """
    logs = difference.double()[in_loss & ~difference.isnan()]
    ratios = logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    own = torch.stack([ratios.sum(), ratios.square().sum(), ratios.new_tensor(ratios.numel())])
    total, squares, num = accelerator.reduce(own, reduction="sum").tolist()
    return _effective_share(num, total, squares)


def _effective_share(num: float, total: float, total_of_squares: float) -> float:
    """Kish's effective sample size as a share of the number of weights."""
    if num == 0:
        return math.nan
    if total_of_squares == 0:
        return 0.0
    return total**2 / (num * total_of_squares)


def mismatch_metrics(difference: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor) -> dict[str, float]:
    """Mean ratio of the trainer's probability to the sampler's, turn by turn, over the rows of all ranks.

    Later turns drift further.
    """
    keep = mask.bool() & ~difference.isnan()
    ratios = difference.double().exp()
    own: dict[int, tuple[float, int]] = {}  # of each turn, sum and number of ratios
    for turn in turn_ids[keep].unique().tolist():
        of_turn = ratios[keep & (turn_ids == turn)]
        own[turn] = of_turn.sum().item(), len(of_turn)
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for of_rank in gather_object([own]):
        for turn, (total, count) in of_rank.items():
            sums[turn] = sums.get(turn, 0.0) + total
            counts[turn] = counts.get(turn, 0) + count
    return {f"sampling/ratio_turn_{turn}": sums[turn] / counts[turn] for turn in sorted(sums)}
