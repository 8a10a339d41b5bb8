"""A run's report on its learning: at once when a rollout teaches nothing, and in a few lines at its end."""

from __future__ import annotations

import logging
import math
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from accelerate.utils import gather_object

from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.metrics import has_advantage
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trajectory import StopReason, Trajectory
from agent_r1_trl.update.entries import Inputs

logger = logging.getLogger(__name__)

NUM_ERRORS = 3.0
"""Standard errors by which a reward has fallen for certain."""
MIN_GROUPS = 8
"""Groups in a rollout from which its mean has a standard error to rely on."""
MIN_CALLS = 8
"""Answers after which a tool that never said another thing is named."""


class RolloutResult(NamedTuple):
    """The rewards of one rollout's trajectories."""

    step: int
    mean: float
    error: float
    """Standard error of the mean, over groups: members of one group answer the same question."""
    num_groups: int
    teaches: bool
    """Whether two trajectories that are compared with each other differ."""
    solved: float
    """Share of the trajectories whose task was solved, those that infrastructure ended left out."""


@dataclass(kw_only=True)
class Answers:
    """A tool's answers in this run; of texts and arguments two are enough."""

    num: int = 0
    num_failed: int = 0
    texts: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)

    def add(self, other: Answers) -> None:
        """Count another rank's as well."""
        self.num += other.num
        self.num_failed += other.num_failed
        self.texts = {*sorted(self.texts | other.texts)[:2]}
        self.arguments = {*sorted(self.arguments | other.arguments)[:2]}

    def silence(self, name: str) -> str | None:
        """A sentence about a tool that says nothing; None for one that does, or was asked the same each time."""
        if not self.num:
            return f"All {self.num_failed} calls of the tool {name!r} failed." if self.num_failed > 1 else None
        if len(self.texts) > 1 or self.num < 2 or (self.texts != {""} and len(self.arguments) < 2):
            return None
        (text,) = self.texts
        how = f"the same ({shown(text[:60])!r})" if text else "empty"
        return f"All {self.num} answers of the tool {name!r} were {how}."


