"""The causes of failures and warnings of a run: each is shown once, and counted from then on."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.text import Text

from agent_r1_trl.rollout.failures import count_causes, failure_of, without_numbers
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trajectory import ToolFault, Trajectory

MAX_CAUSES, NUM_CAUSES = 100, 3
"""Causes that are counted, and that have a line."""


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
