"""The journal of a training run: which recorded rollouts a resumed run may use again, and which are kept.

A resumed run starts at its checkpoint and asks for the rollouts behind it once more. Each of them is in the journal,
whole or in part, and is used if it was sampled from the same weights with the same settings; a run whose updates are
deterministic therefore samples only what no process had sampled.

Not covered here: files and records (`agent_r1_trl.features.journal`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from agent_r1_trl.environments.factory import users_environments
from agent_r1_trl.features.journal.log import FOLDER, RolloutLog, rollout_file
from agent_r1_trl.features.journal.reader import RecordedRollout, read_rollout
from agent_r1_trl.features.journal.records import VERSION, Record
from agent_r1_trl.features.journal.replay import JournalReplay, ReplayError
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest
from agent_r1_trl.rollout.limits import deciding_limits
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.checkpoints import fingerprint
from agent_r1_trl.trainers.rollout_batch import Position
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)


class TrainingJournal(RolloutCallback):
    """Opens the journal of each rollout of this process.

    Args:
        args: of the trainer.

    Raises:
        ReplayError: `journal.replay` names no journal.
    """

    name = "journal"

    def __init__(self, args: Any) -> None:
        settings = args.journal
        self._replay = None if settings.replay is None else JournalReplay(settings.replay, rank=args.process_index)
        self._repeats_finished = False
        """Whether reward functions look at environments, which a recorded trajectory does not have."""
        self._is_on, self._keep = self._replay is None, settings.keep
        self._num_ahead = args.rollouts_ahead
        self._num_micro_steps = args.steps_per_generation * args.num_iterations
        """Micro-steps between two rollouts."""
        self._resumed_at = 0
        """Optimizer step that the run begins with."""
        # A run that was to be resumed and has no checkpoint yet begins with the weights that it had then.
        self._asks_to_resume = str(args.resume_from_checkpoint).lower() in ("true", "last")
        self._is_resumed = self._asks_to_resume
        self._weights = ""
        self._has_said_end = False
        self._is_first = True
        """Whether no rollout of this run has been opened."""
        self._needed_from = math.inf if args.save_strategy == "no" else 0
        """Micro-step of the last checkpoint: what lies before it is not needed any more."""
        self._logs: dict[tuple[int, int], RolloutLog] = {}
        """Micro-step and round -> the log of a rollout that may be in flight."""

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """Look at what decides which recorded rollouts can be used.

        Raises:
            ReplayError: `journal.replay` is set, and a reward function looks at environments.
        """
        super().attach(trainer)
        template = trainer.rollouts.chat.chat_template
        self._folder = Path(trainer.args.output_dir).absolute() / FOLDER / f"rank{trainer.accelerator.process_index}"
        self._settings = {
            "processes": trainer.accelerator.num_processes,
            "template": hashlib.blake2b(template.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        }
        self._repeats_finished = reads_environments(trainer.reward_funcs)
        if self._replay is not None and self._repeats_finished:
            raise ReplayError(
                "journal.replay: a reward function reads `environments`, and a replay has none. Leave that function "
                "out, or leave journal.replay out."
            )

    # ---------------------------------------------------------------- a run

    def close_run(self) -> None:
        """Close the files; the next run is another one."""
        self._end()

    def load(self, folder: Path) -> None:
        """The run goes on from a checkpoint: what lies behind it in the journal is its own."""
        self._is_resumed = True

    def saved(self, micro_step: int) -> None:
        """With the next rollout, what lies before the checkpoint goes."""
        self._needed_from = micro_step

    def go_back(self, step: int, micro_step: int) -> None:
        """Other rollouts follow the checkpoint."""
        self._end()
        self._needed_from = micro_step
        if self._is_on:
            self._delete([path for path in self._files() if _micro_step(path) >= micro_step])

    def _end(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        self._is_resumed, self._is_first = self._asks_to_resume, True

    # ---------------------------------------------------------------- replay

    @property
    def replaces_sampling(self) -> bool:  # type: ignore[override]
        """Whether rollouts come from a journal (`journal.replay`)."""
        return self._replay is not None

    def replay(
        self, requests: Sequence[RolloutRequest], limits: RolloutLimits, position: Position
    ) -> ReplayedRollout | None:
        """The recorded rollout; None if rollouts are sampled. One that is not there says so once it is waited for.

        Reward functions that have changed find other groups to replace (`resampling.py`) than those that were sampled;
        a round that is not there has no trajectories.
        """
        if self._replay is None:
            return None
        try:
            place = (position.micro_step, position.round)
            params = asdict(self.trainer.args.sampling_params(is_training=True))
            trajectories = self._replay.replay(requests, *place, deciding_limits(limits) | params)
        except ReplayError as error:
            if not position.round:
                return ReplayedRollout(requests, [], None, error=error)
            if not self._has_said_end:
                logger.warning(
                    "Of micro-steps whose rewards differ from the recorded run's, the replay replaces no groups "
                    "without signal that were not replaced there: %s Reported once; sampling/groups_with_signal "
                    "counts on.",
                    error,
                )
            self._has_said_end, trajectories = True, []
        environments = users_environments([None] * len(requests), self.trainer.env_factory)
        return ReplayedRollout(requests, trajectories, environments)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End a replay behind the last recorded rollout, so that `max_steps` and schedules can stay as they were."""
        micro_step = self.trainer._step  # the last step of an epoch may have fewer micro-batches than the others
        begins_rollout = micro_step % (args.steps_per_generation * args.num_iterations) == 0
        if self._replay is not None and begins_rollout and micro_step not in self._replay.micro_steps:
            logger.warning("The replayed journal ends with optimizer step %d, and so does the run.", state.global_step)
            control.should_training_stop = True

    # ---------------------------------------------------------------- the rollouts of this run

    def weights_synced(self, policy: nn.Module, position: Position) -> None:
        """Look at the weights that the next rollouts are sampled from."""
        if self._is_on and position.is_training:
            self._weights = fingerprint(policy.named_parameters())

    def record(
        self,
        requests: Sequence[RolloutRequest],
        limits: RolloutLimits,
        params: SamplingParams,
        position: Position,
        synced_step: int,
    ) -> RolloutLog | None:
        """The journal of a rollout; None if there is none (any more). See `RolloutCallback`."""
        self._is_on = self._is_on and not any(log.has_failed for log in self._logs.values())
        if not self._is_on:
            return None
        path, micro_step = self._path(position), position.micro_step
        self._resumed_at = synced_step if self._is_first else self._resumed_at
        if self._is_first and not self._is_resumed:  # what is there is the journal of another run
            self._delete(self._files())
        old = sorted({_micro_step(file) for file in self._files()} - {micro_step})
        unneeded = [step for step in old if step < self._needed_from]
        unneeded = unneeded[: max(0, len(unneeded) - self._keep)]
        self._delete([file for file in self._files() if _micro_step(file) in unneeded])
        header = {
            "micro_step": micro_step,
            "optimizer_step": synced_step,
            "weights": self._weights,
            "size": len(requests),
            "params": asdict(params),
            "limits": deciding_limits(limits),
            "round": position.round,
            "base": self.trainer.base,
            **self._settings,
        }
        recorded = self._usable(read_rollout(path), header) if self._is_resumed else None
        self._is_first = False
        log = RolloutLog(path, header, recorded=recorded, repeats_finished=self._repeats_finished)
        self._close_before(micro_step if position.round else micro_step - self._num_ahead * self._num_micro_steps)
        self._logs[micro_step, position.round] = log
        return log

    def _close_before(self, micro_step: int) -> None:
        """Close the logs of rollouts that were trained on."""
        for place in [place for place in self._logs if place[0] < micro_step]:
            self._logs.pop(place).close()

    def void(self, position: Position) -> None:
        """Remove the journal of the rollout."""
        log = self._logs.pop((position.micro_step, position.round), None)
        if log is not None:
            log.close()
        if self._is_on:
            self._delete([self._path(position)])

    # ---------------------------------------------------------------- inside

    def _usable(self, recorded: RecordedRollout | None, header: Record) -> RecordedRollout | None:
        if recorded is None:
            return None
        expected = {"version": VERSION, **header}
        changed = [name for name, value in expected.items() if recorded.header.get(name) != value]
        begun_at = recorded.header.get("optimizer_step", math.inf)
        if self._num_ahead and begun_at < self._resumed_at:
            # It was in flight when the checkpoint was written, begun with earlier weights of this run.
            changed = [name for name in changed if name not in ("optimizer_step", "weights")]
        if not changed:
            known = max(begun_at, self._resumed_at)
            return without_later_weights(recorded, known) if self._num_ahead else recorded
        if self._num_ahead and begun_at > self._resumed_at and {*changed} <= {"optimizer_step", "weights"}:
            return None  # which update came first is another matter in every run
        logger.warning(
            "The journal of the rollout of micro-step %d is not used again: %s differ%s from what was recorded. The "
            "rollout is sampled anew.",
            header["micro_step"],
            ", ".join(changed),
            "s" if len(changed) == 1 else "",
        )
        return None

    def _path(self, position: Position) -> Path:
        return self._folder / rollout_file(position.micro_step, position.round)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("rollout_*.journal"))

    def _delete(self, files: Sequence[Path]) -> None:
        for file in files:
            file.unlink(missing_ok=True)