class LearningReport(RolloutCallback):
    """Says whether a run learns: at once when a rollout teaches nothing, and in a few lines at its end.

    Args:
        output_dir: of the run, for the command that shows trajectories.
        records: whether trajectories are recorded there.
    """

    name = "learning"

    def __init__(self, output_dir: str, *, records: bool) -> None:
        folder = min(output_dir, os.path.relpath(output_dir), key=len)
        self.command = f"agent-r1-trl view {shlex.quote(folder)}" if records else None
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run of the same trainer."""
        self.rollouts: list[RolloutResult] = []
        self._has_rolled_out = False
        self.num_unsolved = 0
        """Trajectories of the last rollout whose task was not solved, on all ranks."""
        self.limits: Counter[str] = Counter()
        """How many of them each limit ended."""
        self.answers: dict[str, Answers] = {}
        self._warned_of: set[str] = set()
        """Names of tools, and "" for the rewards."""
        self._seconds = {} if self.trainer is None else dict(self.trainer.seconds)

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """Take it in, and warn of what cannot be learned from. `take` does so without a filter's verdict."""
        position = batch.position
        kept = batch.is_kept
        num = len(self.rollouts)
        taught = has_advantage(batch, output)
        self.take(
            batch.trajectories,
            step=position.optimizer_step + 1,
            group_size=position.group_size,
            has_advantage=bool(taught.any()),
        )
        is_skipped = not any(gather_object([kept is None or bool((kept & taught).any())]))
        if is_skipped and len(self.rollouts) > num:  # the filter kept none of its groups
            self.rollouts[-1] = self.rollouts[-1]._replace(teaches=False)

    def end_run(self) -> None:
        """Print the summary."""
        trainer = self.trainer
        if trainer.is_world_process_zero() and not trainer.args.disable_tqdm and (text := self.summary()):
            PlainConsole(soft_wrap=True).print(f"\n{text}")

    def take(
        self, trajectories: Sequence[Trajectory], *, step: int, group_size: int, has_advantage: bool | None = None
    ) -> None:
        """Take in this rank's trajectories, which `step` is the first to train on; warn of what teaches nothing.

        `has_advantage`: whether any of them has an advantage other than 0 in the loss; None where it is unknown.
        """
        self._has_rolled_out = True
        finished = [item for item in trajectories if not item.stop_reason.is_infrastructure_failure]
        solved = gather_object([item.is_solved for item in finished])
        self.num_unsolved = len(solved) - sum(solved)
        ended_by = gather_object([item.stop_reason.value for item in finished if not item.is_solved and _is_cut(item)])
        self.limits = Counter(ended_by)
        rewards = gather_object([item.total_reward if item.in_baseline else math.nan for item in trajectories])
        groups = []
        for start in range(0, len(rewards), group_size):
            known = [reward for reward in rewards[start : start + group_size] if math.isfinite(reward)]
            if known:
                groups.append(known)
        earned = [reward for group in groups for reward in group]
        if earned:
            compared = groups if group_size > 1 else [earned]
            teaches = self._teaches(trajectories, compared, has_advantage)
            means = [statistics.fmean(group) for group in groups]
            error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
            share = sum(solved) / max(1, len(solved))
            self.rollouts.append(RolloutResult(step, statistics.fmean(earned), error, len(means), teaches, share))
            if not teaches and len(earned) > 1:
                is_weighted = any(_differ(group) for group in compared)
                self._warn_of_rewards(step, earned, len(groups), is_weighted=is_weighted)
        for name, answers in gather_object([*_answers(trajectories).items()]):
            self.answers.setdefault(name, Answers()).add(answers)
        for name, answers in self.answers.items():
            silence = answers.silence(name) if answers.num >= MIN_CALLS else None
            if silence is not None:
                self._warn(name, "Step %d: %s Try the tool by hand.", step, silence)

    def _teaches(
        self, trajectories: Sequence[Trajectory], groups: Sequence[Sequence[float]], has_advantage: bool | None
    ) -> bool:
        """Whether anything can be learned from a rollout. All ranks must call it.

        An advantage other than 0 says so. Beside a critic, or whitened over the batch, advantages are hardly ever 0:
        there, rewards must differ as well, in their sum or in what single turns earned.
        """
        if has_advantage is None or not any(gather_object([has_advantage])):
            return has_advantage is None and any(_differ(group) for group in groups)
        if self.trainer.args.estimator.needs_group:
            return True
        weights = self.trainer.credit.weights(self.trainer._progress)
        rewards = []
        for item in trajectories:
            if item.in_baseline:
                turns = [round(weights["process"] * turn.reward, 9) for turn in item.turns]
                while turns and turns[-1] == 0:  # a turn more that earned nothing is no other reward
                    turns.pop()
                outcomes = [item.outcome_of(seat) for seat in sorted(item.seat_rewards)] or [item.outcome_reward]
                rewards.append((tuple(turns), *(round(weights["outcome"] * outcome, 9) for outcome in outcomes)))
        return len({*gather_object(rewards)}) > 1

    def _warn(self, about: str, *message: object) -> None:
        if about not in self._warned_of and is_main_process():
            logger.warning(*message)
        self._warned_of.add(about)

    def _warn_of_rewards(self, step: int, earned: list[float], num_groups: int, *, is_weighted: bool) -> None:
        if is_weighted:
            what = (
                f"No trajectory of the {num_groups} groups has an advantage other than 0: with the weights that "
                "rewards have in training, those of each group earned the same"
            )
        elif _differ(earned):
            what = f"The trajectories of each of the {num_groups} groups earned the same"
        else:
            what = f"All {len(earned)} trajectories earned exactly {earned[0]:g}"
        self._warn(
            "",
            "Step %d: %s: nothing can be learned from them. Look at some%s. If answers that differ in worth earn the "
            "same, correct the reward function; if none is ever right, use easier examples, a stronger model or a "
            "process reward; if all are right, harder examples; if they are alike, raise temperature or "
            "num_generations. Reported once; the summary at the end counts such rollouts.",
            step,
            what,
            f" ({self.command})" if self.command else "",
        )

    def summary(self) -> str:
        """The change of the reward over the run, a fact per line; "" without a rollout."""
        if not self.rollouts:
            return "No trajectory was scored: the model has learned nothing." if self._has_rolled_out else ""
        seconds = {} if self.trainer is None else self.trainer.seconds
        rollout_s, update_s = (seconds.get(name, 0.0) - self._seconds.get(name, 0.0) for name in ("rollout", "update"))
        first = self.rollouts[0]
        last = self.rollouts[-1]
        num = len(self.rollouts)
        best = max(self.rollouts, key=lambda item: item.mean)
        num_flat = sum(not item.teaches for item in self.rollouts)
        changes = f", {last.mean:.3g} at step {last.step}, best {best.mean:.3g} at step {best.step}" if num > 1 else ""
        solved = f", {last.solved:.0%} at step {last.step}" if num > 1 else ""
        lines = [
            f"reward          {first.mean:.3g} at step {first.step}{changes}",
            f"solved          {first.solved:.0%} of the trajectories at step {first.step}{solved}",
            f"taught nothing  {num_flat} of {num} rollouts ({num_flat / num:.0%})",
            f"time            {rollout_s:.0f} s rollouts, {update_s:.0f} s updates",
        ]
        lines += [text for name in sorted(self.answers) if (text := self.answers[name].silence(name))]
        limit = self._usual_limit()
        if not any(item.solved for item in self.rollouts):
            first_fix = "Warm"
            if limit:
                first_fix = (
                    f"Most of the last rollout ended at {limit}: raise it if the model's context allows; else warm"
                )
            lines.append(
                "No trajectory was solved: rewards can only have taught something else, such as fewer call errors. "
                f"{first_fix} the model up on demonstrations (docs/warm-up.md), or begin with easier rows."
            )
        if num_flat == num:
            lines.append("No rollout taught anything: the model has learned nothing from its rewards.")
        elif _has_fallen(first, last):
            lines.append(
                "The reward fell: the model at the end is worse than the one at the start. Set a lower learning_rate "
                "(a third of it or less), and see docs/troubleshooting.md."
            )
        if self.command and self.num_unsolved:
            ends = f", {self.limits[limit]} of them ended at {limit}" if limit else ""
            lines.append(
                f"unsolved        {self.num_unsolved} of the last rollout{ends}: {self.command} --filter unsolved"
            )
        return "\n".join(lines)

    def _usual_limit(self) -> str | None:
        """The limit that ended at least half of the last rollout's unsolved trajectories, if there is one."""
        for name, num in self.limits.most_common(1):
            if 2 * num >= self.num_unsolved:
                return name
        return None


