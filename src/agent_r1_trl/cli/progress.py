"""The progress of an evaluation: two lines in a terminal, one at its end elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_r1_trl.display.lines import progress_line, seconds_left
from agent_r1_trl.display.live import LiveBlock, has_terminal
from agent_r1_trl.rollout import rollout_status
from agent_r1_trl.trajectory import Trajectory


@contextlib.contextmanager
def trajectory_progress(console: Console, description: str, total: int) -> Iterator[Callable[[Any], None]]:
    """Shows an evaluation, trajectory by trajectory; yields the `on_trajectory` of `evaluate`."""
    solved: list[float] = []
    note = ""
    num_ended = 0
    began = time.monotonic()
    ended = time.monotonic()

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
