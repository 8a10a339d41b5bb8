"""The sums behind a recorded advantage, for a reader to follow; one function for each estimator.

A function gets the `CreditInputs` of a group and one of its rows, and gives labels with values: numbers that all
tokens of the row share, or (T,) for each token its own. A label without an operator begins a sum, those with one of
`+ - * /` in front go on with it from the left, and `= ` stands before its result, whose value is left to the reader:

    outcome 1, - mean of its group of 4 0.25, / (std of its group + 0.0001) 0.5001, = advantage

The result of the last sum is the advantage. Sums are derived anew from the formulas, so that comparing them with what
the estimator itself computes can fail.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from agent_r1_trl.advantages.gae import compute_gae, extend_turn_ids
from agent_r1_trl.advantages.group import (
    STD_EPS,
    GroupStatistics,
    compute_returns_to_go,
    outcome_on_last_turn,
    turn_returns,
    turns_to_tokens,
)
from agent_r1_trl.advantages.masked import masked_values, take_next

if TYPE_CHECKING:
    from agent_r1_trl.advantages.estimators import CreditInputs

Parts = list[tuple[str, Any]]
OPERATORS = {"+ ": operator.add, "- ": operator.sub, "* ": operator.mul, "/ ": operator.truediv}


# -------------------------------------------------------------------- one number per trajectory


def explain_grpo(inputs: CreditInputs, row: int) -> Parts:
    """(R - mean) / std."""
    if inputs.settings.scale_rewards == "group":
        group = GroupStatistics(inputs.returns, inputs.group_ids)
        return [*_earned(inputs, row), *_normalised(group, row)]
    centred = explain_centred(inputs, row)
    if inputs.whitening is None:
        return centred
    return [*centred, ("/ (std of the step's returns + 0.0001)", inputs.whitening[1])]


def explain_centred(inputs: CreditInputs, row: int) -> Parts:
    """R - mean."""
    group = GroupStatistics(inputs.returns, inputs.group_ids)
    return [*_earned(inputs, row), _mean(group, row), *_if_compared(group, row)]


def explain_rloo(inputs: CreditInputs, row: int) -> Parts:
    """R - mean of the others."""
    group = GroupStatistics(inputs.returns, inputs.group_ids)
    num_others = max(1.0, group.count[row].item() - 1)
    total = group.mean[row] * group.count[row]
    others = (total - group.values[row]).item() / num_others
    label = f"- mean of the other {num_others:.0f} of its group"
    return [*_earned(inputs, row), (label, others), *_if_compared(group, row)]


def explain_reinforce_pp_baseline(inputs: CreditInputs, row: int) -> Parts:
    """R - mean, plus the penalties to come, whitened."""
    parts = explain_centred(inputs, row)
    if inputs.kl_rewards is not None:
        parts += [("= R - mean", None), ("R - mean", parts_total(parts))]
        parts += [("+ KL penalties from the token on", _to_go(inputs, inputs.kl_rewards, row))]
    return [*parts, *_whitened(inputs)]


def _earned(inputs: CreditInputs, row: int) -> Parts:
    """A trajectory's return; a part that is 0 in all rows is not named."""
    process = inputs.turn_rewards.double().sum(dim=1)  # (N,)
    outcome = inputs.outcome_rewards.double()  # (N,)
    if not process.any():
        return [("outcome", outcome[row].item())]
    parts: Parts = [("turn rewards", process[row].item())]
    if outcome.nan_to_num().any():
        parts.append(("+ outcome", outcome[row].item()))
        parts.append(("= R", None))
    return parts


def _mean(group: GroupStatistics, row: int, of: str = "") -> tuple[str, float]:
    return f"- mean of its group of {group.count[row]:.0f}{of}", group.mean[row].item()


def _if_compared(group: GroupStatistics, row: int) -> Parts:
    return [] if group.is_compared[row] else [("* 0, as its group has no spread", 0.0)]


