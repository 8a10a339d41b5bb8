"""The rollout of one step on this rank: what was sampled, what it earned, and the training rows that it becomes.

A trajectory whose context was rewritten has several training rows (`agent_r1_trl.rows`). Advantages are estimated over
the tokens of a trajectory in the order of time; TRL's batch consists of rows. `TrainingRows` maps one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import pad

from agent_r1_trl.rows import Row
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import batch_trajectories
from agent_r1_trl.update.importance import mismatch_metrics, sampling_ratio

TRAJECTORY_ROW = "trajectory_row"
"""Entry of TRL's batch, (R,): the place of each row's trajectory in the rollout of all ranks."""


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
            ValueError: a trajectory has several rows, and `context.policy` does not allow for any.
        """
        if args.context.policy == "keep":
            if any(item.segments for item in trajectories):
                raise ValueError(
                    "context.policy='keep', and a trajectory of this rollout has rewritten contexts: it was recorded "
                    "with another policy. Set context.policy to that one."
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

    def padded(columns: Sequence[Sequence[float]], value: float, side: str = "right") -> torch.Tensor:
        tensors = [torch.tensor(column) for column in columns]
        return pad(tensors, padding_value=value, padding_side=side, pad_to_multiple_of=multiple_of).to(device)

    prompts = [row.prompt_ids or [pad_token_id] for row in rows.rows]
    completions = [row.completion_ids or [pad_token_id] for row in rows.rows]
    output = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0),
    }
    if has_logprobs:
        output["sampling_per_token_logps"] = padded([row.logprobs or [0.0] for row in rows.rows], 0.0)
    return output


def weigh_mismatch(output: dict[str, Any], rows: TrainingRows, args: Any) -> dict[str, float]:
    """Put the importance ratios of trainer to sampler into TRL's batch: a turn, and a trajectory, is one unit.

    Args:
        output: of R rows, with old log-probs and the sampler's.
        rows: of the batch.
        args: a `MultiTurnConfig`.

    Returns:
        Mean ratios by turn.
    """
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


@dataclass(kw_only=True, frozen=True)
class Position:
    """Where the run stands when a rollout is asked for."""

    micro_step: int = 0
    """Number of micro-batches trained on so far: TRL's `_step`. It seeds the draws."""
    optimizer_step: int = 0
    """Number of optimizer steps behind the policy's weights."""
    num_micro_steps: int = 0
    """Number of micro-batches of the whole run."""
    group_size: int = 1
    """Trajectories of one prompt; they are consecutive rows."""
    is_training: bool = True
    first_row: int = 0
    """Index in the evaluation of the first row of all ranks; 0 in training."""
    round: int = 0
    """0 for a generation batch; 1, 2, ... for the rollouts that replace groups of it (`resampling.py`)."""
    places: Sequence[int] | None = None
    """In such a round, of each row of this rank its place among the rows of all ranks."""


@dataclass
class RolloutBatch:
    """B rows of the data set on this rank, and what became of them."""

    rows: list[dict[str, Any]]
    trajectories: list[Trajectory]
    environments: list[Any] | None
    requests: Sequence[Any] = ()
    """What was asked for, one per trajectory."""
    position: Position = field(default_factory=Position)
    """Where in the run it belongs."""
    reward_values: torch.Tensor = field(init=False)
    """(B, F) what each of F reward functions returned, once they ran; NaN for rows that a function did not score."""
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    """Columns of TRL's table of completions: B values each, what reward functions gave to `log_extra`."""
    completions: list[Any] = field(default_factory=list)
    """What reward functions get as the completion of each trajectory: messages, or a text."""
    reward_calls: Any = None
    """The `RewardCalls` of the batch; None if a subclass computed the values without calling the functions."""
    split: TrainingRows | None = None
    """The trajectories' rows, once it is clear which of them are trained on; None: each trajectory is its row."""
    in_baseline: torch.Tensor = field(init=False)
    """(B,) bool: whose reward counts in statistics, once the reward functions ran."""
    in_loss: torch.Tensor = field(init=False)
    """(B,) bool: whose tokens get gradients; these rows are all in the baseline."""
    is_kept: torch.Tensor | None = None
    """(B,) bool: whether the trajectory stays in the update; None where all do."""
    replaced: list[Trajectory] = field(default_factory=list)
    """What was sampled for this batch and replaced: nothing is trained on it."""
    draw_weights: dict[str, float] = field(default_factory=dict)
    """Key of an example -> what it counts for where prompts are not drawn alike; 1 if it is not there."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout; logged once it is scored."""

    @property
    def training_rows(self) -> TrainingRows:
        """The R rows that TRL's batch consists of."""
        return self.split or TrainingRows(self.trajectories)

    def reward_arguments(self, tokenizer: Any, *, is_single_turn: bool) -> list[tuple]:
        """B tuples of what TRL's `_calculate_rewards` takes: example, prompt, completion, ids of the completion.

        Args:
            tokenizer: of the policy; its padding token stands for an empty completion, on which functions of TRL's
                users crash.
            is_single_turn: whether prompts are answered without environment and tools. TRL then hands a reply to the
                functions as one text, reasoning included, unless the tokenizer says how replies are parsed.
        """
        ids = [trajectory.completion_ids or [tokenizer.pad_token_id] for trajectory in self.trajectories]
        self.completions = [trajectory.answered_messages for trajectory in self.trajectories]
        if is_single_turn and not any(getattr(tokenizer, f"response_{kind}", None) for kind in ("template", "schema")):
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            self.completions = [[{"role": "assistant", "content": text}] for text in texts]
        prompts = [trajectory.prompt_messages for trajectory in self.trajectories]
        examples = [
            {**row, "prompt": prompt, "trajectory": trajectory}
            for row, prompt, trajectory in zip(self.rows, prompts, self.trajectories, strict=True)
        ]
        return [*zip(examples, prompts, self.completions, ids, strict=True)]

    def put(self, places: Sequence[int], other: RolloutBatch) -> list[Trajectory]:
        """Put n scored trajectories in the place of others.

        Args:
            places: n indices of rows of this batch.
            other: n trajectories.

        Returns:
            The n that were there.
        """
        left = [self.trajectories[place] for place in places]
        for name in {*self.extra_columns, *other.extra_columns}:
            self.extra_columns.setdefault(name, [None] * len(self.rows))
            other.extra_columns.setdefault(name, [None] * len(places))
        pairs: list[tuple[list[Any], list[Any]]] = [(self.rows, other.rows), (self.trajectories, other.trajectories)]
        pairs.append((self.completions, other.completions))
        pairs += [(column, other.extra_columns[name]) for name, column in self.extra_columns.items()]
        if self.environments is not None and other.environments is not None:
            pairs.append((self.environments, other.environments))
        for index, place in enumerate(places):
            for mine, theirs in pairs:
                mine[place] = theirs[index]
        self.reward_values[list(places)] = other.reward_values
        return left
