"""Turn-level GRPO: credit for every turn relative to the group, without a hidden bonus per turn."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.group import STD_EPS, GroupStatistics
from agent_r1_trl.advantages.masked import check_one_per_row, float_dtype
from agent_r1_trl.advantages.scan import reverse_scan


def compute_turn_group_advantages(
    turn_rewards: torch.Tensor,
    outcome: torch.Tensor,
    turn_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma_turn: float,
    process_weight: float,
) -> torch.Tensor:
    """GRPO on the outcome + process_weight * (process returns of the turn relative to the group's).

    P_k = sum_{j >= k} gamma_turn^(j - k) r_j. The process part of turn k is (P_k - mean) / (std + 1e-4) with mean and
    std over the group's P_1, one number per trajectory. A mean over turns would have as many terms as the policy
    chooses to play turns, and so would reward turns that do nothing.

    Args:
        turn_rewards: (B, K) process reward of each turn, outcome excluded; 0 after a row's last turn.
        outcome: (B,) outcome rewards; NaN for trajectories outside the baseline.
        turn_ids: (B, T) index into the K turns, -1 outside action tokens. A turn may have no token at all.
        group_ids: (B,) which prompt; any integers in any order.
        gamma_turn: discount per turn.
        process_weight: weight of the process part.

    Returns:
        (B, T), 0 where `turn_ids` is -1. Either part is exactly 0 in a group without spread in it (std at most 1e-6
        of the largest magnitude) or with a single member in the baseline.

    Raises:
        ValueError: if the shapes do not fit together, or a turn id has no column in `turn_rewards`.
    """
    outcome_part, process_part = turn_group_parts(turn_rewards, outcome, turn_ids, group_ids, gamma_turn=gamma_turn)
    return (outcome_part + process_weight * process_part).to(float_dtype(turn_rewards, outcome))


@torch.no_grad()
def turn_group_parts(
    turn_rewards: torch.Tensor,
    outcome: torch.Tensor,
    turn_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma_turn: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of `compute_turn_group_advantages` apart, unweighted.

    Returns:
        (outcome part, process part), both (B, T) float64.
    """
    check_turns(turn_rewards, turn_ids, outcome=outcome, group_ids=group_ids)
    process = turn_returns(turn_rewards, gamma=gamma_turn)  # (B, K)
    is_outside = outcome.isnan() | process[:, 0].isnan()  # (B,) not in the baseline
    by_outcome = GroupStatistics(outcome.double().masked_fill(is_outside, float("nan")), group_ids)
    by_process = GroupStatistics(process[:, 0].masked_fill(is_outside, float("nan")), group_ids)
    relative = (process - by_process.mean.unsqueeze(1)) / (by_process.std.unsqueeze(1) + STD_EPS)  # (B, K)
    process_part = turns_to_tokens(torch.where(by_process.is_compared.unsqueeze(1), relative, 0.0), turn_ids)
    outcome_part = by_outcome.normalised().unsqueeze(1).expand(turn_ids.shape)
    return torch.where(turn_ids >= 0, outcome_part, 0.0), process_part


def turn_returns(turn_rewards: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Discounted sums from each turn on: (B, K) -> (B, K) float64, at least one column."""
    rewards = turn_rewards.double()
    if rewards.shape[1] == 0:
        rewards = rewards.new_zeros(rewards.shape[0], 1)
    return reverse_scan(rewards, torch.full_like(rewards, gamma))


def check_turns(turn_rewards: torch.Tensor, turn_ids: torch.Tensor, **per_row: torch.Tensor) -> None:
    """Refuse turn rewards (B, K), turn ids (B, T) and tensors of one number per row, (B,), that do not fit together.

    Raises:
        ValueError: if they disagree on B, or if a turn id has no column in `turn_rewards`.
    """
    for rows in (turn_rewards, turn_ids):
        check_one_per_row(rows, **per_row)
    last, num_turns = int(turn_ids.max()) if turn_ids.numel() else -1, turn_rewards.shape[1]
    if last >= num_turns:
        raise ValueError(
            f"turn_ids holds turn {last} (counted from 0), but turn_rewards has columns for {num_turns} turns only. "
            "Pad turn_rewards to as many columns as the longest trajectory has turns."
        )


def turns_to_tokens(per_turn: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Give every action token its turn's value: (B, K) and (B, T) -> (B, T), 0 where `turn_ids` is negative."""
    tokens = per_turn.gather(1, turn_ids.long().clamp(min=0))
    return torch.where(turn_ids >= 0, tokens, 0.0)
