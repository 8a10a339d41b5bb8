"""Advantages of this rank's rows, estimated on the rows of all ranks.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> [advantages] -> loss -> step -> sync weights -> next rollout

Every function here may talk to the other ranks: all of them must call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.advantages import masked_mean
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.credit import (
    Credit,
    estimate_credit,
    gather_credit_inputs,
    read_credit_inputs,
    source_scales,
    source_values,
    weighs_advantages,
    weighted_turn_rewards,
)
from agent_r1_trl.trainers.turn_rewards import schedule_factor
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.losses import kl_in_reward


def estimate_rows(
    trajectories: Sequence[Trajectory],
    args: MultiTurnConfig,
    accelerator: Any,
    *,
    mask: torch.Tensor,
    lost: torch.Tensor,
    group_size: int,
    progress: float,
    **on_tokens: torch.Tensor | None,
) -> tuple[Credit, dict[str, float]]:
    """This rank's slice of the estimator's result, and `credit/*` metrics.

    Args:
        trajectories: B of them.
        args: of the trainer.
        accelerator: of the trainer.
        mask: (B, T) bool, positions that estimators see.
        lost: (B,) bool, trajectories that leave every baseline.
        group_size: trajectories of one prompt, consecutive rows.
        progress: share of the run that is over.
        on_tokens: `kl_rewards` (B, T); for estimators with a critic `values` (B, T) and `bootstrap_values` (B,).
    """
    process_weight = args.process_reward_weight * schedule_factor(args.process_reward_schedule, progress)
    outcome_weight = args.outcome_reward_weight
    scales: dict[str, float] = {}
    if args.normalize_process_rewards:
        scales = source_scales(gather_object(source_values(trajectories)))
    weighs_rewards = not weighs_advantages(args)
    local = read_credit_inputs(
        trajectories,
        mask=mask,
        lost=lost,
        turn_rewards=weighted_turn_rewards(
            trajectories, weight=process_weight if weighs_rewards else 1.0, source_scales=scales
        ),
        outcome_weight=outcome_weight if weighs_rewards else 1.0,
    )
    inputs = gather_credit_inputs(replace(local, **on_tokens), accelerator)  # type: ignore[arg-type]
    group_ids = torch.arange(len(inputs.mask), device=inputs.mask.device) // group_size  # (N,)
    credit, parts = estimate_credit(
        inputs, group_ids, args, process_weight=process_weight, outcome_weight=outcome_weight
    )
    metrics = {
        f"credit/{name}_advantage_abs": masked_mean(part.abs(), inputs.mask).item() for name, part in parts.items()
    }
    metrics["credit/process_weight"] = process_weight
    first = accelerator.process_index * len(trajectories)
    rows, length = slice(first, first + len(trajectories)), mask.shape[1]
    returns = None if credit.returns is None else credit.returns[rows, :length]
    return Credit(advantages=credit.advantages[rows, :length].float(), returns=returns), metrics


def kl_penalties(
    old: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, *, beta: float, accelerator: Any
) -> tuple[torch.Tensor, float]:
    """(B, T) -beta * k1 on the estimators' positions, and the mean k1 over those of all ranks.

    Args:
        old: (B, T) log-probs under the policy that sampled.
        reference: (B, T) log-probs under the reference policy.
        mask: (B, T) bool.
        beta: weight of the penalty, not 0.
        accelerator: of the trainer.
    """
    penalties = kl_in_reward(torch.zeros_like(old), old, reference, mask, beta=beta)
    sums = accelerator.reduce(torch.stack([penalties.sum(), mask.sum().to(penalties)]), reduction="sum")
    return penalties, (-sums[0] / beta / sums[1].clamp(min=1)).item()