def _normalised(group: GroupStatistics, row: int, of: str = "") -> Parts:
    mean = _mean(group, row, of)
    if not group.is_compared[row]:
        return [mean, *_if_compared(group, row)]
    return [mean, ("/ (std of its group + 0.0001)", group.std[row].item() + STD_EPS)]


# -------------------------------------------------------------------- per turn


def explain_turn_grpo(inputs: CreditInputs, row: int) -> Parts:
    """The outcome and the rewards from a turn on, each relative to the group's."""
    gamma = inputs.settings.gamma_turn
    outcome = inputs.outcome_rewards.double()  # (N,)
    process = turn_returns(inputs.turn_rewards, gamma=gamma)  # (N, K)
    process = process.masked_fill(outcome.isnan().unsqueeze(1), torch.nan)
    has_outcome = bool(outcome.nan_to_num().any())
    has_process = bool(process.nan_to_num().any())

    by_outcome = GroupStatistics(outcome, inputs.group_ids)
    outcome_part: Parts = [("outcome", outcome[row].item()), *_normalised(by_outcome, row)]
    if not has_process:
        return outcome_part

    sizes = turn_returns(inputs.turn_rewards.abs(), gamma=gamma)[:, 0]
    by_process = GroupStatistics(process[:, 0], inputs.group_ids, sizes)
    process_part: Parts = [
        (_from_turn_on("turn rewards", gamma), _on_tokens(inputs, process[row], row)),
        *_normalised(by_process, row, ", from the first turn on"),
    ]
    if not has_outcome:
        return process_part
    total = parts_total(outcome_part)
    return [*outcome_part, ("= outcome part", None), *process_part, ("+ outcome part", total)]


def explain_gigpo(inputs: CreditInputs, row: int) -> Parts:
    """The episode relative to the group, and each turn relative to those that began in the same state."""
    gamma = inputs.settings.gamma_turn
    group = GroupStatistics(inputs.returns, inputs.group_ids)
    episode = [*_earned(inputs, row), *_normalised(group, row)]
    of_turn, mean, std, is_compared = (_on_tokens(inputs, line, row) for line in _states(inputs, row))
    return [
        *episode,
        ("= episode advantage", None),
        (_from_turn_on("rewards", gamma), of_turn),
        ("- mean over turns of the group in the same state", mean),
        ("/ (their std + 0.0001)", std + STD_EPS),
        ("* 1, or 0 if these have no spread", is_compared),
        ("= step advantage", None),
        ("* step_weight", inputs.settings.step_weight),
        ("+ episode advantage", parts_total(episode)),
    ]


def _states(inputs: CreditInputs, row: int) -> torch.Tensor:
    """Return of each turn, mean and std of the turns in its state, and whether these have spread: (4, K)."""
    rewards = outcome_on_last_turn(inputs.turn_rewards, inputs.outcome_rewards, inputs.anchor_ids)
    returns = turn_returns(rewards, gamma=inputs.settings.gamma_turn)  # (N, K)
    is_peer = inputs.in_baseline & (inputs.group_ids == inputs.group_ids[row])  # (N,)
    table = torch.zeros(4, returns.shape[1], dtype=torch.float64)
    for turn, anchor in enumerate(inputs.anchor_ids[row].tolist()):
        if anchor < 0:
            continue
        is_in_state = is_peer.unsqueeze(1) & (inputs.anchor_ids == anchor)
        values = returns[is_in_state]
        state = GroupStatistics(values, torch.zeros(len(values)))
        table[0, turn] = returns[row, turn]
        table[1, turn] = state.mean[0]
        table[2, turn] = state.std[0]
        table[3, turn] = state.is_compared.any()
    return table


def _from_turn_on(rewards: str, gamma: float) -> str:
    label = f"{rewards} from the turn on"
    return label if gamma == 1 else f"{label}, discounted by {gamma:g} per turn"


def _on_tokens(inputs: CreditInputs, of_turns: torch.Tensor, row: int) -> torch.Tensor:
    """(T,) for each token the value of its turn, (K,)."""
    own = slice(row, row + 1)
    turns = extend_turn_ids(inputs.turn_ids[own], inputs.mask[own])
    return turns_to_tokens(of_turns.unsqueeze(0), turns)[0]


