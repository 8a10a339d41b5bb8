"""From trajectories to training rows and back: the time axis of estimators, and the position axis of forward passes.

A batch of B trajectories has R rows, at least one each (`agent_r1_trl.rows`). What estimators read and return is
(B, T'), a trajectory's tokens in the order of time; what the model reads and the loss weighs is (R, T), a row's tokens
in the order of position. Every completion token has one place in each.

Covered here: this map. Not covered: the order of rows in the update (`row_batches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.rows import Row
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import batch_trajectories
from agent_r1_trl.update.importance import mismatch_metrics, sampling_ratio, weigh_mismatch


class TrainingRows:
    """The rows of this rank's B trajectories, which TRL's batch consists of.

    Args:
        trajectories: B of them.
        is_split: whether any trajectory of any rank has several rows; otherwise a trajectory is its row.
        num_rows: R, the same on all ranks, so that all make the same number of forward passes; rows that hold nothing
            fill up. None: as many as there are.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], *, is_split: bool = False, num_rows: int | None = None
    ) -> None:
        self.trajectories = trajectories
        self.is_split = is_split
        self.rows: Sequence[Any] = trajectories
        """R rows, or trajectories, whose per-token lists have the same names."""
        self.index = list(range(len(trajectories)))
        """(R,) the trajectory of each row; -1 for one that fills up."""
        if not is_split:
            return
        pairs = [(index, row) for index, item in enumerate(trajectories) for row in trained_rows(item)]
        pairs += [(-1, _EMPTY)] * ((num_rows or 0) - len(pairs))
        self.index, self.rows = [index for index, _ in pairs], [row for _, row in pairs]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], args: Any) -> TrainingRows:
        """The rows of a batch. With rewritten contexts all ranks must call it.

        Args:
            trajectories: this rank's B.
            args: a `MultiTurnConfig`.

        Raises:
            ValueError: a trajectory has several rows, and `context_policy` does not allow for any.
        """
        if args.context_policy == "keep":
            if any(item.segments for item in trajectories):
                raise ValueError(
                    "context_policy='keep', and a trajectory of this rollout has rewritten contexts: it was recorded "
                    "with another policy. Set context_policy to that one."
                )
            return cls(trajectories, is_split=args.loss_unit is not None)
        num_rows = sum(len(trained_rows(item)) for item in trajectories)
        everywhere = gather_object([(num_rows, any(item.segments for item in trajectories))])
        is_split = args.loss_unit is not None or any(has_segments for _, has_segments in everywhere)
        return cls(trajectories, is_split=is_split, num_rows=max(number for number, _ in everywhere))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """T', tokens of the longest trajectory."""
        return max([1, *(len(item.completion_ids) for item in self.trajectories)])

    @property
    def last(self) -> list[int]:
        """(B,) the row of each trajectory that holds its last token."""
        if not self.is_split:
            return self.index
        ends = [row.spans[-1][1] if row.spans else 0 for row in self.rows]
        return [
            max((row for row, other in enumerate(self.index) if other == index), key=lambda row: ends[row])
            for index in range(len(self.trajectories))
        ]

    @property
    def is_first(self) -> list[bool]:
        """(R,) whether a row is the first one of its trajectory."""
        first = {index: row for row, index in reversed([*enumerate(self.index)])}
        return [index >= 0 and first[index] == row for row, index in enumerate(self.index)]

    # ---------------------------------------------------------------- tensors

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (R,): each row gets what its trajectory has, and one that fills up gets 0."""
        if not self.is_split:
            return values
        index = torch.tensor(self.index, device=values.device)
        return torch.where(index >= 0, values[index.clamp(min=0)], torch.zeros_like(values[:1]))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (B,): sums over the rows of each trajectory."""
        if not self.is_split:
            return values
        num = len(self.trajectories)
        index = torch.tensor([num if item < 0 else item for item in self.index], device=values.device)
        return values.new_zeros(num + 1).index_add(0, index, values)[:num]

    def to_rows(self, x: torch.Tensor, places: torch.Tensor, *, fill: float = 0.0) -> torch.Tensor:
        """(B, T') over time -> (R, T) over positions.

        Args:
            x: one number per completion token.
            places: (R, T) any tensor of that shape.
            fill: what stands where no token is.
        """
        if not self.is_split:
            return x
        rows = x.new_full(places.shape, fill)
        for row, index, position, start, end in self._places():
            rows[row, position : position + end - start] = x[index, start:end]
        return rows

    def to_time(self, x: torch.Tensor) -> torch.Tensor:
        """(R, T) over positions -> (B, T') over time, 0 where no token is."""
        if not self.is_split:
            return x
        time = x.new_zeros((len(self.trajectories), self.length))
        for row, index, position, start, end in self._places():
            time[index, start:end] = x[row, position : position + end - start]
        return time

    def by_trajectory(self, output: dict[str, Any], of_trajectories: dict[str, Any]) -> dict[str, Any]:
        """What is logged and recorded of TRL's batch, over time.

        Args:
            output: TRL's batch of R rows.
            of_trajectories: entries with an element for each of B trajectories.
        """
        if not self.is_split:
            return output
        names = ("advantages", "completion_mask", "tool_mask")
        return {name: self.to_time(output[name]) for name in names} | of_trajectories

    def _places(self) -> list[tuple[int, int, int, int, int]]:
        """Row, trajectory, position in the row, and [start, end) in time of each piece that is in one place."""
        places = []
        for number, (row, index) in enumerate(zip(self.rows, self.index, strict=True)):
            position = 0
            for start, end in row.spans:
                places.append((number, index, position, start, end))
                position += end - start
        return places


def trained_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a trajectory that hold an action token; its first one if none does."""
    if not trajectory.segments:
        return trajectory.rows
    rows = [row for row in trajectory.rows if any(row.action_mask)]
    return rows or trajectory.rows[:1]


def weigh_mismatch_of_rows(output: dict[str, Any], rows: TrainingRows, args: Any) -> dict[str, float]:
    """`weigh_mismatch` for a batch of R rows: a turn, and a trajectory, is one unit whatever its rows are."""
    if not rows.is_split:
        return weigh_mismatch(output, rows.trajectories, args)
    difference = rows.to_time(output["old_per_token_logps"] - output["sampling_per_token_logps"])  # (B, T')
    batch = batch_trajectories(rows.trajectories, length=difference.shape[1]).to(difference.device)
    unit, _, constraint = args.vllm_importance_sampling_mode.partition("_")
    ratio = sampling_ratio(
        difference,
        batch.action_mask,
        batch.turn_ids,
        unit=args.importance_sampling_unit or unit,
        length_normalized=args.importance_sampling_length_normalized,
        bounds=(args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max),
        is_masked=constraint == "mask",
    )
    output["importance_sampling_ratio"] = rows.to_rows(ratio, output["completion_mask"], fill=1.0)
    return mismatch_metrics(difference, batch.action_mask, batch.turn_ids)


_EMPTY = Row(prompt_ids=[], completion_ids=[], action_mask=[], turn_ids=[], logprobs=[], spans=[])
