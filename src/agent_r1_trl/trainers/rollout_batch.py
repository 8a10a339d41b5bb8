"""A rollout on its way to the update: as it was sampled, as it is scored, and as the update trains on it.

Each stage of a step makes the next of these three, which has all that is known by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.rows import TrainingRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """B rows of the data set on this rank, and the trajectories that were sampled for them."""

    rows: list[dict[str, Any]]
    trajectories: list[Trajectory]
    environments: list[Any] | None
    requests: Sequence[Any] = ()
    """The requests, one per trajectory."""
    position: Position = field(default_factory=Position)
    """Where in the run it belongs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout; logged once it is scored."""

    def reward_arguments(
        self, tokenizer: PreTrainedTokenizerBase, *, is_single_turn: bool = False, is_plain_text: bool = False
    ) -> list[tuple]:
        """B tuples of what TRL's `_calculate_rewards` takes: example, prompt, completion, ids of the completion.

        The tokenizer's padding token stands for an empty completion, on which functions of TRL's users crash. With
        `is_single_turn` a prompt is answered without environment and tools: TRL then hands a reply to the functions
        as one text, reasoning included, unless the tokenizer says how replies are parsed. With `is_plain_text` prompts
        and replies are no messages, but text.
        """
        ids = [trajectory.completion_ids or [tokenizer.pad_token_id] for trajectory in self.trajectories]
        completions: list[Any] = [trajectory.answered_messages for trajectory in self.trajectories]
        if is_single_turn and not any(getattr(tokenizer, f"response_{kind}", None) for kind in ("template", "schema")):
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        prompts: list[Any] = [trajectory.prompt_messages for trajectory in self.trajectories]
        if is_plain_text:
            prompts = [messages[0]["content"] for messages in prompts]
            completions = [messages[0]["content"] for messages in completions]
        whole = zip(self.rows, prompts, self.trajectories, strict=True)
        examples = [{**row, "prompt": prompt, "trajectory": trajectory} for row, prompt, trajectory in whole]
        return [*zip(examples, prompts, completions, ids, strict=True)]


@dataclass(kw_only=True)
class ScoredBatch(RolloutBatch):
    """A batch whose reward functions have run. Groups of it may be replaced (`put`)."""

    reward_values: torch.Tensor
    """(B, F) what each of F reward functions returned; NaN for rows that a function did not score."""
    completions: list[Any]
    """The completion of each trajectory, as reward functions got it: messages, or a text."""
    extra_columns: dict[str, list[Any]]
    """Columns of TRL's table of completions: B values each, what reward functions gave to `log_extra`."""
    in_baseline: torch.Tensor
    """(B,) bool: whose reward counts in statistics."""
    in_loss: torch.Tensor
    """(B,) bool: whose tokens get gradients; these rows are all in the baseline."""
    replaced: list[Trajectory] = field(default_factory=list)
    """Trajectories that were sampled for this batch and replaced: nothing is trained on them."""
    replaced_groups: list[int] = field(default_factory=list)
    """Number of the group of each: of group g of G, which round r has replaced, r * G + g."""
    draw_weights: dict[str, float] = field(default_factory=dict)
    """Key of an example -> what it counts for where prompts are not drawn alike; 1 if it is not there."""

    def put(self, places: Sequence[int], other: ScoredBatch) -> list[Trajectory]:
        """Put the n scored trajectories of another batch at n places of this one; returns those that were there."""
        left = [self.trajectories[place] for place in places]
        for name in {*self.extra_columns, *other.extra_columns}:
            self.extra_columns.setdefault(name, [None] * len(self.rows))
            other.extra_columns.setdefault(name, [None] * len(places))
        pairs: list[tuple[Any, Any]] = [(self.rows, other.rows), (self.trajectories, other.trajectories)]
        pairs += [(self.completions, other.completions)]
        pairs += [(column, other.extra_columns[name]) for name, column in self.extra_columns.items()]
        if self.environments is not None and other.environments is not None:
            pairs.append((self.environments, other.environments))
        for index, place in enumerate(places):
            for mine, theirs in pairs:
                mine[place] = theirs[index]
        self.reward_values[list(places)] = other.reward_values
        return left


@dataclass(kw_only=True)
class UpdateBatch(ScoredBatch):
    """A scored batch of which nothing is replaced any more, as the update trains on it."""

    training_rows: TrainingRows
    """The R rows that TRL's batch consists of."""
    is_kept: torch.Tensor | None
    """(B,) bool: whether the trajectory stays in the update; None where all do."""
