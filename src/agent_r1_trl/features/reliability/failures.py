"""How many infrastructure failures a training run bears: one bad row never ends it, an outage does.

Failures are judged over the last rollouts that hold `window` prompts together, on all ranks. What a failure is
and what caused it: `agent_r1_trl.rollout.failures`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import gather_object

from agent_r1_trl.rollout.failures import (
    DOCTOR,
    FailureCause,
    NothingPlayedError,
    count_causes,
    describe_causes,
    failure_of,
)
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.checkpoints import last_checkpoint
from agent_r1_trl.trainers.rollouts import RolloutBatch
from agent_r1_trl.trajectory import Trajectory

logger = logging.getLogger(__name__)

MAX_WARNINGS = 20
"""Warnings about single causes in one run."""


@dataclass(kw_only=True, frozen=True)
class Tally:
    """What became of one rollout."""

    num_prompts: int
    num_trajectories: int
    causes: list[FailureCause]

    @property
    def num_failed(self) -> int:
        """Number of trajectories that failed."""
        return sum(cause.count for cause in self.causes)


def gather_failures(trajectories: Sequence[Trajectory]) -> list[FailureCause | None]:
    """Why each trajectory of all ranks failed, in data order; None for those that were played.

    All ranks must call it.
    """
    return gather_object([failure_of(trajectory) for trajectory in trajectories])


class FailureBudget(RolloutCallback):
    """Warns of each new cause of failures, and ends a run in which too many trajectories fail.

    All ranks are told of the same rollouts and come to the same verdict.

    Args:
        max_share: the run ends when a larger share of the window's trajectories has failed.
        window: prompts that the last rollouts hold before they are judged.
    """

    name = "failures"

    def __init__(self, max_share: float, window: int) -> None:
        self.max_share = max_share
        self.window = window
        self._rollouts: deque[Tally] = deque()
        self._num_prompts = 0
        self._has_played = False
        self._warned_of: set[str] = set()

    def begin_run(self) -> None:
        """Forget the rollouts of an earlier run; one that is resumed begins anew as well."""
        self._rollouts.clear()
        self._num_prompts, self._has_played = 0, False

    def after_rollout(self, batch: RolloutBatch) -> bool:
        """Judge a rollout of training.

        Raises:
            NothingPlayedError: too many have failed; names the causes and the last checkpoint.
        """
        position = batch.position
        if position.is_training:
            failures = gather_failures(batch.trajectories)
            try:
                self.judge(failures, group_size=position.group_size)
            except NothingPlayedError as error:
                path = last_checkpoint(Path(self.trainer.args.output_dir), position.optimizer_step)
                raise NothingPlayedError(f"{error} The last checkpoint is {path or 'not written yet'}.") from error
        return False

    def end_run(self) -> None:
        """See `check_some_played`."""
        self.check_some_played()

    def judge(self, failures: Sequence[FailureCause | None], *, group_size: int) -> None:
        """Take in a rollout of training.

        Args:
            failures: of all ranks, from `gather_failures`.
            group_size: trajectories of one prompt.

        Raises:
            NothingPlayedError: too many have failed, or nothing was ever played and two prompts were tried.
        """
        tally = Tally(
            num_prompts=max(1, len(failures) // group_size),
            num_trajectories=len(failures),
            causes=count_causes(failures),
        )
        self._num_prompts += tally.num_prompts
        self._has_played |= tally.num_failed < tally.num_trajectories
        self._rollouts.append(tally)
        while sum(item.num_prompts for item in self._rollouts) - self._rollouts[0].num_prompts >= self.window:
            self._rollouts.popleft()
        if self._num_prompts > 1:  # else it may be this one row
            self.check_some_played()
        self._warn(tally.causes)
        self._check_share()

    def check_some_played(self) -> None:
        """Refuse a run in which trajectories were tried and none was ever played.

        Raises:
            NothingPlayedError: lists the causes.
        """
        if self._rollouts and not self._has_played:
            causes, _, num_trajectories = self._in_window()
            raise NothingPlayedError(
                f"All {num_trajectories} trajectories failed: {describe_causes(causes)}. {DOCTOR}"
            )

    def _check_share(self) -> None:
        causes, num_prompts, num_trajectories = self._in_window()
        num_failed = sum(cause.count for cause in causes)
        if num_prompts >= self.window and num_failed > self.max_share * num_trajectories:
            raise NothingPlayedError(
                f"{num_failed} of the last {num_trajectories} trajectories failed, a larger share than "
                f"failures.max_share={self.max_share} allows: {describe_causes(causes)}. Correct the environment or "
                f"the data, or raise failures.max_share. {DOCTOR}"
            )

    def _in_window(self) -> tuple[list[FailureCause], int, int]:
        """Causes, number of prompts and number of trajectories of the last rollouts."""
        causes = count_causes(cause for tally in self._rollouts for cause in tally.causes)
        return (
            causes,
            sum(tally.num_prompts for tally in self._rollouts),
            sum(tally.num_trajectories for tally in self._rollouts),
        )

    def _warn(self, causes: Sequence[FailureCause]) -> None:
        for cause in causes:
            if cause.key in self._warned_of or len(self._warned_of) >= MAX_WARNINGS:
                continue
            self._warned_of.add(cause.key)
            if not is_main_process():
                continue
            logger.warning(
                "Trajectories failed for no fault of the policy and are left out of the update: %s. This cause is "
                "reported once; rollout/infrastructure_failure_share counts on.%s",
                cause,
                " Further causes are not reported." if len(self._warned_of) == MAX_WARNINGS else "",
            )
