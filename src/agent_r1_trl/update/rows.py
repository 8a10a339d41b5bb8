"""Training rows: what of a trajectory one forward pass scores, and TRL's tensors of it.

A trajectory has one training row, or several if its context was rewritten on the way. Advantages are estimated over
the tokens of a trajectory in the order of time; the policy's loss is computed over rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from agent_r1_trl.trajectory import Row, Trajectory
from agent_r1_trl.update.batches import MIN_COLUMNS
from agent_r1_trl.update.entries import Inputs
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig

logger = logging.getLogger(__name__)


class TrainingRows:
    """The R rows of this rank's B trajectories, in the order of these; empty ones fill up to `num_rows`."""

    def __init__(self, trajectories: Sequence[Trajectory], *, num_rows: int = 0) -> None:
        self.trajectories = trajectories
        self.rows: list[Row] = []
        index = []
        for number, trajectory in enumerate(trajectories):
            own = trained_rows(trajectory)
            self.rows += own
            index += [number] * len(own)
        num_missing = max(0, num_rows - len(self.rows))
        self.rows += [row_of([], [])] * num_missing
        self.index = torch.tensor(index + [-1] * num_missing)
        """(R,) the trajectory of each row; -1 for one that fills up."""
        self._locate_tokens()

    def _locate_tokens(self) -> None:
        """Find row and position, and trajectory and time, of each token of the rows, n in all."""
        spans = [(number, start, end) for number, row in enumerate(self.rows) for start, end in row.spans]
        number, start, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T  # of each stretch of a trajectory
        size = end - start
        places = np.arange(size.sum())  # of the tokens of all rows in one line
        num_before_row = np.cumsum([0, *(len(row.completion_ids) for row in self.rows)])
        num_before_span = np.cumsum(size) - size
        self._row = torch.from_numpy(np.repeat(number, size))  # (n,)
        self._trajectory = self.index[self._row]  # (n,)
        self._position = torch.from_numpy(places - np.repeat(num_before_row[number], size))  # (n,)
        self._time = torch.from_numpy(places + np.repeat(start - num_before_span, size))  # (n,)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], args: MultiTurnConfig) -> TrainingRows:
        """The rows of this rank's batch, R on all ranks, so that all make as many forward passes. All must call it.

        Raises:
            ValueError: a trajectory has several rows, and `context.policy` does not allow for any.
        """
        if args.context.policy == "keep" and any(item.segments for item in trajectories):
            raise ValueError(
                "context.policy='keep', and a trajectory of this rollout has rewritten contexts: it was recorded "
                "with another policy. Set context.policy to that one."
            )
        num_own = sum(len(trained_rows(item)) for item in trajectories)
        return cls(trajectories, num_rows=max(gather_object([num_own])))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """T', tokens of the longest trajectory."""
        return max([1, *(len(item.completion_ids) for item in self.trajectories)])

    @property
    def last(self) -> torch.Tensor:
        """(B,) the row of each trajectory that holds its last token."""
        ends = torch.tensor([row.spans[-1][1] if row.spans else 0 for row in self.rows])
        by_end = ends.argsort(stable=True)
        order = by_end[self.index[by_end].argsort(stable=True)]  # by trajectory, and there by their ends
        trajectories = torch.arange(len(self.trajectories))
        behind = torch.searchsorted(self.index[order], trajectories, right=True)
        return order[behind - 1]

    @property
    def is_first(self) -> torch.Tensor:
        """(R,) whether a row is the first one of its trajectory."""
        before = torch.cat([torch.tensor([-1]), self.index[:-1]])
        return (self.index >= 0) & (self.index != before)

    # ---------------------------------------------------------------- tensors

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (R,): each row gets the value of its trajectory, and one that fills up gets 0."""
        index = self.index.to(values.device)
        of_rows = values[index.clamp(min=0)]
        return torch.where(index >= 0, of_rows, torch.zeros_like(values[:1]))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (B,): sums over the rows of each trajectory."""
        num = len(self.trajectories)
        index = self.index.to(values.device) % (num + 1)  # rows that fill up go behind the last trajectory
        sums = values.new_zeros(num + 1).index_add(0, index, values)
        return sums[:num]

    def kept_ids(self, places: torch.Tensor) -> SamplingMasks:
        """(R, T) the ids that each sampled token was drawn from, as the sampler says; T is that of `places`.

        Tokens that nobody sampled, or whose sampler does not tell, have no ids.
        """
        known = []
        is_some_lost = False
        for index, trajectory in enumerate(self.trajectories):
            for turn in trajectory.turns:
                if turn.kept_ids:
                    known.append((index, turn.start, turn.kept_ids))
                elif turn.kept_ids is None and turn.end > turn.start:
                    is_some_lost = True
        if is_some_lost:
            _warn_of_lost_masks()
        shape = (len(self.trajectories), self.length)
        over_time = SamplingMasks.of_turns(known, shape)
        numbers = torch.arange(shape[0] * shape[1]).view(shape)  # (B, T') of the tokens
        of_rows = self.to_rows(numbers, places, fill=-1)
        return over_time.select(of_rows).to(places.device)

    def to_rows(self, x: torch.Tensor, places: torch.Tensor, *, fill: float = 0.0) -> torch.Tensor:
        """(B, T', ...) over time -> (R, T, ...) over positions, as many as `places`; `fill` where no token is."""
        rows = x.new_full((*places.shape, *x.shape[2:]), fill)
        rows[self._row, self._position] = x[self._trajectory, self._time]
        return rows

    def to_time(self, x: torch.Tensor) -> torch.Tensor:
        """(R, T) over positions -> (B, T') over time, 0 where no token is."""
        time = x.new_zeros((len(self.trajectories), self.length))
        time[self._trajectory, self._time] = x[self._row, self._position]
        return time


