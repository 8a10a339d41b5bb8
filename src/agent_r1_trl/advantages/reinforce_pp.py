"""REINFORCE++: discounted returns of every token, normalised over the whole batch instead of a group."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.group import GroupStatistics
from agent_r1_trl.advantages.masked import check_one_per_row, check_shapes, float_dtype, masked_values, masked_whiten
from agent_r1_trl.advantages.scan import scan_marked


@torch.no_grad()
def compute_returns_to_go(rewards: torch.Tensor, action_mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """G_i = r(p_i) + gamma * G_{i+1} over action positions p_1 < ... < p_n. Other tokens do not discount.

    Args:
        rewards: (B, T) token rewards, KL penalty included where there is one.
        action_mask: (B, T) bool, int or float.
        gamma: discount per action token.

    Returns:
        (B, T), 0 at mask 0. No turn boundary stops the sum: the outcome reaches every turn.

    >>> compute_returns_to_go(torch.tensor([[1.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5).tolist()
    [[1.5, 0.0, 1.0]]
    """
    check_shapes(rewards=rewards, action_mask=action_mask)
    mask = action_mask.bool()
    return scan_marked(masked_values(rewards, mask), mask, gamma).to(float_dtype(rewards))


def compute_reinforce_pp_advantages(
    rewards: torch.Tensor, action_mask: torch.Tensor, *, gamma: float, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns-to-go, whitened over all action tokens of the batch: REINFORCE++ (arXiv 2501.03262).

    Args:
        rewards: (B, T) token rewards, KL penalty (k1) included. Give it the rows of all ranks.
        action_mask: (B, T) bool, int or float; 0 throughout for a trajectory outside the baseline.
        gamma: discount per action token.
        counted: (B, T) as for `masked_whiten`.

    Returns:
        (B, T), 0 at mask 0.
    """
    returns = compute_returns_to_go(rewards.double(), action_mask, gamma=gamma)
    return masked_whiten(returns, action_mask, counted).to(float_dtype(rewards))


@torch.no_grad()
def compute_reinforce_pp_baseline_advantages(
    returns: torch.Tensor,
    group_ids: torch.Tensor,
    action_mask: torch.Tensor,
    *,
    kl_rewards: torch.Tensor | None = None,
    gamma: float = 1.0,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """R - group mean on every action token, then whitened over the batch: REINFORCE++-baseline (arXiv 2501.03262).

    Args:
        returns: (N,) total rewards without KL; NaN for trajectories outside the baseline.
        group_ids: (N,) which prompt; any integers in any order.
        action_mask: (N, T) bool, int or float.
        kl_rewards: (N, T) penalties from `kl_in_reward`; their returns-to-go are added before whitening.
        gamma: discount per action token of the penalties.
        counted: (N, T) as for `masked_whiten`; the group's mean is that of all its trajectories.

    Returns:
        (N, T), 0 at mask 0 and in rows outside the baseline. Whitening subtracts the mean over *tokens*, so a group
        without spread is 0 before whitening but not necessarily after it.
    """
    check_shapes(action_mask=action_mask, kl_rewards=kl_rewards)
    check_one_per_row(action_mask, returns=returns, group_ids=group_ids)
    group = GroupStatistics(returns, group_ids)
    mask = action_mask.bool() & group.in_baseline.unsqueeze(1)  # (N, T)
    centred = group.select(group.centred, torch.float64).unsqueeze(1).expand(mask.shape)  # (N, T)
    if kl_rewards is not None:
        centred = centred + compute_returns_to_go(kl_rewards.double(), mask, gamma=gamma)
    return masked_whiten(centred, mask, counted).to(float_dtype(returns))