def without_later_weights(recorded: RecordedRollout, step: int) -> RecordedRollout:
    """Without the turns that weights of more than `step` optimizer steps have sampled, and all that follows them.

    A resumed run makes other ones of that number.
    """
    for trajectory in recorded.trajectories:
        is_later = [any(version > step for version, _ in turn.versions) for turn in trajectory.turns]
        if any(is_later):
            trajectory.end, trajectory.cut_at = None, is_later.index(True)
            del trajectory.turns[trajectory.cut_at :]
    return recorded


def _micro_step(path: Path) -> int:
    return int(path.name.rpartition("_")[2].partition(".")[0])


@dataclass
class ReplayedRollout:
    """A rollout that need not be sampled, in the place of `Rollout`."""

    requests: Sequence[RolloutRequest]
    trajectories: list[Trajectory]
    environments: list[Any] | None
    """An empty batch for reward functions."""
    rows: Sequence[dict[str, Any]] = ()
    """The columns of the data set; `Rollouts` puts them in."""
    seconds: float = 0.0
    error: ReplayError | None = None
    """Why there is none."""
    is_lost: ClassVar[bool] = False
    """It runs on no event loop."""

    def wait(self) -> None:
        """Nothing to wait for.

        Raises:
            ReplayError: the rollout is to be trained on, and is not there.
        """
        if self.error is not None:
            raise self.error

    def cancel(self, timeout_s: float = 0.0) -> bool:
        """Nothing to stop."""
        return True


def reads_environments(functions: Sequence[Any]) -> bool:
    """Whether one of the user's reward functions looks at the environments of the trajectories."""
    for function in functions:
        if isinstance(function, nn.Module) or str(getattr(function, "__module__", "")).startswith("agent_r1_trl."):
            continue
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not hasattr(function, "__code__"):  # an object that can be called
            function = type(function).__call__
        code = getattr(function, "__code__", None)
        # Without code nothing is known; with it, the name stands among its arguments, or its texts (kwargs["..."]).
        if code is None or "environments" in _words(code):
            return True
    return False


def _words(code: CodeType) -> Iterator[Any]:
    """Names and constants of a function, those of comprehensions and functions in it included."""
    yield from (*code.co_varnames, *code.co_consts, *code.co_names)
    for inner in code.co_consts:
        yield from _words(inner) if isinstance(inner, CodeType) else ()
