"""Says whether a run learns: at once when a rollout teaches nothing, and in a few lines at its end.

Covered: rewards without a difference, tools whose answers never differ, a reward that fell. Not covered: tools that
fail (`tool_watch.py`), a collapse under way (`features/echo_trap`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from agent_r1_trl.safe_text import shown
from agent_r1_trl.trainers.agreement import is_main_process
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.rollout_batch import RolloutBatch
from agent_r1_trl.trajectory import ToolErrorKind, Trajectory

logger = logging.getLogger(__name__)

MIN_CALLS = 8
"""Calls with different arguments after which answers that are all the same say something about the tool."""
NUM_ERRORS = 3.0
"""Standard errors by which a reward has fallen for certain."""
MAX_SHOWN = 60
_FAILURES = (ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT, ToolErrorKind.INFRASTRUCTURE)
"""What happens inside a tool; of other errors, it was never called."""


@dataclass(kw_only=True, frozen=True)
class RolloutResult:
    """What the trajectories of one rollout earned."""

    step: int
    mean: float
    error: float
    """Standard error of the mean."""
    teaches: bool
    """Whether two trajectories that are compared with each other differ."""


@dataclass(kw_only=True)
class Answers:
    """What a tool has answered in this run."""

    num_failed: int = 0
    """Calls that the tool failed; the others say what it answers."""
    num: int = 0
    num_arguments: int = 0
    first: str | None = None
    is_constant: bool = True


class LearningReport(RolloutCallback):
    """Takes in every training rollout.

    Args:
        output_dir: of the run, for the command that shows trajectories.
        records: whether trajectories are recorded there.
    """

    name = "learning"

    def __init__(self, output_dir: str, *, records: bool) -> None:
        folder = min(output_dir, os.path.relpath(output_dir), key=len)
        self.command = f"agent-r1-trl view {folder} --filter failed" if records else None
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run of the same trainer."""
        self.rollouts: list[RolloutResult] = []
        self.answers: dict[str, Answers] = {}
        self._seconds = {} if self.trainer is None else dict(self.trainer.seconds)
        self._has_warned = False
        self._warned_of: set[str] = set()

    def rollout_end(self, batch: RolloutBatch, output: dict[str, Any]) -> None:
        """See `take`."""
        position = batch.position
        self.take(batch.trajectories, step=position.optimizer_step + 1, group_size=position.group_size)

    def end_run(self) -> None:
        """Print the summary."""
        trainer = self.trainer
        if trainer.is_world_process_zero() and not trainer.args.disable_tqdm and (text := self.summary()):
            print(f"\n{text}")

    def take(self, trajectories: Sequence[Trajectory], *, step: int, group_size: int) -> None:
        """Take in a rollout and warn of what cannot be learned from.

        Args:
            trajectories: this rank's, in data order.
            step: the first optimizer step that trains on them.
            group_size: trajectories of one prompt, which are consecutive.
        """
        rewards = gather_object([item.total_reward if item.in_baseline else math.nan for item in trajectories])
        answers = gather_object([answer for item in trajectories for answer in _answers(item)])
        groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
        groups = [[reward for reward in group if math.isfinite(reward)] for group in groups]
        groups = [group for group in groups if group]
        earned = [reward for group in groups for reward in group]
        if earned:
            teaches = any(_differ(group) for group in (groups if group_size > 1 else [earned]))
            error = statistics.stdev(earned) / math.sqrt(len(earned)) if len(earned) > 1 else 0.0
            mean = statistics.fmean(earned)
            self.rollouts.append(RolloutResult(step=step, mean=mean, error=error, teaches=teaches))
            if not teaches and len(earned) > 1:
                self._warn_of_rewards(step, earned, len(groups))
        self._take_answers(step, answers)

    def _warn_of_rewards(self, step: int, earned: list[float], num_groups: int) -> None:
        if self._has_warned or not is_main_process():
            return
        self._has_warned = True
        what = (
            f"The trajectories of each of the {num_groups} groups earned the same"
            if _differ(earned)
            else f"All {len(earned)} trajectories earned exactly {earned[0]:g}"
        )
        logger.warning(
            "Step %d: %s: nothing can be learned from them. Look at some%s. If answers that differ in worth earn the "
            "same, correct the reward function; if none is ever right, use easier examples, a stronger model or a "
            "process reward; if all are right, harder examples; if they are alike, raise temperature or "
            "num_generations. Said once; the summary at the end counts such rollouts.",
            step, what, f" ({self.command.removesuffix(' --filter failed')})" if self.command else "",
        )  # fmt: skip

    def _take_answers(self, step: int, answers: Sequence[tuple[str, str, str | None]]) -> None:
        arguments: dict[str, set[str]] = {}
        for name, argument, content in answers:
            tool = self.answers.setdefault(name, Answers())
            if content is None:
                tool.num_failed += 1
                continue
            tool.num += 1
            tool.first = content if tool.first is None else tool.first
            tool.is_constant &= content == tool.first
            arguments.setdefault(name, set()).add(argument)
        for name, different in arguments.items():
            tool = self.answers[name]
            tool.num_arguments = max(tool.num_arguments, len(different))
            if tool.num >= MIN_CALLS and name not in self._warned_of and (silent := self._silence(name)):
                self._warned_of.add(name)
                if is_main_process():
                    logger.warning("Step %d: %s Try the tool by hand.", step, silent)

    def _silence(self, name: str) -> str | None:
        """A sentence about a tool that says nothing; None for one that does, or was asked the same each time."""
        tool = self.answers[name]
        if not tool.num:
            return f"All {tool.num_failed} calls of the tool {name!r} failed." if tool.num_failed > 1 else None
        if not tool.is_constant or tool.num < 2 or (tool.first and tool.num_arguments < 2):
            return None
        content = tool.first.partition(":")[2] if tool.first else ""
        how = f"the same ({shown(content[:MAX_SHOWN])!r})" if content.strip() else "empty"
        return f"All {tool.num} answers of the tool {name!r} were {how}."

    def summary(self) -> str:
        """What the run did to the reward, a fact per line; "" without a rollout."""
        if not self.rollouts:
            return ""
        seconds = {} if self.trainer is None else self.trainer.seconds
        rollout_s, update_s = (seconds.get(name, 0.0) - self._seconds.get(name, 0.0) for name in ("rollout", "update"))
        first, last, num = self.rollouts[0], self.rollouts[-1], len(self.rollouts)
        best = max(self.rollouts, key=lambda item: item.mean)
        num_flat = sum(not item.teaches for item in self.rollouts)
        lines = [
            f"reward          {first.mean:.3g} at step {first.step}, {last.mean:.3g} at step {last.step}, "
            f"best {best.mean:.3g} at step {best.step}",
            f"taught nothing  {num_flat} of {num} rollouts ({num_flat / num:.0%})",
            f"time            {rollout_s:.0f} s rollouts, {update_s:.0f} s updates",
        ]
        lines += [silent for name in sorted(self.answers) if (silent := self._silence(name))]
        if num_flat == num:
            lines.append("No rollout taught anything: the model has learned nothing from its rewards.")
        elif first.mean - last.mean > NUM_ERRORS * math.hypot(first.error, last.error):
            lines.append(
                "The reward fell: the model at the end is worse than the one at the start. Set a lower learning_rate "
                "(a third of it or less), and see docs/troubleshooting.md."
            )
        lines += [f"failures        {self.command}"] if self.command else []
        return "\n".join(lines)


def _answers(trajectory: Trajectory) -> list[tuple[str, str, str | None]]:
    """Name, arguments and text of what a tool was asked; the text as a digest and its first characters, or None."""
    found: list[tuple[str, str, str | None]] = []
    for result in trajectory.tool_results:
        if result.error in _FAILURES:
            found.append((result.call.name, "", None))
        elif not result.is_error:
            text = result.content
            digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if text else ""
            found.append(
                (result.call.name, str(result.call.arguments), f"{digest}:{text[:MAX_SHOWN]}" if text else "")
            )
    return found


def _differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding."""
    return max(rewards) - min(rewards) > 1e-6 * max(map(abs, rewards)) if rewards else False