# -------------------------------------------------------------------- per token


def explain_reinforce_pp(inputs: CreditInputs, row: int) -> Parts:
    """Rewards to come, whitened."""
    gamma = inputs.settings.gamma
    rewards = inputs.process_token_rewards + inputs.outcome_token_rewards
    label = "rewards from the token on"
    if gamma != 1:
        label += f", discounted by {gamma:g} per token"
    parts: Parts = [(label, _to_go(inputs, rewards, row))]
    if inputs.kl_rewards is not None:
        parts.append(("+ KL penalties from there on", _to_go(inputs, inputs.kl_rewards, row)))
    return [*parts, *_whitened(inputs)]


def _to_go(inputs: CreditInputs, rewards: torch.Tensor, row: int) -> torch.Tensor:
    own = slice(row, row + 1)
    return compute_returns_to_go(rewards[own].double(), inputs.mask[own], gamma=inputs.settings.gamma)[0]


def _whitened(inputs: CreditInputs) -> Parts:
    if inputs.whitening is None:
        return []
    mean, std = inputs.whitening
    parts: Parts = [("= raw advantage", None), ("- mean of all tokens of the step", mean)]
    if std == float("inf"):
        return [*parts, ("* 0, as there is but one", 0.0)]
    return [*parts, ("/ std of all tokens of the step", std)]


# -------------------------------------------------------------------- with a critic


def explain_gae(inputs: CreditInputs, row: int) -> Parts:
    """The temporal difference of each token, and the discounted ones after it."""
    assert inputs.values is not None
    gamma, lam = inputs.settings.gamma, inputs.settings.lam
    own = slice(row, row + 1)
    mask = inputs.mask[own]  # (1, T)
    rewards = inputs.token_rewards[own].double()
    reward = masked_values(rewards, mask)
    value = masked_values(inputs.values[own], mask)
    behind = None
    if inputs.bootstrap_values is not None:
        behind = inputs.bootstrap_values[own].double()  # (1,)
    raw, _ = compute_gae(rewards, value, mask, gamma=gamma, lam=lam, bootstrap_values=behind)
    parts: Parts = [("reward of the token", reward[0])]
    if inputs.kl_rewards is not None:
        penalty = masked_values(inputs.kl_rewards[own], mask)[0]
        parts = [("reward of the token", reward[0] - penalty), ("+ its KL penalty", penalty)]
    return [
        *parts,
        (f"+ {gamma:g} * value of the next token", gamma * take_next(value, mask, behind)[0]),
        ("- value", value[0]),
        (f"+ {gamma:g} * {lam:g} * raw advantage of the next token", gamma * lam * take_next(raw, mask)[0]),
        *_whitened(inputs),
    ]


# -------------------------------------------------------------------- working sums out


def work_out(parts: Parts) -> Parts:
    """Fill in the results of sums, a number or (T,) each.

    >>> work_out([("outcome", 1.0), ("- mean", 0.25), ("/ std", 0.5), ("= advantage", None)])[-1]
    ('= advantage', 1.5)
    """
    total: Any = 0.0
    found = []
    for label, value in parts:
        if label.startswith("= "):
            value = total
        operation = OPERATORS.get(label[:2])
        total = value if operation is None else operation(total, value)
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        found.append((label, value.item() if is_scalar else value))
    return found


def parts_total(parts: Parts) -> Any:
    """The result of the last sum."""
    return work_out([*parts, ("= ", None)])[-1][1]


def split_sums(parts: Parts) -> list[Parts]:
    """Each sum by itself.

    >>> split_sums([("outcome", 1.0), ("- mean", 0.25), ("gamma", 0.5)])
    [[('outcome', 1.0), ('- mean', 0.25)], [('gamma', 0.5)]]
    """
    sums: list[Parts] = []
    for part in parts:
        if part[0][:2] in (*OPERATORS, "= ") and sums:
            sums[-1].append(part)
        else:
            sums.append([part])
    return sums
