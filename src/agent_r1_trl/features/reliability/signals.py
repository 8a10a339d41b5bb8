"""Endings of a training run: by a signal, by another rank's failure, by the launcher's death.

A signal lets the update in flight finish and cancels a rollout, of which the journal keeps the whole turns. Then a
checkpoint is written, environments and engines are closed, what tools have started is ended, and `train` raises
KeyboardInterrupt or SystemExit. Signals are received on a thread of their own, because the main thread may wait for
another rank in a collective operation. Covered here: the order of these events. Not covered: handlers
(`signal_handlers.py`), what ranks tell each other (`ranks.py`), processes of tools
(`rollout/processes.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from agent_r1_trl.features.reliability.ranks import RankLostError, RankWatch, set_gloo_timeout
from agent_r1_trl.features.reliability.signal_handlers import REPEAT_S, SignalListener, raise_signal
from agent_r1_trl.features.reliability.tool_watch import ToolOutageError
from agent_r1_trl.rollout.processes import end_marked_processes, marked_processes
from agent_r1_trl.trainers.callbacks import Agreement, RolloutCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

T = TypeVar("T")
logger = logging.getLogger(__name__)

_runs = itertools.count()
_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""The `Rollouts` of all trainers, whose engines and connections end with the program."""


@atexit.register
def _close_all() -> None:
    for rollouts in [*_open]:
        rollouts.close()


class Interruption(BaseException):
    """All ranks have agreed to end; it never leaves `train`."""


