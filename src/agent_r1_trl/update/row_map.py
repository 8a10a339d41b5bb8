"""From trajectories to the rows that TRL's batch consists of, and back.

A trajectory has one training row, or several if its context was rewritten on the way (`agent_r1_trl.rows`). Advantages
are estimated over the tokens of a trajectory in the order of time; the policy's loss is computed over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.rows import Row
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import pad_lists, set_live_scales

TRAJECTORY_ROW = "trajectory_row"
"""Entry of TRL's batch, (R,): the place of each row's trajectory in the rollout of all ranks."""
IS_FIRST = "is_first_row"
"""Entry of TRL's batch, (R,): whether the row is the first one of its trajectory."""
OTHER_TOKENS = "tokens_in_other_rows"
"""Entry of TRL's batch, (R,): tokens in the loss of the trajectory's other rows."""
TURN_SHARES = "turn_shares"
"""Entry of TRL's batch with `loss_unit="turn"`, (R, T): one over the tokens of its turn, at tokens in the loss."""
_EMPTY = Row(prompt_ids=[], completion_ids=[], action_mask=[], turn_ids=[], logprobs=[], spans=[])


class TrainingRows:
    """The R rows of this rank's B trajectories, in the order of these.

    Args:
        trajectories: B of them.
        num_rows: rows that hold nothing fill up to so many.
    """

    def __init__(self, trajectories: Sequence[Trajectory], *, num_rows: int = 0) -> None:
        self.trajectories = trajectories
        pairs = [(index, row) for index, item in enumerate(trajectories) for row in trained_rows(item)]
        pairs += [(-1, _EMPTY)] * (num_rows - len(pairs))
        self.rows: list[Row] = [row for _, row in pairs]
        self.index = torch.tensor([index for index, _ in pairs])
        """(R,) the trajectory of each row; -1 for one that fills up."""
        spans = [(number, *span) for number, row in enumerate(self.rows) for span in row.spans]
        number, start, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T  # of each piece that is in one place
        size = end - start
        self._row = torch.from_numpy(np.repeat(number, size))  # (n,) of each of n tokens
        self._trajectory = self.index[self._row]
        places = np.arange(size.sum())
        before = np.cumsum([0, *(len(row.completion_ids) for row in self.rows)])
        self._position = torch.from_numpy(places - np.repeat(before[number], size))
        self._time = torch.from_numpy(places + np.repeat(start - np.cumsum(size) + size, size))

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], args: Any) -> TrainingRows:
        """The rows of a batch, R on all ranks, so that all make the same number of forward passes. All must call it.

        Args:
            trajectories: this rank's B.
            args: a `MultiTurnConfig`.

        Raises:
            ValueError: a trajectory has several rows, and `context_policy` does not allow for any.
        """
        if args.context_policy == "keep" and any(item.segments for item in trajectories):
            raise ValueError(
                "context_policy='keep', and a trajectory of this rollout has rewritten contexts: it was recorded "
                "with another policy. Set context_policy to that one."
            )
        return cls(trajectories, num_rows=max(gather_object([sum(len(trained_rows(item)) for item in trajectories)])))

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
        order = ends.argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]  # by trajectory, and there by their ends
        return order[torch.searchsorted(self.index[order], torch.arange(len(self.trajectories)), right=True) - 1]

    @property
    def is_first(self) -> torch.Tensor:
        """(R,) whether a row is the first one of its trajectory."""
        before = torch.cat([torch.tensor([-1]), self.index[:-1]])
        return (self.index >= 0) & (self.index != before)

    # ---------------------------------------------------------------- tensors

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (R,): each row gets what its trajectory has, and one that fills up gets 0."""
        index = self.index.to(values.device)
        return torch.where(index >= 0, values[index.clamp(min=0)], torch.zeros_like(values[:1]))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (B,): sums over the rows of each trajectory."""
        num = len(self.trajectories)
        index = self.index.to(values.device) % (num + 1)  # what fills up comes last
        return values.new_zeros(num + 1).index_add(0, index, values)[:num]

    def to_rows(self, x: torch.Tensor, places: torch.Tensor, *, fill: float = 0.0) -> torch.Tensor:
        """(B, T') over time -> (R, T) over positions.

        Args:
            x: one number per completion token.
            places: (R, T) any tensor of that shape.
            fill: what stands where no token is.
        """
        rows = x.new_full(places.shape, fill)
        rows[self._row, self._position] = x[self._trajectory, self._time]
        return rows

    def to_time(self, x: torch.Tensor) -> torch.Tensor:
        """(R, T) over positions -> (B, T') over time, 0 where no token is."""
        time = x.new_zeros((len(self.trajectories), self.length))
        time[self._trajectory, self._time] = x[self._row, self._position]
        return time


