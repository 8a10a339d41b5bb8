"""Progress bars in a terminal, and plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback

from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.rollout import describe_sampling

HEADLINE = {
    "reward": "reward",
    "sampling/pass_rate": "pass rate",
    "env/em": "exact match",
    "env/success": "success",
    "rollout/turns": "turns",
    "rollout/tool_calls": "calls",
    "tools/failure_share": "failed calls",
    "entropy": "entropy",
    "filter/kept_share": "kept",
    "filter/skipped_steps": "skipped steps",
}
"""Logged metric -> its label beside the bar."""
NUM_LINES = 20
"""Approximate number of lines that a run prints where there is no terminal."""


class TrainingProgress(TrainerCallback):
    """A bar for training, with the metrics that tell whether the agent learns."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or PlainConsole()
        self._progress: Progress | None = None
        self._training: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar, in the main process only."""
        if state.is_world_process_zero:
            self.stop()  # the bar of what a rollback has undone
            self._progress = make_progress(self.console)
            self._progress.start()
            done, total = state.global_step, state.max_steps
            self._training = self._progress.add_task("training", total=total, completed=done, note="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        if self._progress is not None:
            self._progress.update(self._training, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the newest metrics beside the bar."""
        if self._progress is None or not logs or "train_runtime" in logs:
            return
        headline = headline_of({name.removeprefix("eval_"): value for name, value in logs.items()})
        if any(name.startswith("eval_") for name in logs):
            how = ""
            if hasattr(args, "sampling_params"):  # not those of another trainer
                num_attempts = args.num_generations_eval or args.num_generations
                how = f" ({describe_sampling(args.sampling_params(is_training=False), num_attempts, args)})"
            self.console.print(f"step {state.global_step}, evaluation{how}: {headline}")
            return
        self._progress.update(self._training, note=headline)
        every = max(1, state.max_steps // NUM_LINES)
        if not self.console.is_terminal and (state.global_step % every == 0 or state.global_step == 1):
            seconds = self._progress.tasks[0].elapsed or 0.0
            self.console.print(f"step {state.global_step}/{state.max_steps}, {seconds:.0f} s: {headline}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        self.stop()

    def stop(self) -> None:
        """End the display; also called after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def headline_of(logs: dict[str, Any]) -> str:
    """The metrics beside the bar, as text."""
    known = {label: logs[name] for name, label in HEADLINE.items() if isinstance(logs.get(name), int | float)}
    return "  ".join(f"{label} {float(value):.3g}" for label, value in known.items())


def make_progress(console: Console) -> Progress:
    """Bars with the columns that all commands share; a narrow terminal cuts the note and nothing else."""
    note = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24 if console.width >= 100 else 8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False, table_column=note),
        console=console,
        expand=True,  # gives the note what the other columns leave
        speed_estimate_period=24 * 3600,  # by default 30 s, within which a step of a large model may not end
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def trajectory_progress(console: Console, description: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A bar that advances with every finished trajectory; yields the `on_trajectory` of `evaluate`."""
    solved: list[float] = []
    with make_progress(console) as progress:
        bar = progress.add_task(description, total=total, note="")

        def advance(trajectory: Any) -> None:
            name, label = ("em", "exact match") if "em" in trajectory.info else ("success", "success")
            score = trajectory.info.get(name)
            solved.append(float(score) if isinstance(score, int | float) else 0.0)
            note = f"{label} {sum(solved) / len(solved):.3f}" if score is not None else ""
            progress.update(bar, advance=1, note=note)

        try:
            yield advance
        except (KeyboardInterrupt, SystemExit):
            num = len(solved)
            console.print(f"{description} interrupted: {num} of {total} trajectories finished, no table is written")
            raise
    if not console.is_terminal:
        console.print(f"{description}: {len(solved)} trajectories in {progress.tasks[bar].elapsed:.0f} s")
