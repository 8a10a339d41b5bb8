"""From trajectories to padded tensors.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> [batch] -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_r1_trl.trajectory import Trajectory


@dataclass(kw_only=True)
class TrajectoryBatch:
    """Tensors of B trajectories, padded on the right to T completion tokens.

    A trajectory without completion tokens is a row of padding: mask 0 everywhere.
    """

    action_mask: torch.Tensor
    """(B, T) int64."""
    turn_ids: torch.Tensor
    """(B, T) int64, -1 outside action tokens."""
    token_rewards: torch.Tensor
    """(B, T) float32."""
    returns: torch.Tensor
    """(B,) float32: turn rewards + outcome; NaN for infrastructure failures, which leave the baseline."""


def pad_right(rows: Sequence[Sequence[float]], value: float, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Stack ragged rows into (B, length), filled up with `value`."""
    out = torch.full((len(rows), length), value, dtype=dtype)  # (B, T)
    for index, row in enumerate(rows):
        if row:
            out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def batch_trajectories(trajectories: Sequence[Trajectory], *, length: int | None = None) -> TrajectoryBatch:
    """Pad trajectories into a `TrajectoryBatch`.

    Args:
        trajectories: B of them.
        length: T; None takes the longest completion (at least 1).

    Raises:
        ValueError: if a completion is longer than `length`.
    """
    longest = max([1, *(len(trajectory.completion_ids) for trajectory in trajectories)])
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"length={length} is shorter than the longest completion ({longest} tokens).")

    def pad(name: str, value: float, dtype: torch.dtype) -> torch.Tensor:
        rows: list[Any] = [getattr(trajectory, name) for trajectory in trajectories]
        return pad_right(rows, value, length=length, dtype=dtype)

    return TrajectoryBatch(
        action_mask=pad("action_mask", 0, torch.long),
        turn_ids=pad("turn_ids", -1, torch.long),
        token_rewards=pad_right([t.token_rewards() for t in trajectories], 0.0, length=length, dtype=torch.float32),
        returns=torch.tensor(
            [float("nan") if t.stop_reason.is_infrastructure_failure else t.total_reward for t in trajectories],
            dtype=torch.float32,
        ),
    )