def _is_cut(trajectory: Trajectory) -> bool:
    """Whether a limit with a setting of its name ended it."""
    return trajectory.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_COMPLETION_LENGTH)


def _has_fallen(first: RolloutResult, last: RolloutResult) -> bool:
    """Whether the reward is lower at the end, by more than chance; of a few groups nobody can say."""
    if min(first.num_groups, last.num_groups) < MIN_GROUPS:
        return False
    return first.mean - last.mean > NUM_ERRORS * math.hypot(first.error, last.error)


def _answers(trajectories: Sequence[Trajectory]) -> dict[str, Answers]:
    """Each tool's answers in them; calls that reached no tool do not count, nor answers that end the episode."""
    found: dict[str, Answers] = {}
    turns = [turn for item in trajectories for turn in item.turns]
    for turn in turns:
        for result in turn.tool_results:
            if result.is_error and not result.is_refused:
                one = Answers(num_failed=1)
            elif not result.is_error and turn.observations:
                text = result.content if result.content.strip() else ""
                one = Answers(num=1, texts={text}, arguments={str(result.call.arguments)})
            else:
                continue
            found.setdefault(result.call.name, Answers()).add(one)
    return found


def _differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding."""
    if not rewards:
        return False
    return max(rewards) - min(rewards) > 1e-6 * max(map(abs, rewards))
