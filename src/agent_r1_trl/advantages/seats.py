"""Several seats in one trajectory: each is a row of its own to the estimators, which compares with its like.

A game in which the policy plays more than one seat is one trajectory, whose seats earn different rewards. Its rows are
split before an estimator sees them: a seat's row has the tokens, turns and rewards of that seat alone, and its group
are the same seats of the same prompt. Afterwards each token takes the advantage of its seat.
"""

from __future__ import annotations

import dataclasses

import torch

from agent_r1_trl.advantages.estimators import Credit, CreditInputs
from agent_r1_trl.advantages.gae import extend_turn_ids


class SeatRows:
    """The rows of N trajectories, split into M rows of seats; M = N where none has seats.

    Args:
        inputs: with `turn_seats` and `seat_outcomes`.
    """

    def __init__(self, inputs: CreditInputs) -> None:
        assert inputs.turn_seats is not None
        self._given = inputs
        self.are_split = bool((inputs.turn_seats > 0).any())
        self.inputs = inputs
        """The inputs for an estimator."""
        self._row = torch.zeros(0, dtype=torch.long)
        """(M,) the trajectory of each row."""
        if self.are_split:
            self._row, seat = _rows_and_seats(inputs.turn_seats)
            self.inputs = _split(inputs, self._row, seat)

    def joined(self, credit: Credit) -> Credit:
        """Put the result of an estimator for M rows on the tokens of the N trajectories, (N, T)."""
        if not self.are_split:
            return credit
        advantages = self._join(credit.advantages)
        returns = None if credit.returns is None else self._join(credit.returns)
        return dataclasses.replace(credit, advantages=advantages, returns=returns)

    def _join(self, values: torch.Tensor) -> torch.Tensor:
        """(M, T) to (N, T): each token has one seat, so the sum over a trajectory's seats is that seat's value."""
        own = torch.where(self.inputs.mask, values, 0.0)
        num_trajectories = len(self._given.mask)
        empty = own.new_zeros(num_trajectories, own.shape[1])
        return empty.index_add(0, self._row, own)


def _rows_and_seats(turn_seats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M,) trajectory and (M,) seat of each row; a trajectory without any turn is one row, of seat 0."""
    rows, seats = [], []
    for row, of_turns in enumerate(turn_seats.tolist()):
        present = sorted(set(of_turns) - {-1})
        for seat in present or [0]:
            rows.append(row)
            seats.append(seat)
    device = turn_seats.device
    return torch.tensor(rows, device=device), torch.tensor(seats, device=device)


def _split(given: CreditInputs, row: torch.Tensor, seat: torch.Tensor) -> CreditInputs:
    """The inputs of M seats: their own tokens, turns and rewards, and 0 everywhere else.

    Args:
        given: inputs of N trajectories.
        row: (M,) the trajectory of each seat.
        seat: (M,) its number.
    """
    assert given.turn_seats is not None and given.seat_outcomes is not None
    turn_seats = given.turn_seats[row]  # (M, K)
    is_own = turn_seats == seat.unsqueeze(1)  # (M, K)
    place = is_own.long().cumsum(dim=1) - 1  # (M, K) of an own turn among the seat's turns

    # tokens: an own token's turn gets its place among the seat's turns
    turn_ids = given.turn_ids[row]  # (M, T)
    turn_of_token = turn_ids.clamp(min=0)
    is_own_action = (turn_ids >= 0) & is_own.gather(1, turn_of_token)
    own_turn_ids = torch.where(is_own_action, place.gather(1, turn_of_token), -1)
    # without the advantage mask observations are trained on, too: they belong to the turn before them
    extended = extend_turn_ids(turn_ids, given.mask[row])
    mask = (extended >= 0) & is_own.gather(1, extended.clamp(min=0))  # (M, T)

    outcomes = _outcomes(given, row, is_own)  # (M,)
    num_actions = is_own_action.sum(dim=1, keepdim=True)
    is_last_action = is_own_action & (is_own_action.long().cumsum(dim=1) == num_actions)
    outcome_token_rewards = torch.where(is_last_action, outcomes.nan_to_num().unsqueeze(1), 0.0)

    def of_own_turns(values: torch.Tensor, empty: int) -> torch.Tensor:
        """(M, K) values of the seat's turns, side by side from column 0 on."""
        num_turns = values.shape[1]
        moved = torch.where(is_own, place, num_turns)  # other seats' turns go to a column that is dropped
        room = torch.full((len(row), num_turns + 1), empty, dtype=values.dtype, device=values.device)
        return room.scatter(1, moved, values[row])[:, :-1]

    def of_own_tokens(values: torch.Tensor) -> torch.Tensor:
        return torch.where(is_own_action, values[row], 0.0)

    kl_rewards = None if given.kl_rewards is None else of_own_tokens(given.kl_rewards)
    return dataclasses.replace(
        given,
        mask=mask,
        turn_ids=own_turn_ids,
        group_ids=_seat_groups(given.group_ids[row], seat),
        process_token_rewards=of_own_tokens(given.process_token_rewards),
        outcome_token_rewards=outcome_token_rewards,
        turn_rewards=of_own_turns(given.turn_rewards, 0),
        outcome_rewards=outcomes,
        anchor_ids=of_own_turns(given.anchor_ids, -1),
        kl_rewards=kl_rewards,
        values=_rows(given.values, row),
        bootstrap_values=_bootstrap(given, row, is_own),
        columns={name: column[row] for name, column in given.columns.items()},
        is_kept=_rows(given.is_kept, row),
        turn_seats=None,
        seat_outcomes=None,
    )


def _rows(tensor: torch.Tensor | None, row: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor[row]


def _seat_groups(group_ids: torch.Tensor, seat: torch.Tensor) -> torch.Tensor:
    """(M,) a group for each seat of each prompt."""
    pairs = torch.stack([group_ids, seat], dim=1)
    _, groups = torch.unique(pairs, dim=0, return_inverse=True)
    return groups


def _outcomes(given: CreditInputs, row: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
    """(M,) the seats' outcomes; that of the trajectory where a seat had no turn, NaN outside the baseline."""
    assert given.seat_outcomes is not None
    of_trajectory = given.outcome_rewards[row]
    # every turn of a seat has the same outcome, so the mean over them is that outcome
    of_seat = torch.where(is_own, given.seat_outcomes[row], 0.0).sum(dim=1) / is_own.sum(dim=1).clamp(min=1)
    outcomes = torch.where(is_own.any(dim=1), of_seat, of_trajectory).to(of_trajectory.dtype)
    return torch.where(of_trajectory.isnan(), of_trajectory, outcomes)


def _bootstrap(given: CreditInputs, row: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor | None:
    """(M,) the critic's value behind a truncated trajectory, for the seat that had the last turn; 0 for the others."""
    if given.bootstrap_values is None:
        return None
    assert given.turn_seats is not None
    num_turns = (given.turn_seats[row] >= 0).sum(dim=1, keepdim=True)  # (M, 1)
    last_turn = (num_turns - 1).clamp(min=0)
    has_last = is_own.gather(1, last_turn).squeeze(1)  # (M,)
    return torch.where(has_last, given.bootstrap_values[row], 0.0)
