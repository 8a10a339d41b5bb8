"""The progress of a run: a block of lines in a terminal, plain lines elsewhere.

step  reward  exact match  entropy  turns  failed  taught  s/step
  11   +0.52         0.76    0.034    3.1    0.0%     62%     3.3
  12   +0.72         0.86    0.040    3.2    0.0%     41%     3.4

reward       -0.38 ▁▂▅▄▅▄▆█ +0.72
exact match   0.31 ▁▂▅▄▅▄▆█ 0.86
entropy      0.034 ▆█▃▅▂▂▁▅ 0.051
step 13/65 ━━━━────────────── 18%  0:00:44  eta 0:03:12
  rollout 37 of 128 done, 3 waiting for search, longest 12 s
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.live import LiveBlock, has_terminal
from agent_r1_trl.rollout import describe_sampling, rollout_status
from agent_r1_trl.rollout.failures import count_causes, failure_of, without_numbers
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trajectory import ToolFault, Trajectory, own_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch, UpdateBatch
    from agent_r1_trl.update.entries import Inputs

TAUGHT = "taught"
"""Share of the groups that taught something: `group/taught_share`."""
WIDE = 76
"""Columns of a terminal below which the table has half of its columns."""
MAX_ROWS, MAX_SPARK, MAX_LABEL = 20, 64, 11
"""Bounds of a table's rows and of the characters of a sparkline and of the label of a number of the user's own."""


class Metric(NamedTuple):
    """A column of the table."""

    name: str
    label: str
    format: str
    is_wide: bool = False
    """Whether narrow terminals leave it out."""


INFO = "env/"
"""Beginning of the logged names of numbers in `Trajectory.info`."""
SCORES = ("env/em", "env/success", "sampling/pass_rate")
"""The first of these that is logged has a column."""
METRICS = (
    Metric("reward", "reward", "+.2f"),
    Metric("env/em", "exact match", ".2f"),
    Metric("env/success", "success", ".2f"),
    Metric("sampling/pass_rate", "pass rate", ".2f"),
    Metric("entropy", "entropy", ".3f"),
    Metric("rollout/turns", "turns", ".1f", True),
    Metric("tools/failure_share", "failed", ".1%", True),
    Metric(TAUGHT, "taught", ".0%", True),
    Metric("step_time", "s/step", ".1f", True),
)
NUM_SPARKS = 3
"""The first columns, of which there is a sparkline."""
BLUE = "color(32)"
BLOCKS, BLOCKS_ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"

Row = Mapping[str, float]
"""Metric -> value, and `step`."""
HEADLINE = {
    "reward": "reward",
    "sampling/pass_rate": "pass rate",
    "env/em": "exact match",
    "env/success": "success",
    "rollout/turns": "turns",
    "rollout/tool_calls": "calls",
    "tools/failure_share": "failed calls",
    TAUGHT: "taught",
    "entropy": "entropy",
    "filter/kept_share": "kept",
    "filter/skipped_steps": "skipped steps",
}
"""Logged metric -> its label on a plain line."""
NUM_LINES = 20
"""Approximate number of lines that a run prints where there is no terminal."""
MAX_HISTORY, MAX_CAUSES, NUM_CAUSES = 2000, 100, 3
"""Logs of which there are curves; causes of failures that are counted, and that have a line."""


class Causes(logging.Handler):
    """Warnings: each is printed when it comes for the first time, and counted from then on."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._found: dict[str, tuple[int, str, int, bool]] = {}
        """By cause: its count, its newest text, the step of that, and whether its first one was printed."""
        self._num_told: dict[str, int] = {}
        self.step = 0

    def add(self, text: str, num: int = 1, *, is_printed: bool = False) -> bool:
        """Count it, in one line; whether it is a new one."""
        text = shown(" ".join(text.split()))
        before = self._found.pop(key := without_numbers(text), (0, "", 0, False))
        if len(self._found) == MAX_CAUSES:
            del self._found[next(iter(self._found))]
        self._found[key] = (before[0] + num, text, self.step, is_printed)
        return not before[0]

    def add_failures(self, trajectories: list[Trajectory]) -> None:
        """Count the failures of a rollout that were not the policy's for certain."""
        for cause in count_causes(map(failure_of, trajectories)):
            self.add(f"{cause.stop_reason}: {cause.error}", cause.count)
        for result in (result for item in trajectories for result in item.tool_results):
            if result.fault not in (None, ToolFault.MODEL) and not result.is_infrastructure_failure:
                self.add(f"tool {result.call.name}, {result.error}: {result.cause}")

    def emit(self, record: logging.LogRecord) -> None:
        """Take in a warning of the package; where the user has set up logging, that prints it."""
        try:
            text = record.getMessage()
            if self.add(text, is_printed=True) and not logging.root.handlers:
                self._console.print(text, style="red" if record.levelno >= logging.ERROR else "yellow")
        except Exception:  # as handlers do: the terminal is gone, for example
            self.handleError(record)

    def lines(self, *, is_new: bool = False) -> list[Text]:
        """The newest causes, but for a warning that came only once; `is_new`: since the last such call."""
        found = [(key, *cause) for key, cause in [*self._found.items()] if cause[0] > 1 or not cause[3]]
        if is_new:
            found = [cause for cause in found if self._num_told.get(cause[0]) != cause[1]]
            self._num_told |= {key: num for key, num, *_ in found}
        return [
            Text(f"{num} x, last in step {step}: {text}", style="yellow")
            for _, num, text, step, _ in found[-NUM_CAUSES:]
        ]