class RunGuard(RolloutCallback):
    """Ends a training run in good order; see the top of this file."""

    name = "signals"
    _agreement: Agreement

    def __init__(self) -> None:
        self._watch: RankWatch | None = None
        self._received = 0
        """The number of the signal that this or another rank has received."""
        self._agreed = 0
        """That number once all ranks know it."""
        self._saved_step = -1
        self._boundary: tuple[Any, ...] = (0, None, [])
        """TRL's `_step` and `_buffered_inputs` after the last optimizer step, and states of random generators then."""

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """See to it that ranks can agree, and that engines end with the program."""
        super().attach(trainer)
        self._agreement = Agreement(trainer.args.ddp_timeout_delta)
        set_gloo_timeout(trainer.args.ddp_timeout_delta)
        _open.add(trainer.rollouts)

    def around_run(self, train: Callable[[], T]) -> T:
        """Call `train` and see to its end; a signal or a lost rank is raised, with everything saved and closed."""
        self._received = self._agreed = 0
        self._saved_step = -1
        watch = self._watch = RankWatch(self._on_signal, self._cancel)
        try:
            runs_ahead = self.trainer.args.rollouts_ahead > 0  # trajectories are sampled all the time
            with (
                SignalListener(lambda signum: self._on_signal(signum, "")),
                marked_processes() if runs_ahead else contextlib.nullcontext(),
            ):
                watch.start(next(_runs))
                return self._run(train)
        except BaseException as error:
            has_ended = self._agreed and isinstance(error, KeyboardInterrupt | SystemExit)  # as all others do
            if not has_ended and not isinstance(error, RankLostError):
                watch.tell(error=f"{type(error).__name__}: {error}")
            raise
        finally:
            watch.stop()
            self._watch = None

    def _run(self, train: Callable[[], T]) -> T:
        try:
            has_best = False  # the model is no longer that of the last step
            with contextlib.suppress(Interruption):
                result = train()
                has_best = self.trainer.args.load_best_model_at_end
                if not self._agreed:
                    self._agree()  # one that came after the very last step
            if not self._agreed:
                return result
            if self.trainer.args.failures.save_on_signal and not has_best:
                self._save()
        except BaseException as error:
            self.trainer.rollouts.cancel()
            end_marked_processes()
            if isinstance(error, ToolOutageError) and self.trainer.args.save_strategy != "no":
                try:
                    self._save()  # on all ranks alike; nothing was trained on since
                except RuntimeError as failed:  # the outage is what ends the run
                    logger.error("%s", failed)
            lost = None if self._watch is None else self._watch.explain(error)
            if lost is None:
                raise
            raise lost from error
        step, trainer = self.trainer.state.global_step, self.trainer
        if trainer.is_world_process_zero():
            logger.warning("Ended by a signal after step %d. %s", step, self._way_on(step))
        trainer.rollouts.close()
        end_marked_processes()
        self._agreement.largest(0, None)  # the first rank to end would have the launcher kill the others
        raise_signal(self._agreed)

    def _way_on(self, step: int) -> str:
        """The checkpoint of the last step and the way to resume it, as a message's end."""
        if step != self._saved_step:
            return "No checkpoint holds it."
        return (
            f"checkpoint-{step} in {self.trainer.args.output_dir} holds it. To go on, run the same command with "
            "--resume_from_checkpoint true (in a script: trainer.train(resume_from_checkpoint=True))."
        )

    @property
    def is_ending(self) -> bool:
        """Whether all ranks have agreed to end."""
        return bool(self._agreed)

    # ---------------------------------------------------------------- from other threads

    def _on_signal(self, signum: int, why: str) -> None:
        if self._received:
            return
        self._received = signum
        if self._watch is not None:
            self._watch.tell(signum=signum)
        saves = self.trainer.args.failures.save_on_signal
        logger.warning(
            "%s%s: the update in flight is finished, a rollout is cancelled, %s checkpoint is written%s and "
            "everything is closed. A second signal, at least %g s after the first, ends at once.",
            signal.Signals(signum).name,
            f" ({why})" if why else "",
            "a" if saves else "no",
            "" if saves else " (failures.save_on_signal=False)",
            REPEAT_S,
        )
        self._cancel()

    def _cancel(self) -> None:
        threading.Thread(target=self.trainer.rollouts.cancel, name="cancel", daemon=True).start()

    # ---------------------------------------------------------------- where all ranks meet

    @contextlib.contextmanager
    def around_rollout(self) -> Iterator[None]:
        """Around a rollout: all ranks call it, and what goes wrong on one of them is raised on all."""
        failure = None
        with marked_processes():
            try:
                yield
            except Exception as error:
                failure = error
                if self._watch is not None and not isinstance(error, CancelledError):
                    self._watch.tell(error=f"{type(error).__name__}: {error}")
        self._agree(failure)

    def _agree(self, failure: Exception | None = None) -> None:
        # One that was cancelled has its reason elsewhere.
        own = None if isinstance(failure, CancelledError) else failure
        signum, texts = self._agreement.largest(self._received, own)
        self._agreed = signum
        if signum and self._watch is not None:
            raise Interruption from failure
        if own is None and texts:
            raise RankLostError("; ".join(texts)) from failure
        if failure is not None:
            raise failure

    # ---------------------------------------------------------------- the Trainer's events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """A resumed run begins where its checkpoint stands."""
        self._saved_step = -1  # after a rollback, the checkpoint of that step is gone
        self._remember()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Between two optimizer steps: the place to end and to save."""
        self._remember()
        if self._watch is None:
            return
        try:
            self._agree()
        except Interruption:
            control.should_training_stop = True
            control.should_evaluate = False
            control.should_save |= args.failures.save_on_signal

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """A saved step need not be saved again."""
        self._saved_step = state.global_step

    def _remember(self) -> None:
        trainer = self.trainer
        is_used_up = trainer._step % (trainer.args.steps_per_generation * trainer.args.num_iterations) == 0
        states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        self._boundary = (trainer._step, None if is_used_up else trainer._buffered_inputs, states)

    # ---------------------------------------------------------------- the end

    def _save(self) -> None:
        """A checkpoint of the last optimizer step, unless there is one."""
        trainer = self.trainer
        step = trainer.state.global_step
        if step in (0, self._saved_step):
            return
        trainer._step, trainer._buffered_inputs, states = self._boundary
        setters: Any = (random.setstate, np.random.set_state, torch.set_rng_state, torch.cuda.set_rng_state)
        for restore, state in zip(setters, states, strict=False):
            restore(state)
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
