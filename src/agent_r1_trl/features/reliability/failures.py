"""How many infrastructure failures a training run bears: one bad row never ends it, an outage does.

Failures are judged over the last rollouts that hold `window` prompts together, on all ranks. What a failure is
and what caused it: `agent_r1_trl.rollout.failures`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import gather_object

from agent_r1_trl.rollout.failures import (
    FailureCause,
    NothingRolledOutError,
    count_causes,
    describe_causes,
    failure_of,
    what_to_do,
)
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.checkpoints import last_checkpoint
from agent_r1_trl.trainers.rewards import is_required
from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch, ScoredBatch

logger = logging.getLogger(__name__)

MAX_WARNINGS = 20
"""Warnings about single causes in one run."""


class FailureBudget(RolloutCallback):
    """Warns of each new cause of failures, and ends a run in which too many trajectories fail.

    All ranks are told of the same rollouts and come to the same verdict.

    Args:
        max_share: the run ends when a larger share of the window's trajectories has failed.
        window: prompts that the last rollouts hold before they are judged.
    """

    name = "failures"

    def __init__(self, max_share: float, window: int) -> None:
        self.max_share, self.window = max_share, window
        self._warned_of: set[str] = set()
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the rollouts of an earlier run; one that is resumed begins anew as well."""
        self._rollouts: deque[tuple[int, Sequence[FailureCause | None]]] = deque()
        """Number of prompts of each of the last rollouts, and why each of its trajectories were lost, if it did."""
        self._num_prompts = 0
        self._has_rolled_out = False
        self._had_rolled_out = False

    def after_rollout(self, batch: RolloutBatch) -> bool:
        """Judge a rollout of training.

        Raises:
            NothingRolledOutError: too many have failed; names the causes and the last checkpoint.
        """
        position = batch.position
        if position.is_training:
            failures = gather_object([failure_of(trajectory) for trajectory in batch.trajectories])
            self._end(self.judge(failures, group_size=position.group_size), position)
        return False

    def after_scores(self, batch: ScoredBatch) -> None:
        """Count those of the last rollout that a required reward function did not score.

        Raises:
            NothingRolledOutError: as `after_rollout` does.
        """
        functions = [*self.trainer.reward_funcs, *self.trainer.rewards.turn_reward_funcs]
        if not any(map(is_required, functions)):
            return
        found = [item for item in batch.trajectories if not item.stop_reason.is_infrastructure_failure]
        self._end(self.add([cause for cause in gather_object([*map(failure_of, found)]) if cause]), batch.position)

    def _end(self, problem: str | None, position: Position) -> None:
        if problem:
            path = last_checkpoint(Path(self.trainer.args.output_dir), position.optimizer_step, self.trainer.run_id)
            raise NothingRolledOutError(f"{problem} The last checkpoint is {path or 'not written yet'}.")

    def end_run(self) -> None:
        """Refuse a run in which trajectories were tried and none was ever sampled.

        Raises:
            NothingRolledOutError: lists the causes.
        """
        if problem := self._find_problem(may_be_one_row=False):
            raise NothingRolledOutError(problem)

    def judge(self, failures: Sequence[FailureCause | None], *, group_size: int) -> str | None:
        """Take in a rollout of training; returns what is wrong if the run must end.

        Args:
            failures: why each trajectory of all ranks failed, in data order; None for those that were sampled.
            group_size: trajectories of one prompt.
        """
        num_prompts = max(1, len(failures) // group_size)
        self._num_prompts += num_prompts
        self._had_rolled_out = self._has_rolled_out
        self._has_rolled_out |= None in failures
        self._rollouts.append((num_prompts, failures))
        while sum(num for num, _ in self._rollouts) - self._rollouts[0][0] >= self.window:
            self._rollouts.popleft()
        self._warn(count_causes(failures))
        return self._find_problem(may_be_one_row=self._num_prompts == 1)

    def add(self, causes: Sequence[FailureCause]) -> str | None:
        """Take in why trajectories of the last rollout, which were sampled, got no score; returns as `judge` does."""
        num_prompts, failures = self._rollouts.pop()
        num_sampled = max(0, failures.count(None) - len(causes))
        known = [*causes, *(cause for cause in failures if cause), *[None] * num_sampled]
        self._rollouts.append((num_prompts, known))
        self._has_rolled_out = self._had_rolled_out or num_sampled > 0
        self._warn(count_causes(causes))
        return self._find_problem(may_be_one_row=self._num_prompts == 1)

    def _find_problem(self, *, may_be_one_row: bool) -> str | None:
        found = [failure for _, failures in self._rollouts for failure in failures]
        causes, num_failed = count_causes(found), len(found) - found.count(None)
        if found and not self._has_rolled_out and not may_be_one_row:
            return f"All {len(found)} trajectories were lost: {describe_causes(causes)}. {what_to_do(causes)}"
        is_full = sum(num for num, _ in self._rollouts) >= self.window
        if is_full and num_failed > self.max_share * len(found):
            return (
                f"{num_failed} of the last {len(found)} trajectories were lost, a larger share than "
                f"failures.max_share={self.max_share} allows: {describe_causes(causes)}. "
                f"{what_to_do(causes, ', or raise failures.max_share')}"
            )
        return None

    def _warn(self, causes: Sequence[FailureCause]) -> None:
        for cause in causes:
            if cause.key in self._warned_of or len(self._warned_of) >= MAX_WARNINGS:
                continue
            self._warned_of.add(cause.key)
            if is_main_process():
                logger.warning(
                    "Trajectories were lost for no fault of the policy and are excluded from the update: %s. This "
                    "cause is reported once; rollout/lost_share and rollout/unscored_share count on.%s",
                    cause,
                    " Further causes are not reported." if len(self._warned_of) == MAX_WARNINGS else "",
                )
