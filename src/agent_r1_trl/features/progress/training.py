"""The progress of a run: a block of lines in a terminal, a line a step elsewhere."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text
from transformers import PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.display.lines import (
    MAX_ROWS,
    TAUGHT,
    headline_of,
    numbers_of,
    progress_line,
    row_of,
    seconds_left,
    shown_metrics,
    sparks,
    table,
)
from agent_r1_trl.display.live import LiveBlock, has_terminal
from agent_r1_trl.features.progress.causes import Causes
from agent_r1_trl.rollout import describe_sampling, rollout_status
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process, num_ranks
from agent_r1_trl.trainers.plan import plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
    from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch, UpdateBatch
    from agent_r1_trl.update.entries import Inputs

MAX_HISTORY = 2000
"""Logs of which there are curves."""
T = TypeVar("T")


class NoProgress(RolloutCallback):
    """Takes away what transformers prints of a run: its bar, and a dict of all metrics at each log."""

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """The trainer is made."""
        super().attach(trainer)
        trainer.remove_callback(PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)


class TrainingProgress(NoProgress):
    """Shows how a training goes on and what it does now, in the main process.

    Args:
        is_plain: lines only, also in a terminal.
    """

    name = "progress"

    def __init__(self, *, is_plain: bool = False) -> None:
        self.console = PlainConsole(soft_wrap=True)
        self.is_verbose = False
        """Whether every logged metric is printed."""
        self.has_plan = False
        """Whether the plan of the run has been printed."""
        self._is_plain = is_plain
        self._block: LiveBlock | None = None
        self._causes: Causes | None = None
        """Where the run is shown, and between its begin and its end."""
        self._rows: deque[dict[str, float]] = deque(maxlen=MAX_HISTORY)
        self._phase, self._phase_began = "starting", time.monotonic()
        self._eval_batch: tuple[int, int] | None = None
        """In an evaluation, the number of the batch and of all batches."""

    # ---------------------------------------------------------------- the run

    def around_run(self, train: Callable[[], T]) -> T:
        """The display ends with the run, however that ends."""
        try:
            return train()
        finally:
            self.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin to show the run, with the history of one that is resumed."""
        if not state.is_world_process_zero:
            return
        self.stop()  # what a rollback has undone
        self._args, self._state = args, state
        self._rows.clear()
        for logs in state.log_history:
            self._take(logs)
        self._began = self._step_ended = time.monotonic()
        self._first_step = state.global_step
        self._causes = Causes(self.console)
        self._causes.step = state.global_step + 1
        logging.getLogger("agent_r1_trl").addHandler(self._causes)
        if self.trainer is not None:  # not without our rollout
            if not self.has_plan:
                self.console.print(f"{plan_of(self.trainer)}\n")
                self.has_plan = True
            for note in self.trainer.layout.notes:
                self.console.print(note)
        if self._has_block:
            self._block = LiveBlock(self.console, self.lines)
            self._block.start()

    @property
    def _has_block(self) -> bool:
        """Whether there is a terminal to draw in, and it is wanted."""
        return not self._is_plain and has_terminal(self.console)

    def _take(self, logs: dict[str, Any]) -> None:
        if "reward" in logs:  # of a training step
            self._rows.append(row_of(logs, has_critic=getattr(self._args, "has_critic", False)))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Show the newest metrics."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        step = f"step {state.global_step}"
        if self.is_verbose:
            self.console.print(f"{step}: " + "  ".join(f"{name} {value:.4g}" for name, value in numbers_of(logs)))
        if any(name.startswith("eval_") for name in logs):
            how = ""
            if hasattr(args, "sampling_params"):  # not those of another trainer
                num_attempts = args.num_generations_eval or args.num_generations
                how = f" ({describe_sampling(args.sampling_params(is_training=False), num_attempts, args)})"
            # Of several data sets each has its own: eval_hard_runtime, eval_hard_reward.
            prefix = next((name.removesuffix("runtime") for name in logs if name.endswith("_runtime")), "eval_")
            results = headline_of({name.removeprefix(prefix): value for name, value in logs.items()})
            name = prefix.removeprefix("eval_").rstrip("_")
            self.console.print(f"{step}, evaluation{f' of {name}' if name else ''}{how}: {results}")
            return
        if self._causes is None:  # outside a run
            return
        self._take({"step": state.global_step, **logs})
        if self._block is None:
            taught = {name: value for name, value in self._rows[-1].items() if name == TAUGHT} if self._rows else {}
            seconds = time.monotonic() - self._began
            self.console.print(f"{step}/{state.max_steps}, {seconds:.0f} s: {headline_of({**logs, **taught})}")
            for line in self._causes.lines(is_new=True):
                self.console.print(line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Leave the block as it stands."""
        self._enter("ended")
        self.stop()

    def stop(self) -> None:
        """End the display; also called after an error."""
        if self._block is not None:
            self._block.stop()
        if self._causes is not None:
            logging.getLogger("agent_r1_trl").removeHandler(self._causes)
        self._block = self._causes = None

    # ---------------------------------------------------------------- what it does now

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """A step begins; perhaps with a rollout."""
        self._enter("update" if self.trainer is not None else "step")  # the latter without our rollout

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """A micro-step of several has ended."""
        num = self._phase.partition("micro-step ")[2].partition(" ")[0]
        self._enter(f"update, micro-step {int(num or 1) + 1} of {args.gradient_accumulation_steps}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """The step is done."""
        self._step_ended = time.monotonic()
        if self._causes is not None:
            self._causes.step = state.global_step + 1

    @contextlib.contextmanager
    def around_rollout(self) -> Iterator[None]:
        """The sampler gets its weights first. An evaluation outside a run is shown as long as it samples."""
        is_training = self.trainer.model.training
        if not is_training and self._eval_batch is None:
            self._eval_batch = (1, 0)
        self._enter("weight sync")
        if is_training or self._causes is not None or not (self._has_block and is_main_process()):
            yield
            return
        block = LiveBlock(self.console, lambda width, height: [Text(self.status())])
        block.start()
        try:
            yield
        finally:
            block.stop(is_left=False)

    def weights_synced(self, policy: PreTrainedModel, position: Position) -> None:
        """Trajectories are sampled."""
        self._enter("rollout")

    def after_rollout(self, batch: RolloutBatch) -> bool:
        """They are scored: reward functions, reference, advantages."""
        self._enter("scoring")
        if self._causes is not None:
            self._causes.add_failures(batch.trajectories)
        return False

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """They are trained on."""
        self._enter("update")

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: object = None,
        **kw: object,
    ) -> None:
        """A batch of an evaluation is done."""
        num = len(eval_dataloader) if isinstance(eval_dataloader, Sized) else 0
        self._eval_batch = ((self._eval_batch or (1, 0))[0] + 1, num)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """The evaluation is done."""
        self._eval_batch = None

    def before_save(self, folder: str) -> None:
        """A checkpoint, or the model, is written."""
        self._enter("saving")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """The checkpoint is whole."""
        self._enter("update")

    def status(self) -> str:
        """The run's present activity, in words."""
        rollout, seconds = rollout_status(), time.monotonic() - self._phase_began
        lead = "rank 0: " if num_ranks() > 1 else ""
        if self._eval_batch is not None:
            batch, num = self._eval_batch
            lead += f"evaluation, batch {batch}{f' of {num}' if num else ''}: "
        if rollout is not None and self._phase in ("weight sync", "rollout"):
            return f"{lead}{'' if self._eval_batch else 'rollout '}{rollout}"
        ahead = f"; next rollout {rollout}" if rollout is not None else ""
        return f"{lead}{self._phase}{f', {seconds:.0f} s' if seconds >= 1.0 else ''}{ahead}"

    def lines(self, width: int, height: int) -> list[Text]:
        """The block, for a terminal of this size."""
        rows, causes = [*self._rows], self._causes.lines() if self._causes else []
        metrics, is_ascii = shown_metrics(rows, width), self.console.options.ascii_only
        num_rows = max(1, min(MAX_ROWS, height // 2 - 6 - len(causes)))
        now, done, total = time.monotonic(), self._state.global_step, self._state.max_steps
        seconds, idle_s = now - self._began, now - self._step_ended
        left_s = seconds_left(done - self._first_step, total - done, seconds, idle_s)
        return [
            *table(rows[-num_rows:], metrics),
            Text(),
            *sparks(rows, metrics, width, is_ascii=is_ascii),
            *causes,
            progress_line("step", done, total, seconds, left_s, width, is_ascii=is_ascii),
            Text(f"  {self.status()}"),
        ]