def trained_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a trajectory that hold an action token; its first one if none does."""
    rows = trajectory.rows
    return [row for row in rows if any(row.action_mask)] or rows[:1]


def row_tensors(
    rows: TrainingRows, *, pad_token_id: int, multiple_of: int | None, has_logprobs: bool, device: torch.device
) -> dict[str, Any]:
    """Prompts, completions and their masks in TRL's form: prompts padded on the left, (R, P), the rest (R, T).

    Args:
        rows: R of them.
        pad_token_id: stands for an empty prompt or completion, too, on which forward passes crash.
        multiple_of: what P and T are rounded up to; None for nothing.
        has_logprobs: whether the sampler's log-probs are among them, 0 outside what it sampled.
        device: of the tensors.
    """

    def padded(lists: Sequence[Sequence[float]], value: float, side: str = "right", dtype: Any = torch.long) -> Any:
        length = -(-max(map(len, lists)) // (multiple_of or 1)) * (multiple_of or 1)
        return pad_lists(lists, value, length=length, dtype=dtype, side=side).to(device)

    prompts = [row.prompt_ids or [pad_token_id] for row in rows.rows]
    completions = [row.completion_ids or [pad_token_id] for row in rows.rows]
    output = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0),
    }
    if has_logprobs:
        logprobs = [row.logprobs or [0.0] for row in rows.rows]
        output["sampling_per_token_logps"] = padded(logprobs, 0.0, dtype=torch.float32)
    return output


def add_masks(
    output: dict[str, Any],
    rows: TrainingRows,
    in_baseline: torch.Tensor,
    in_loss: torch.Tensor,
    *,
    args: Any,
    accelerator: Any,
) -> None:
    """Put into TRL's batch which rows and tokens count, once every reward is known. All ranks must call it.

    Args:
        output: of R rows; gets `tool_mask`, `num_items_in_batch`, `in_baseline`, and what the weights of rows in the
            loss are made of (`loss_weights`).
        rows: R of them.
        in_baseline: (B,) bool.
        in_loss: (B,) bool.
        args: a `MultiTurnConfig`.
        accelerator: of the trainer.
    """
    tokens, device = output["completion_mask"], in_loss.device  # (R, T)
    if args.loss_mask:  # observation tokens stay out of the loss
        tokens = padded_rows(rows, "action_mask", 0, tokens.shape[1]).to(device)
    mask = output["tool_mask"] = tokens * rows.expand(in_loss).unsqueeze(1)
    output["num_items_in_batch"] = accelerator.gather(mask.sum()).sum()
    own = (output["completion_mask"] * mask).sum(dim=1)  # (R,)
    output |= {"in_baseline": rows.expand(in_baseline), IS_FIRST: rows.is_first.to(device)}
    output[OTHER_TOKENS] = rows.expand(rows.total(own)) - own * (rows.index >= 0).to(device)
    if args.loss_unit == "turn":
        output[TURN_SHARES] = turn_shares(output, rows)
    set_live_scales([output], steps_per_update=1, accelerator=accelerator)


def turn_shares(output: dict[str, Any], rows: TrainingRows) -> torch.Tensor:
    """(R, T) one over the tokens of its turn that are in the loss, at each of these; 0 elsewhere."""
    mask = output["completion_mask"] * output["tool_mask"]  # (R, T)
    turn_ids = padded_rows(rows, "turn_ids", -1, mask.shape[1])
    turns = extend_turn_ids(turn_ids.to(mask.device), mask).clamp(min=0)  # (R, T)
    in_loss = mask.float()
    counts = in_loss.new_zeros(len(turns), int(turns.max()) + 1).scatter_add(1, turns, in_loss)  # (R, K)
    return in_loss / counts.gather(1, turns).clamp(min=1)


def padded_rows(rows: TrainingRows, name: str, value: int, length: int) -> torch.Tensor:
    """(R, length) a list of each row, filled up with `value`."""
    return pad_lists([getattr(row, name) for row in rows.rows], value, length=length, dtype=torch.long)
