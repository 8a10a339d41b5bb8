"""From trajectories to padded tensors."""

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

    def to(self, device: torch.device) -> TrajectoryBatch:
        """A copy on `device`."""
        return TrajectoryBatch(action_mask=self.action_mask.to(device), turn_ids=self.turn_ids.to(device))


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
    )


def whole_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, (B, P + T) each, of prompts and completions in TRL's batch.

    A prefix that only the critic reads, (B, Q), stands before them where there is one.
    """
    parts = [name for name in ("privileged", "prompt", "completion") if f"{name}_ids" in inputs]
    ids = torch.cat([inputs[f"{name}_ids"] for name in parts], dim=1)
    return ids, torch.cat([inputs[f"{name}_mask"] for name in parts], dim=1)


def open_loss_mask(output: dict[str, Any], in_loss: Sequence[bool], accelerator: Any) -> None:
    """The ablation without loss mask: in rows that are in the loss, observation tokens count, too.

    Args:
        output: TRL's batch of B rows; its `tool_mask` and `num_items_in_batch` are replaced.
        in_loss: B of them.
        accelerator: of the trainer.
    """
    completion_mask = output["completion_mask"]  # (B, T)
    rows = torch.tensor(in_loss, device=completion_mask.device).unsqueeze(1)  # (B, 1)
    output["tool_mask"] = completion_mask * rows
    output["num_items_in_batch"] = accelerator.gather(output["tool_mask"].sum()).sum()
