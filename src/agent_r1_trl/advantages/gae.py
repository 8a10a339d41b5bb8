"""Generalised advantage estimation over action tokens, over turns, and in two levels: turns, then tokens."""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.masked import (
    carry_forward,
    check_one_per_row,
    check_shapes,
    float_dtype,
    masked_values,
    scan_marked,
    take_next,
)


@torch.no_grad()
def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    action_mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (arXiv 1506.02438, eq. 16) whose steps are the action tokens alone (Agent-R1, arXiv 2511.14460).

    With action positions p_1 < ... < p_n: delta_i = r(p_i) + gamma * V(p_{i+1}) - V(p_i) and
    A_i = delta_i + gamma * lam * A_{i+1}. Tokens at mask 0 are no steps: they neither discount nor have a value.

    Args:
        rewards: (B, T) token rewards.
        values: (B, T); `values[:, t]` is the value of the state in which token t is chosen.
        action_mask: (B, T) bool, int or float.
        gamma: discount per action token.
        lam: weight of longer estimates.
        bootstrap_values: (B,) value of the state after the last action token: 0 for a finished trajectory, the
            critic's value for a truncated one. None: 0 for all.

    Returns:
        (advantages, returns), both (B, T) and 0 at mask 0; returns = advantages + values, the critic's target.

    Raises:
        ValueError: if the shapes differ.

    >>> one = torch.ones(1, 2)
    >>> compute_gae(torch.tensor([[0.0, 1.0]]), one * 0, one, gamma=0.5, lam=1.0)[0].tolist()
    [[0.5, 1.0]]
    """
    check_shapes(rewards=rewards, values=values, action_mask=action_mask)
    check_one_per_row(rewards, bootstrap_values=bootstrap_values)
    mask = action_mask.bool()
    reward, value = masked_values(rewards, mask), masked_values(values, mask)
    delta = reward + gamma * take_next(value, mask, bootstrap_values) - value
    advantages = scan_marked(delta, mask, gamma * lam)
    dtype = float_dtype(rewards, values)
    return advantages.to(dtype), (advantages + value).to(dtype)


@torch.no_grad()
def compute_bilevel_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    action_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    gamma_turn: float,
    lam_turn: float,
    gamma: float,
    lam: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over turns, whose result each turn then hands to its own tokens (bi-level GAE, RAGEN and VAGEN).

    Turn k ends at its last action token e_k and earns r_k, the sum of its token rewards. Over turns:
    delta_k = r_k + gamma_turn * V(e_{k+1}) - V(e_k), A_k = delta_k + gamma_turn * lam_turn * A_{k+1},
    G_k = A_k + V(e_k). Inside turn k: token GAE whose only reward is G_k at e_k (the token rewards are in it already),
    started afresh in every turn. Turns come from `turn_ids`, so a turn without a reward stays a turn.

    Arguments and results are those of `compute_gae`; `gamma` and `lam` hold inside a turn. The turn ids, (B, T), are
    integers that never fall along a row, -1 outside action tokens. Where the mask is set and the id is -1 (observation
    tokens as steps, for the ablation), the token extends the turn before it.
    """
    check_shapes(rewards=rewards, values=values, action_mask=action_mask, turn_ids=turn_ids)
    check_one_per_row(rewards, bootstrap_values=bootstrap_values)
    mask = action_mask.bool()
    reward, value = masked_values(rewards, mask), masked_values(values, mask)
    turns = extend_turn_ids(turn_ids, mask)  # (B, T)
    no_turn = turns.new_full(turns.shape[:1], -2)
    is_end = mask & (take_next(turns, mask, no_turn) != turns)  # (B, T)

    ends_before = is_end.long().cumsum(dim=1) - is_end.long()  # (B, T) the same for all tokens of a turn, < T
    turn_reward = _sum_of_turn(reward, ends_before)  # (B, T) r_k
    turn_delta = turn_reward + gamma_turn * take_next(value, is_end, bootstrap_values) - value
    target = scan_marked(turn_delta, is_end, gamma_turn * lam_turn) + value  # (B, T) G_k at e_k

    inside = gamma * take_next(value, mask) - value
    delta = torch.where(is_end, target - value, inside)
    advantages = scan_marked(delta, mask, gamma * lam, restart=is_end)
    dtype = float_dtype(rewards, values)
    return advantages.to(dtype), (advantages + value).to(dtype)


