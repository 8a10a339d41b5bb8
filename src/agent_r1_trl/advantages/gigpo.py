"""GiGPO: groups inside groups. Turns that started from the same observation are compared with one another."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.group import GroupStatistics
from agent_r1_trl.advantages.masked import check_shapes, float_dtype
from agent_r1_trl.advantages.turn_group import check_turns, turn_returns, turns_to_tokens


def compute_gigpo_advantages(
    turn_rewards: torch.Tensor,
    anchor_ids: torch.Tensor,
    turn_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma_turn: float,
    step_weight: float,
) -> torch.Tensor:
    """Episode advantage + step_weight * step advantage: GiGPO (arXiv 2505.10978, eqs. 3, 7 and 8).

    The episode part is GRPO on the undiscounted sum of a trajectory's turn rewards. The step part compares turn
    returns, sum_{j >= k} gamma_turn^(j - k) r_j, among all turns of a prompt group that share an anchor.

    Args:
        turn_rewards: (B, K) reward of each turn, the outcome added to the last turn's; 0 after a row's last turn. A
            NaN takes the trajectory out of every baseline.
        anchor_ids: (B, K) which observation stood before the turn, -1 for none (padding included). The same number in
            another prompt group is another state.
        turn_ids: (B, T) index into the K turns, -1 outside action tokens.
        group_ids: (B,) which prompt; any integers in any order.
        gamma_turn: discount per turn; the paper uses 0.95.
        step_weight: weight of the step part; the paper uses 1.

    Returns:
        (B, T), 0 where `turn_ids` is -1. Either part is exactly 0 in groups of one or without spread.

    Raises:
        ValueError: if the shapes do not fit together, or a turn id has no column in `turn_rewards`.
    """
    episode_part, step_part = gigpo_parts(turn_rewards, anchor_ids, turn_ids, group_ids, gamma_turn=gamma_turn)
    return (episode_part + step_weight * step_part).to(float_dtype(turn_rewards))


@torch.no_grad()
def gigpo_parts(
    turn_rewards: torch.Tensor,
    anchor_ids: torch.Tensor,
    turn_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma_turn: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of `compute_gigpo_advantages` apart, unweighted.

    Returns:
        (episode part, step part), both (B, T) float64.
    """
    check_shapes(turn_rewards=turn_rewards, anchor_ids=anchor_ids)
    check_turns(turn_rewards, turn_ids, group_ids=group_ids)
    totals = turn_rewards.double().sum(dim=1)  # (B,)
    episode = GroupStatistics(totals, group_ids).normalised().unsqueeze(1)  # (B, 1)
    episode_part = torch.where(turn_ids >= 0, episode.expand(turn_ids.shape), 0.0)
    if turn_rewards.shape[1] == 0:
        return episode_part, torch.zeros_like(episode_part)

    is_counted = (anchor_ids >= 0) & ~totals.isnan().unsqueeze(1)  # (B, K)
    returns = turn_returns(turn_rewards, gamma=gamma_turn).masked_fill(~is_counted, float("nan"))
    states = torch.stack([group_ids.long().unsqueeze(1).expand(anchor_ids.shape), anchor_ids.long()], dim=-1)
    _, state_ids = torch.unique(states.flatten(0, 1), dim=0, return_inverse=True)  # (B * K,)
    step = GroupStatistics(returns.flatten(), state_ids).normalised().view(anchor_ids.shape)  # (B, K)
    return episode_part, turns_to_tokens(step, turn_ids)
