"""One generation batch that has been played, and the form in which TRL's trainer takes it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_r1_trl.trainers.training_rows import TrainingRows
from agent_r1_trl.trajectory import Trajectory


@dataclass
class PlayedBatch:
    """One generation batch on this rank: B rows of the data set and what became of them."""

    rows: list[dict[str, Any]]
    trajectories: list[Trajectory]
    environments: list[Any] | None
    reward_values: torch.Tensor = field(init=False)
    """(B, F) what each of F reward functions returned, once they ran; NaN for rows that a function did not score."""
    all_reward_values: torch.Tensor | None = None
    """(N, F) those of all ranks, where they are known before TRL asks for them."""
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    """Of TRL's table of completions: B values each, what reward functions gave to `log_extra`."""
    has_outcomes: bool = False
    """Whether `reward_values` are part of the trajectories' outcomes."""
    reward_calls: Any = None
    """The `RewardCalls` of the batch; None if a subclass computed the values without calling the functions."""
    chosen: tuple[dict[str, torch.Tensor], dict[str, float]] | None = None
    """What `GroupFilter.choose` returned, where that is known before TRL scores the rows."""
    scored_rows: list[int] | None = None
    """Of the R rows those whose old and reference log-probs TRL computes; None for all."""
    split: TrainingRows | None = None
    """The trajectories' rows, once it is clear which of them are trained on; None: each trajectory is its row."""
    in_baseline: torch.Tensor = field(init=False)
    """(B,) bool: whose reward counts in statistics, once the reward functions ran."""
    in_loss: torch.Tensor = field(init=False)
    """(B,) bool: whose tokens get gradients; these rows are all in the baseline."""

    @property
    def training_rows(self) -> TrainingRows:
        """The R rows that TRL's batch consists of."""
        return self.split or TrainingRows(self.trajectories)

    @property
    def rows_with_prompts(self) -> list[dict[str, Any]]:
        """The rows as TRL and reward functions see them: with the prompt that the environment made."""
        pairs = zip(self.rows, self.trajectories, strict=True)
        return [{**row, "prompt": trajectory.prompt_messages} for row, trajectory in pairs]

    def completion_ids(self, of_rows: list[list[int]], pad_token_id: int) -> list[list[int]]:
        """What reward functions get as `completion_ids`: all of each trajectory, not those of R rows."""
        if not self.training_rows.is_split:
            return of_rows
        return [trajectory.completion_ids or [pad_token_id] for trajectory in self.trajectories]

    def put(self, places: Sequence[int], other: PlayedBatch) -> list[Trajectory]:
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
        pairs += [(column, other.extra_columns[name]) for name, column in self.extra_columns.items()]
        if self.environments is not None and other.environments is not None:
            pairs.append((self.environments, other.environments))
        for index, place in enumerate(places):
            for mine, theirs in pairs:
                mine[place] = theirs[index]
        self.reward_values[list(places)] = other.reward_values
        return left


def trl_generation(
    played: PlayedBatch,
    *,
    tokenizer: Any,
    in_loss: Callable[[Trajectory], bool],
    has_logprobs: bool,
    is_single_turn: bool,
) -> tuple:
    """The 8-tuple that TRL's `_generate` returns, for the trajectories of a rollout.

    Args:
        played: B trajectories of R rows.
        tokenizer: of the policy; its padding token stands for an empty prompt or completion, on which TRL crashes.
        in_loss: whether a trajectory's action tokens enter the loss.
        has_logprobs: whether TRL compares the sampler's log-probs with the trainer's (`use_vllm`).
        is_single_turn: whether prompts are answered without environment and tools. TRL then hands a reply to the
            reward functions as one text, reasoning included, unless the tokenizer says how replies are parsed.
    """
    trajectories, pad_token_id = played.trajectories, tokenizer.pad_token_id
    rows = played.training_rows
    completion_ids = [row.completion_ids or [pad_token_id] for row in rows.rows]
    completions = [trajectory.answered_messages for trajectory in trajectories]
    if is_single_turn and not any(getattr(tokenizer, f"response_{kind}", None) for kind in ("template", "schema")):
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)  # of one turn, and so of one row
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    tool_mask = [
        row.action_mask or [0] if in_loss(trajectories[index]) else [0] * len(ids)
        for row, index, ids in zip(rows.rows, rows.index, completion_ids, strict=True)
    ]
    return (
        [row.prompt_ids or [pad_token_id] for row in rows.rows],
        completion_ids,
        tool_mask,
        completions,
        [row.logprobs or [0.0] for row in rows.rows] if has_logprobs else None,
        {"trajectory": trajectories},
        None,
        [],
    )