@functools.cache
def _warn_of_lost_masks() -> None:
    logger.warning(
        "top_k, top_p or min_p is set, and the generator does not tell what each token was drawn from "
        "(Generation.kept_ids): the trainer scores the whole vocabulary, so the gradient is another distribution's."
    )


def row_of(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Row:
    """A row of no trajectory, to be scored alone."""
    return Row(
        prompt_ids=[*prompt_ids], completion_ids=[*completion_ids], action_mask=[], turn_ids=[], logprobs=[], spans=[]
    )


def trained_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a trajectory that hold an action token; its first one if none does."""
    with_actions = [row for row in trajectory.rows if any(row.action_mask)]
    return with_actions or trajectory.rows[:1]


def row_tensors(
    rows: Sequence[Row], *, pad_token_id: int, multiple_of: int | None, has_logprobs: bool, device: torch.device
) -> Inputs:
    """Prompts, completions and their masks in TRL's form: prompts padded on the left, (R, P), the rest (R, T).

    T is at least `MIN_COLUMNS`.
    The padding token stands for an empty prompt or completion, too, on which forward passes crash; P and T are
    multiples of `multiple_of`. With `has_logprobs` the sampler's are there, 0 outside what it sampled.
    """
    step = multiple_of or 1

    def padded(
        lists: Sequence[Sequence[float]], value: float, side: str = "right", dtype: torch.dtype = torch.long
    ) -> torch.Tensor:
        fewest = MIN_COLUMNS if side == "right" else 1
        longest = max(fewest, *map(len, lists))
        length = -(-longest // step) * step
        return pad_lists(lists, value, length=length, dtype=dtype, side=side).to(device)

    prompts = [row.prompt_ids or [pad_token_id] for row in rows]
    completions = [row.completion_ids or [pad_token_id] for row in rows]
    output: Inputs = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0),
    }
    if has_logprobs:
        logprobs = [row.logprobs or [0.0] for row in rows]
        output["sampling_per_token_logps"] = padded(logprobs, 0.0, dtype=torch.float32)
    return output


def pad_lists(
    rows: Sequence[Sequence[float]], value: float, *, length: int, dtype: torch.dtype, side: str = "right"
) -> torch.Tensor:
    """Stack ragged rows into (B, length), filled up with `value` on the `right` or the `left`."""
    out = torch.full((len(rows), length), value, dtype=dtype)
    for index, row in enumerate(rows):
        if not row:
            continue
        numbers = torch.tensor(row, dtype=dtype)
        if side == "right":
            out[index, : len(row)] = numbers
        else:
            out[index, -len(row) :] = numbers
    return out


def pad_tokens(items: Sequence[Any], name: str, value: int, length: int) -> torch.Tensor:
    """(B, length) int64: a list of each trajectory or row, with one number per token, filled up with `value`."""
    return pad_lists([getattr(item, name) for item in items], value, length=length, dtype=torch.long)
