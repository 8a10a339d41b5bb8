"""The rollout of one step on this rank: what was sampled, what it earned, and the training rows that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import batch_trajectories
from agent_r1_trl.update.importance import mismatch_metrics, sampling_ratio
from agent_r1_trl.update.row_map import TrainingRows


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
    training_rows: TrainingRows = field(init=False)
    """The R rows that TRL's batch consists of, once it is clear which trajectories are trained on."""
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
