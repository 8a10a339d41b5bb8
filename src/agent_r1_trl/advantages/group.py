"""Advantages without a critic: relative to the trajectories of the same prompt, or to the batch (REINFORCE++)."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.masked import (
    check_one_per_row,
    check_shapes,
    float_dtype,
    masked_values,
    reverse_scan,
    scan_marked,
)

ZERO_VARIANCE = 1e-6
"""A group whose std is at most this times its largest |R| has no spread but float noise."""
STD_EPS = 1e-4
SCALES = ("group", "batch", "none")


class GroupStatistics:
    """Mean, std (ddof 1) and size of every row's group, over its rows in the baseline (those that are not NaN).

    Args:
        values: (N,), NaN for rows outside the baseline.
        group_ids: (N,) integers, in any order.
        sizes: (N,) of what the values are sums of, where parts may cancel out; None: the values themselves.
    """

    def __init__(self, values: torch.Tensor, group_ids: torch.Tensor, sizes: torch.Tensor | None = None):
        check_shapes(values=values, group_ids=group_ids)
        values = values.double()
        self.in_baseline = ~values.isnan()  # (N,)
        self.values = torch.where(self.in_baseline, values, 0.0)
        groups, self.index = torch.unique(group_ids, return_inverse=True)  # (N,) 0..groups-1
        self.num_groups = len(groups)

        counts = self._sum(self.in_baseline.double())  # (groups,)
        means = self._sum(self.values) / counts.clamp(min=1)
        self.count = counts[self.index]  # (N,)
        self.mean = means[self.index]  # (N,)
        self.centred = torch.where(self.in_baseline, self.values - self.mean, 0.0)
        variances = self._sum(self.centred**2) / (counts - 1).clamp(min=1)
        self.std = variances.sqrt()[self.index]  # (N,)

        if sizes is None:
            sizes = values
        largest = self._largest(torch.where(self.in_baseline, sizes, 0.0).abs())
        has_spread = (self.count > 1) & (self.std > ZERO_VARIANCE * largest)
        self.is_compared = self.in_baseline & has_spread
        """(N,) rows in the baseline, in groups with spread."""

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """(N,) to (groups,)."""
        empty = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return empty.index_add(0, self.index, x)

    def _largest(self, x: torch.Tensor) -> torch.Tensor:
        """(N,) the largest of each row's group; `x` is not negative."""
        empty = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return empty.scatter_reduce(0, self.index, x, "amax")[self.index]

    def select(self, advantages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`advantages` for rows in the baseline whose group has spread, exactly 0 for the others."""
        return torch.where(self.is_compared, advantages, 0.0).to(dtype)

    def normalised(self) -> torch.Tensor:
        """(N,) float64: (value - group mean) / (group std + 1e-4), exactly 0 for rows that `select` excludes."""
        return self.select(self.centred / (self.std + STD_EPS), torch.float64)


@torch.no_grad()
def compute_group_advantages(returns: torch.Tensor, group_ids: torch.Tensor, *, scale: str = "group") -> torch.Tensor:
    """(R - group mean) / (std + 1e-4): GRPO (arXiv 2402.03300, sec. 4.1.2); `none` is Dr. GRPO (arXiv 2503.20783).

    Args:
        returns: (N,) total rewards; NaN for trajectories outside the baseline (advantage 0, not counted).
        group_ids: (N,) which prompt; any integers in any order.
        scale: divide by the std of the `group`, of the whole `batch`, or by nothing (`none`).

    Returns:
        (N,) advantages to broadcast over each trajectory's action tokens. Exactly 0 in groups without spread (std at
        most 1e-6 of the largest |R|) or with a single member in the baseline.

    Raises:
        ValueError: for an unknown scale.

    >>> compute_group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), scale="none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is not one of {', '.join(map(repr, SCALES))}. Set scale to one of them.")
    group = GroupStatistics(returns, group_ids)
    advantages = group.centred
    if scale == "group":
        advantages = advantages / (group.std + STD_EPS)
    elif scale == "batch":
        advantages = advantages / batch_scale(returns)
    return group.select(advantages, float_dtype(returns))


def batch_scale(returns: torch.Tensor) -> torch.Tensor:
    """Std of the (N,) returns in the baseline + 1e-4, in float64."""
    counted = returns.double()[~returns.isnan()]
    if len(counted) < 2:
        return counted.new_zeros(()) + STD_EPS
    return counted.std() + STD_EPS