class TrainingProgress(RolloutCallback):
    """Shows how a training goes on and what it does now, in the main process.

    Args:
        console: where.
        is_plain: lines only, also in a terminal.
        is_verbose: print every logged metric.
    """

    def __init__(self, console: Console | None = None, *, is_plain: bool = False, is_verbose: bool = False) -> None:
        self.console = console or PlainConsole()
        self._is_plain, self._is_verbose = is_plain or not has_terminal(self.console), is_verbose
        self._block: LiveBlock | None = None
        self._causes: Causes | None = None
        """Where the run is shown, and between its begin and its end."""
        self._rows: deque[dict[str, float]] = deque(maxlen=MAX_HISTORY)
        self._phase, self._phase_began = "starting", time.monotonic()
        self._eval_batch: tuple[int, int] | None = None
        """In an evaluation, the number of the batch and of all batches."""

    # ---------------------------------------------------------------- the run

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
        if not self._is_plain:
            self._block = LiveBlock(self.console, self.lines)
            self._block.start()

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
        if self._causes is None or not logs or "train_runtime" in logs:
            return
        step = f"step {state.global_step}"
        if self._is_verbose:
            self.console.print(f"{step}: " + "  ".join(f"{name} {value:.4g}" for name, value in _numbers(logs)))
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
        self._take({"step": state.global_step, **logs})
        every = max(1, state.max_steps // NUM_LINES)
        if self._is_plain and (state.global_step % every == 0 or state.global_step == 1):
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
        """The sampler gets its weights first."""
        if not self.trainer.model.training and self._eval_batch is None:
            self._eval_batch = (1, 0)
        self._enter("weight sync")
        yield

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
        lead = "rank 0: " if getattr(self._args, "world_size", 1) > 1 else ""
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


def _numbers(logs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in logs.items() if isinstance(value, int | float))


def headline_of(logs: dict[str, Any]) -> str:
    """The metrics of a plain line, as text."""
    known = {label: logs[name] for name, label in HEADLINE.items() if isinstance(logs.get(name), int | float)}
    own = {name: logs[INFO + name] for name in own_numbers(_names_of_info(logs))}
    return "  ".join(f"{label} {float(value):.3g}" for label, value in {**known, **own}.items())


def _names_of_info(logs: Mapping[str, Any]) -> Iterator[str]:
    """Names of the numbers that environments have put into `Trajectory.info`."""
    return (name.removeprefix(INFO) for name, _ in _numbers(logs) if name.startswith(INFO))


@contextlib.contextmanager
def trajectory_progress(console: Console, description: str, total: int) -> Iterator[Callable[[Any], None]]:
    """Shows an evaluation, trajectory by trajectory; yields the `on_trajectory` of `evaluate`."""
    solved: list[float] = []
    note, num_ended, began, ended = "", 0, time.monotonic(), time.monotonic()

    def advance(trajectory: Trajectory) -> None:
        nonlocal note, num_ended, ended
        num_ended, ended = num_ended + 1, time.monotonic()
        numbers = {} if trajectory.stop_reason.is_infrastructure_failure else trajectory.numbers
        name, label = ("em", "exact match") if "em" in numbers else ("success", "success")
        if name in numbers:
            solved.append(numbers[name])
            note = f"{label} {sum(solved) / len(solved):.3f}"

    def lines(width: int, height: int) -> list[Text]:
        now = time.monotonic()
        left_s = seconds_left(num_ended, total - num_ended, now - began, now - ended)
        is_ascii = console.options.ascii_only
        first = progress_line(description, num_ended, total, now - began, left_s, width, is_ascii=is_ascii)
        return [Text.assemble(first, f"  {note}"), Text(f"  rollout {rollout_status() or 'ended'}")]

    block = LiveBlock(console, lines) if has_terminal(console) else None
    if block is not None:
        block.start()
    try:
        yield advance
    except (KeyboardInterrupt, SystemExit):
        console.print(f"{description} interrupted: {num_ended} of {total} trajectories finished, no table is written")
        raise
    finally:
        if block is not None:
            block.stop()
    if block is None:
        console.print(f"{description}: {num_ended} trajectories in {time.monotonic() - began:.0f} s")


# ---------------------------------------------------------------- the lines, as functions of numbers alone


def row_of(logs: Mapping[str, Any], *, has_critic: bool = False) -> dict[str, float]:
    """The numbers of a log that are shown; with a critic, groups are not what teaches.

    >>> row_of({"reward": 0.5, "group/zero_variance_share": 0.25, "loss": 1.0, "epoch": 0.1})
    {'reward': 0.5, 'taught': 0.75}
    """
    flat = logs.get("group/zero_variance_share", logs.get("frac_reward_zero_std"))
    taught = logs.get("group/taught_share", None if flat is None else 1.0 - flat)  # runs of old have no share
    logs = logs if taught is None or has_critic else {**logs, TAUGHT: taught}
    own = [INFO + name for name in own_numbers(_names_of_info(logs))]
    names = ("step", *(metric.name for metric in METRICS), *own)
    return {name: float(logs[name]) for name in names if isinstance(logs.get(name), int | float)}


def shown_metrics(rows: Sequence[Row], width: int) -> list[Metric]:
    """The columns for these rows; `success` stands for a score before the first of them.

    Numbers of the user's own stand behind the score; a narrow terminal has the first of them alone.
    """
    own = own_numbers(dict.fromkeys(name for row in rows for name in _names_of_info(row)))
    of_user = [Metric(INFO + name, name[:MAX_LABEL], ".2f", index > 0) for index, name in enumerate(own)]
    behind = next(place for place, metric in enumerate(METRICS) if metric.name == "entropy")
    score = next((name for name in SCORES if any(name in row for row in rows)), None if rows else SCORES[1])
    is_flat = bool(rows) and not any(TAUGHT in row for row in rows)
    return [
        metric
        for metric in (*METRICS[:behind], *of_user, *METRICS[behind:])
        if (metric.name not in SCORES or metric.name == score)
        and not (metric.is_wide and width < WIDE)
        and not (metric.name == TAUGHT and is_flat)
    ]


def table(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Text]:
    """A header, and a line for each row."""
    cells = [["step", *(metric.label for metric in metrics)]]
    for row in rows:
        cells.append([f"{row.get('step', 0):.0f}", *(_cell(row.get(each.name), each) for each in metrics)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(line, widths, strict=True)) for line in cells]
    return [Text(line, style="" if index else "bold") for index, line in enumerate(lines)]


def _cell(value: float | None, metric: Metric) -> str:
    return "-" if value is None or math.isnan(value) else format(value, metric.format)


def sparks(rows: Sequence[Row], metrics: Sequence[Metric], width: int, *, is_ascii: bool = False) -> list[Text]:
    """A line for each of the first metrics: its name, the least value, the curve, the largest value."""
    lines = []
    for metric in metrics[:NUM_SPARKS]:
        values = [value for row in rows if math.isfinite(value := row.get(metric.name, math.nan))]
        least, most = (_cell(end(values) if values else None, metric) for end in (min, max))
        curve = sparkline(values, min(MAX_SPARK, width - 30), BLOCKS_ASCII if is_ascii else BLOCKS)
        lines.append(Text.assemble(f"{metric.label:<11} {least:>6} ", (curve, BLUE), f" {most}"))
    return lines


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """A curve of at most `width` characters, from the least value to the largest; a flat one is at half height.

    >>> sparkline([0, 1, 2, 3], 8), sparkline([0, 2, 4, 6], 2), sparkline([5, 5], 8), sparkline([], 8)
    ('▁▃▆█', '▂▇', '▅▅', '')
    """
    num = max(0, min(width, len(values)))
    means = [
        statistics.fmean(values[index * len(values) // num : (index + 1) * len(values) // num]) for index in range(num)
    ]
    least, spread = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    shares = [(mean - least) / spread if spread else 0.5 for mean in means]
    return "".join(levels[round(share * (len(levels) - 1))] for share in shares)


def progress_line(
    label: str, done: int, total: int, seconds: float, left_s: float | None, width: int, *, is_ascii: bool = False
) -> Text:
    """How far it has come, since when, and how long it will take (`left_s`, None if nobody knows)."""
    share, size = done / max(1, total), 24 if width >= 100 else 16 if width >= 60 else 8
    full, rest = "#-" if is_ascii else "━─"
    num = min(size, int(share * size))
    eta = "-:--:--" if left_s is None else _clock(left_s)
    return Text.assemble(
        f"{label} {done}/{total} ", (full * num, BLUE), (rest * (size - num), "dim"), f" {share:.0%}",
        f"  {_clock(seconds)}  eta {eta}",
    )  # fmt: skip


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def seconds_left(num_done: int, num_left: int, seconds: float, idle_s: float) -> float | None:
    """How long the rest will take at the mean pace so far; None before the first is done.

    Args:
        num_done: of this process, in `seconds`.
        num_left: what is to be done.
        seconds: since the beginning.
        idle_s: the part of them since the last one was done. No more than one can be in it: it may be an evaluation.

    >>> seconds_left(2, 8, 610.0, 10.0), seconds_left(2, 8, 2000.0, 1400.0), seconds_left(0, 10, 60.0, 60.0)
    (2390.0, 2100.0, None)
    """
    pace = (seconds - idle_s) / max(1, num_done)
    return max(0.0, pace * num_left - min(idle_s, pace)) if num_done else None
