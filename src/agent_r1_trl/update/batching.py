"""From trajectories to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.live_rows import set_live_scales


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

    A prefix that only the critic reads, (B, Q), stands right before each prompt where there is one: the padding of
    both is on the left, so that no position depends on how long the others are.
    """
    ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
    if "privileged_ids" in inputs:
        ids = torch.cat([inputs["privileged_ids"], ids], dim=1)
        mask = torch.cat([inputs["privileged_mask"], mask], dim=1)
        order = mask.argsort(dim=1, stable=True)  # padding first, tokens in their order
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    return torch.cat([ids, inputs["completion_ids"]], dim=1), torch.cat([mask, inputs["completion_mask"]], dim=1)


def with_one_more(inputs: dict[str, torch.Tensor], has_more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of TRL's batch with a completion token of id 0 behind the last one of some rows.

    Args:
        inputs: completions of (B, T); other columns stay.
        has_more: (B,) bool.

    Returns:
        Completions of (B, T + 1).
    """
    ids, mask = (functional.pad(inputs[f"completion_{name}"], (0, 1)) for name in ("ids", "mask"))
    ends = mask.sum(dim=1, keepdim=True)  # (B, 1)
    mask = mask.scatter(1, ends, has_more.to(mask).unsqueeze(1))
    return {**inputs, "completion_ids": ids, "completion_mask": mask}


def loss_masks(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) the tokens of the policy's loss in TRL's batch, and these with those of the critic's."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask, mask.bool() | inputs["value_mask"].bool() if "value_mask" in inputs else mask.bool()


def settle_masks(
    output: dict[str, Any],
    trajectories: Sequence[Trajectory],
    in_baseline: torch.Tensor,
    in_loss: torch.Tensor,
    args: Any,
    accelerator: Any,
) -> None:
    """Write into TRL's batch which rows and tokens count, once every row's reward is known.

    Importance ratios and the sampler's log-probs, which TRL has computed already, stay those of action tokens.

    Args:
        output: TRL's batch of B rows. Its `tool_mask` and `num_items_in_batch` are replaced; new are `in_baseline`
            and the scales of `live_rows.py`.
        trajectories: B of them.
        in_baseline: (B,) bool.
        in_loss: (B,) bool.
        args: a `MultiTurnConfig`; with its `loss_mask` off, observation tokens count, too.
        accelerator: of the trainer.
    """
    output["in_baseline"] = in_baseline
    set_live_scales([output], steps_per_update=1, accelerator=accelerator)
    completion_mask = output["completion_mask"]  # (B, T)
    action_mask = batch_trajectories(trajectories, length=completion_mask.shape[1]).action_mask.to(in_loss.device)
    tokens = action_mask if args.loss_mask else completion_mask
    output["tool_mask"] = tokens * in_loss.unsqueeze(1)
    output["num_items_in_batch"] = accelerator.gather(output["tool_mask"].sum()).sum()
    if not args.loss_mask and "importance_sampling_ratio" in output:
        output["importance_sampling_ratio"] = torch.where(action_mask.bool(), output["importance_sampling_ratio"], 1.0)


def row_means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked entries, (B, T) -> (B,); 0 for a row without any.

    >>> row_means(torch.tensor([[1.0, 9.0, 2.0], [9.0, 9.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])).tolist()
    [1.5, 0.0]
    """
    keep = mask.bool()
    return torch.where(keep, x, 0.0).sum(dim=1) / keep.sum(dim=1).clamp(min=1)