@torch.no_grad()
def compute_rloo_advantages(returns: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """R minus the mean of the *other* members: n / (n - 1) * (R - group mean). RLOO (arXiv 2402.14740).

    Args:
        returns: (N,) total rewards; NaN for trajectories outside the baseline.
        group_ids: (N,) which prompt.

    Returns:
        (N,) advantages, 0 where a group has no spread or a single member in the baseline.
    """
    group = GroupStatistics(returns, group_ids)
    num_others = (group.count - 1).clamp(min=1)
    advantages = group.centred * group.count / num_others
    return group.select(advantages, float_dtype(returns))


# -------------------------------------------------------------------- turn-level GRPO


@torch.no_grad()
def compute_turn_group_advantages(
    turn_rewards: torch.Tensor,
    outcome: torch.Tensor,
    turn_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma_turn: float,
) -> torch.Tensor:
    """GRPO on the outcome + the process returns of the turn relative to the group's.

    P_k = sum_{j >= k} gamma_turn^(j - k) r_j. The process part of turn k is (P_k - mean) / (std + 1e-4) with mean and
    std over the group's P_1, one number per trajectory. A mean over turns would have as many terms as the policy
    chooses to play turns, and so would reward turns that do nothing.

    Args:
        turn_rewards: (B, K) process reward of each turn, outcome excluded; 0 after a row's last turn.
        outcome: (B,) outcome rewards; NaN for trajectories outside the baseline.
        turn_ids: (B, T) index into the K turns, -1 outside action tokens. A turn may have no token at all.
        group_ids: (B,) which prompt; any integers in any order.
        gamma_turn: discount per turn.

    Returns:
        (B, T), 0 where `turn_ids` is -1. Either part is exactly 0 in a group without spread in it (std at most 1e-6
        of the largest magnitude; of the process returns, of the largest sum of |r_j|, since ways back cancel out) or
        with a single member in the baseline.

    Raises:
        ValueError: if the shapes do not fit together, or a turn id has no column in `turn_rewards`.
    """
    check_turns(turn_rewards, turn_ids, outcome=outcome, group_ids=group_ids)
    process = turn_returns(turn_rewards, gamma=gamma_turn)  # (B, K)
    is_outside = outcome.isnan() | process[:, 0].isnan()  # (B,) not in the baseline
    outcome_in_baseline = outcome.double().masked_fill(is_outside, torch.nan)
    by_outcome = GroupStatistics(outcome_in_baseline, group_ids)
    outcome_part = torch.where(turn_ids >= 0, by_outcome.normalised().unsqueeze(1), 0.0)  # (B, T)

    whole = process[:, 0].masked_fill(is_outside, torch.nan)  # (B,) P_1
    sizes = turn_returns(turn_rewards.abs(), gamma=gamma_turn)[:, 0]
    by_process = GroupStatistics(whole, group_ids, sizes)
    divisor = by_process.std + STD_EPS
    relative = (process - by_process.mean.unsqueeze(1)) / divisor.unsqueeze(1)  # (B, K)
    relative = torch.where(by_process.is_compared.unsqueeze(1), relative, 0.0)
    process_part = turns_to_tokens(relative, turn_ids)

    return (outcome_part + process_part).to(float_dtype(turn_rewards, outcome))


def turn_returns(turn_rewards: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Discounted sums from each turn on: (B, K) -> (B, K) float64."""
    rewards = turn_rewards.double()
    return reverse_scan(rewards, torch.full_like(rewards, gamma))


def check_turns(turn_rewards: torch.Tensor, turn_ids: torch.Tensor, **per_row: torch.Tensor) -> None:
    """Refuse turn rewards (B, K), turn ids (B, T) and (B,) tensors that do not fit together."""
    for rows in (turn_rewards, turn_ids):
        check_one_per_row(rows, **per_row)
    num_turns = turn_rewards.shape[1]
    last = int(turn_ids.max()) if turn_ids.numel() else -1
    if last >= num_turns:
        raise ValueError(
            f"turn_ids holds turn {last} (counted from 0), but turn_rewards has columns for {num_turns} turns only. "
            "Pad turn_rewards to as many columns as the longest trajectory has turns."
        )


def turns_to_tokens(per_turn: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Give every action token its turn's value: (B, K) and (B, T) -> (B, T), 0 where `turn_ids` is negative."""
    tokens = per_turn.gather(1, turn_ids.long().clamp(min=0))
    return torch.where(turn_ids >= 0, tokens, 0.0)


# -------------------------------------------------------------------- GiGPO


@torch.no_grad()
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
    check_shapes(turn_rewards=turn_rewards, anchor_ids=anchor_ids)
    check_turns(turn_rewards, turn_ids, group_ids=group_ids)
    totals = turn_rewards.double().sum(dim=1)  # (B,)
    episode = GroupStatistics(totals, group_ids).normalised().unsqueeze(1)  # (B, 1)
    episode_part = torch.where(turn_ids >= 0, episode, 0.0)  # (B, T)

    is_counted = (anchor_ids >= 0) & ~totals.isnan().unsqueeze(1)  # (B, K)
    returns = turn_returns(turn_rewards, gamma=gamma_turn)
    returns = returns.masked_fill(~is_counted, torch.nan)
    # a state is an anchor within a prompt group
    group_of_turn = group_ids.long().unsqueeze(1).expand(anchor_ids.shape)
    states = torch.stack([group_of_turn, anchor_ids.long()], dim=-1)  # (B, K, 2)
    _, state_ids = torch.unique(states.flatten(0, 1), dim=0, return_inverse=True)  # (B * K,)
    step = GroupStatistics(returns.flatten(), state_ids).normalised().view(anchor_ids.shape)  # (B, K)
    step_part = turns_to_tokens(step, turn_ids)

    return (episode_part + step_weight * step_part).to(float_dtype(turn_rewards))


def outcome_on_last_turn(
    turn_rewards: torch.Tensor, outcome_rewards: torch.Tensor, anchor_ids: torch.Tensor
) -> torch.Tensor:
    """(B, K) turn rewards and, on the last turn that has an anchor, the outcome, (B,)."""
    num_turns = (anchor_ids >= 0).sum(dim=1, keepdim=True)  # (B, 1)
    last = num_turns.clamp(min=1) - 1
    return turn_rewards.scatter_add(1, last, outcome_rewards.unsqueeze(1))


# -------------------------------------------------------------------- REINFORCE++


@torch.no_grad()
def compute_returns_to_go(rewards: torch.Tensor, action_mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """G_i = r(p_i) + gamma * G_{i+1} over action positions p_1 < ... < p_n. Other tokens do not discount.

    `rewards`, (B, T), include the KL penalty where there is one; the result is (B, T), 0 at mask 0. No turn boundary
    stops the sum: the outcome reaches every turn. Whitened (`masked_whiten`) over the rows of all ranks these are the
    advantages of REINFORCE++ (arXiv 2501.03262).

    >>> compute_returns_to_go(torch.tensor([[1.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5).tolist()
    [[1.5, 0.0, 1.0]]
    """
    check_shapes(rewards=rewards, action_mask=action_mask)
    mask = action_mask.bool()
    return scan_marked(masked_values(rewards, mask), mask, gamma).to(float_dtype(rewards))


@torch.no_grad()
def compute_reinforce_pp_baseline_advantages(
    returns: torch.Tensor,
    group_ids: torch.Tensor,
    action_mask: torch.Tensor,
    *,
    kl_rewards: torch.Tensor | None = None,
    gamma: float = 1.0,
) -> torch.Tensor:
    """R - group mean on every action token: REINFORCE++-baseline (arXiv 2501.03262), before it is whitened.

    Args:
        returns: (N,) total rewards without KL; NaN for trajectories outside the baseline.
        group_ids: (N,) which prompt; any integers in any order.
        action_mask: (N, T) bool, int or float.
        kl_rewards: (N, T) penalties from `kl_in_reward`; their returns-to-go are added.
        gamma: discount per action token of the penalties.

    Returns:
        (N, T) float64, 0 at mask 0 and in rows outside the baseline. Whitening subtracts the mean over *tokens*, so a
        group without spread is 0 here but not necessarily after it.
    """
    check_shapes(action_mask=action_mask, kl_rewards=kl_rewards)
    check_one_per_row(action_mask, returns=returns, group_ids=group_ids)
    group = GroupStatistics(returns, group_ids)
    mask = action_mask.bool() & group.in_baseline.unsqueeze(1)  # (N, T)
    centred = group.select(group.centred, torch.float64)  # (N,)
    advantages = centred.unsqueeze(1).expand(mask.shape)  # (N, T)
    if kl_rewards is not None:
        advantages = advantages + compute_returns_to_go(kl_rewards.double(), mask, gamma=gamma)
    return masked_values(advantages, mask)