@torch.no_grad()
def compute_step_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    action_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    gamma_turn: float,
    lam_turn: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE whose actions are whole turns (the step-level MDP of Agent-R1 0.1; StepPO, arXiv 2604.18401).

    Turn k begins at its first action token b_k, whose value is that of the state in which the turn is taken, and earns
    r_k, the sum of its token rewards. delta_k = r_k + gamma_turn * V(b_{k+1}) - V(b_k),
    A_k = delta_k + gamma_turn * lam_turn * A_{k+1}. All tokens of the turn get A_k, and A_k + V(b_k) as the critic's
    target. A turn without a reward stays a turn.

    Arguments and results are those of `compute_bilevel_gae`; values after a turn's first token are not read.

    >>> one = torch.ones(1, 3)
    >>> turns = torch.tensor([[0, 0, 1]])
    >>> compute_step_gae(one, one * 0, one, turns, gamma_turn=0.5, lam_turn=1.0)[0].tolist()
    [[2.5, 2.5, 1.0]]
    """
    check_shapes(rewards=rewards, values=values, action_mask=action_mask, turn_ids=turn_ids)
    check_one_per_row(rewards, bootstrap_values=bootstrap_values)
    mask = action_mask.bool()
    reward, value = masked_values(rewards, mask), masked_values(values, mask)
    is_first = turn_starts(turn_ids, mask)  # (B, T)
    number = (is_first.long().cumsum(dim=1) - 1).clamp(min=0)  # (B, T) the same for all tokens of a turn, < T
    turn_reward = _sum_of_turn(reward, number)  # (B, T) r_k
    delta = turn_reward + gamma_turn * take_next(value, is_first, bootstrap_values) - value
    of_turn = scan_marked(delta, is_first, gamma_turn * lam_turn)  # (B, T) A_k at b_k
    advantages = masked_values(carry_forward(of_turn, is_first), mask)
    returns = masked_values(carry_forward(of_turn + value, is_first), mask)
    dtype = float_dtype(rewards, values)
    return advantages.to(dtype), returns.to(dtype)


def _sum_of_turn(reward: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """(B, T) for each token the sum of `reward` over the tokens that have the same `number`, (B, T)."""
    sums = torch.zeros_like(reward).scatter_add(1, number, reward)
    return sums.gather(1, number)


def turn_starts(turn_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T) bool, the first masked token of each turn; turn ids as in `compute_bilevel_gae`.

    >>> turn_starts(torch.tensor([[0, 0, -1, 1]]), torch.ones(1, 4)).long().tolist()
    [[1, 0, 0, 1]]
    """
    turns = extend_turn_ids(turn_ids, mask)
    latest = turns.cummax(dim=1).values  # (B, T) at or before a token
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    return turns > before


def extend_turn_ids(turn_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Turn ids for every masked token: one without an id belongs to the turn before it, at the start to the first.

    With the action mask nothing changes. With the completion mask (the paper's ablation without advantage mask)
    observation tokens join the turn they answer.

    The result is (B, T) int64, -1 at mask 0 and in rows without any turn.

    >>> extend_turn_ids(torch.tensor([[-1, 0, 0, -1, 1, -1]]), torch.tensor([[1, 1, 1, 1, 1, 0]])).tolist()
    [[0, 0, 0, 0, 1, -1]]
    """
    keep = mask.bool()
    known = torch.where(keep, turn_ids.long(), -1)
    latest = known.cummax(dim=1).values
    first_place = (known >= 0).long().argmax(dim=1, keepdim=True)  # (B, 1)
    first = known.gather(1, first_place)
    filled = torch.where(latest >= 0, latest, first)
    return torch.where(keep, filled, -1)
