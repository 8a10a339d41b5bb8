"""A circuit breaker for tools: no update is made from a rollout in which a tool was down.

1. The calls of each rollout are counted per tool, on all ranks. Calls that failed by the model's own mistake (unknown
   tool, unreadable or wrong arguments, a tool's `user_errors`) are left out.
2. A tool is suspected if the share of its calls that failed has risen above that of its past by more than
   `outages.max_failure_rise`, and by more than chance explains.
3. A suspected tool is asked: calls that had succeeded are made again, in fresh environments. If most fail, the tool is
   down. If none ever succeeded, the run ends at once if all failed for reasons that wrong arguments do not explain.
4. While a tool is down the run waits and asks again, for at most `max_wait` seconds. When the tool answers, the
   rollout is sampled anew, and so is what was in flight; if it does not, the run ends with `ToolOutageError`.

Not covered: environments that fail without a tool (`failures.py`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from accelerate.utils import gather_object

from agent_r1_trl.rollout.failures import NothingRolledOutError
from agent_r1_trl.rollout.probe import PROBE_TIMEOUT_S, RecordedCall, recorded_calls, succeeds
from agent_r1_trl.rollout.processes import marked_processes
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.rollout.runner import STOP_TIMEOUT_S
from agent_r1_trl.safe_text import shown
from agent_r1_trl.trainers.callbacks import RolloutCallback, is_main_process
from agent_r1_trl.trainers.rollout_batch import RolloutBatch
from agent_r1_trl.trajectory import StopReason, ToolFault, Trajectory

logger = logging.getLogger(__name__)

PAST_ROLLOUTS = 50
"""Rollouts that a tool's past holds."""
NUM_RECORDED = 3
"""Calls that are kept of each tool."""
NUM_ANSWERS = 5
"""Calls that decide whether a tool is down; asking ends when most of them agree."""
MAX_WAIT_S = 60.0
"""Seconds between two questions at most."""
ASK_TIMEOUT_S = PROBE_TIMEOUT_S + STOP_TIMEOUT_S
"""Seconds after which a tool that is asked, and holds the event loop, is left alone."""
MIN_EVIDENCE = math.log(1e4)
"""A rise that chance explains with a probability above 1e-4 is none."""

_NOT_DOWN = (
    "If the tool answers wrong arguments in this way, declare its exceptions with @tool(user_errors=...); "
    "outages.max_failure_rise=1.0 switches this check off."
)


class ToolOutageError(NothingRolledOutError):
    """A tool was down for longer than `outages.max_wait`."""


@dataclass(kw_only=True, frozen=True)
class Calls:
    """The calls of one tool that were no mistake of the model."""

    num: int = 0
    num_failed: int = 0
    num_suspect: int = 0
    """Failures that wrong arguments do not explain: timeouts, lost connections, missing resources."""
    first_cause: str = ""

    def __add__(self, other: Calls) -> Calls:
        return Calls(
            num=self.num + other.num,
            num_failed=self.num_failed + other.num_failed,
            num_suspect=self.num_suspect + other.num_suspect,
            first_cause=self.first_cause or other.first_cause,
        )

    def __str__(self) -> str:
        return f"{self.num_failed} of its last {self.num} calls failed, first with: {self.first_cause}"


def count_calls(trajectories: Sequence[Trajectory]) -> dict[str, Calls]:
    """The calls of each tool."""
    counts: dict[str, Calls] = {}
    for trajectory in trajectories:
        for result in trajectory.tool_results:
            if result.fault is ToolFault.MODEL:
                continue
            is_suspect = result.fault is ToolFault.TOOL
            cause = f"{shown(result.cause)} (first in example {trajectory.example_id!r})" if result.is_error else ""
            one = Calls(num=1, num_failed=result.is_error, num_suspect=is_suspect, first_cause=cause)
            counts[result.call.name] = counts.get(result.call.name, Calls()) + one
        has_ended_so = trajectory.stop_reason is StopReason.TOOL_FAILURE and bool(trajectory.turns)
        has_raised = has_ended_so and not trajectory.turns[-1].tool_results
        if has_raised and "agent_error" not in trajectory.info:  # an agent's says nothing of a call
            for call in trajectory.turns[-1].message.get("tool_calls") or ():  # `step` itself raised
                name = str(call.get("function", {}).get("name"))
                one = Calls(num=1, num_failed=1, num_suspect=1, first_cause=shown(trajectory.error or ""))
                counts[name] = counts.get(name, Calls()) + one
    return counts


class ToolWatch(RolloutCallback):
    """Judges each rollout of training; all ranks come to the same verdict.

    Args:
        max_rise: how much the share of failed calls may rise above that of the tool's past; 1.0 disables the check.
        min_calls: calls that are judged at least.
        max_wait_s: seconds that the run waits for a tool.
    """

    name = "tools"

    def __init__(self, max_rise: float, min_calls: int, max_wait_s: float) -> None:
        self.max_rise = max_rise
        self.min_calls = min_calls
        self.max_wait_s = max_wait_s
        self.metrics: dict[str, float] = {}
        """Metrics of the last rollout that was judged."""
        self._past: dict[str, deque[Calls]] = {}
        self._succeeded: dict[str, list[RecordedCall]] = {}
        self._on_void: Callable[[], Any] = lambda: None
        """Called before a wait, which a run may not survive, when the rollout must not be used."""
        self._on_outage: Callable[[], Any] = lambda: None
        """Called before a wait, too: the rollouts in flight hold calls of the tool that is down."""
        self._warned_of: set[str] = set()
        self.begin_run()

    def begin_run(self) -> None:
        """Wait as long as ever, whatever an earlier run has waited; what is known of the tools stays."""
        self._num_replays, self._waited_s = 0, 0.0
        self._has_recovered = False
        """Whether the rollout is already the second one in which a tool failed that works when it is asked."""

    def after_rollout(self, batch: RolloutBatch) -> bool:
        """Judge a rollout of training."""
        if self.trainer.features.replaces_sampling or not batch.position.is_training:
            return False
        self._on_void = partial(self.trainer.features.call, "void", batch.position)
        self._on_outage = partial(self.trainer.rollouts.ahead.begin_again, batch.position)
        if self.has_outage(batch.trajectories, batch.requests):
            return True
        batch.metrics |= self.metrics
        return False

    def ask(self, call: RecordedCall) -> bool:
        """Make a recorded call again; whether it succeeded."""
        rollouts = self.trainer.rollouts
        if rollouts.is_cancelled.is_set():
            return False
        with marked_processes():
            asked = succeeds(call, rollouts.env_factory, rollouts.chat.truncate)
            return rollouts.runner.wait_for(asked, ASK_TIMEOUT_S, rollouts.is_cancelled) is True

    def sleep(self, seconds: float) -> bool:
        """Wait, or less and return True if the run is told to end."""
        is_cancelled: bool = self.trainer.rollouts.is_cancelled.wait(seconds)
        return is_cancelled

    def has_outage(self, trajectories: Sequence[Trajectory], requests: Sequence[RolloutRequest]) -> bool:
        """Judge a rollout, and wait for tools that are down. All ranks must call it, with their own trajectories.

        Returns:
            Whether the rollout must be sampled anew; the tools work again.

        Raises:
            ToolOutageError: a tool did not come back in time.
        """
        counts: dict[str, Calls] = {}
        for name, calls in gather_object([*count_calls(trajectories).items()]):
            counts[name] = counts.get(name, Calls()) + calls
        newest = recorded_calls(trajectories, requests, that_failed=False, limit=NUM_RECORDED)
        failed = recorded_calls(trajectories, requests, that_failed=True, limit=NUM_RECORDED)
        is_void = False
        for name in sorted(counts):
            if self._is_suspected(name, counts[name], "num_failed"):
                is_void |= self._examine(name, counts[name], newest.get(name, []), failed.get(name, []))
        if is_void:
            self._on_void()
            self._num_replays += 1
            return True
        self.metrics = {"tools/replayed_rollouts": float(self._num_replays), "time/outage_s": self._waited_s}
        self.begin_run()
        for name, calls in counts.items():
            self.metrics[f"tools/{name}/failure_share"] = calls.num_failed / calls.num
            self._past.setdefault(name, deque(maxlen=PAST_ROLLOUTS)).append(calls)
        self._succeeded |= newest
        return False

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> str:
        """Facts about the tools on this rank, as text; calls of rows that JSON does not hold are excluded."""
        past = {name: [asdict(calls) for calls in tallies] for name, tallies in self._past.items()}
        succeeded = {}
        for name, calls in self._succeeded.items():
            texts = [call.to_json() for call in calls]
            succeeded[name] = [text for text in texts if text]
        return json.dumps({"past": past, "succeeded": succeeded})

    def load_state_dict(self, state: str) -> None:
        """Judge with what `state_dict` gave, as if the run had not been interrupted."""
        record = json.loads(state)
        self._past = {
            name: deque((Calls(**calls) for calls in tallies), maxlen=PAST_ROLLOUTS)
            for name, tallies in record["past"].items()
        }
        self._succeeded = {
            name: [RecordedCall.from_json(call) for call in calls] for name, calls in record["succeeded"].items()
        }

    # ---------------------------------------------------------------- inside

    def _window(self, name: str, current: Calls) -> tuple[Calls, Calls]:
        """The calls that are judged, at least `min_calls` if there are as many, and those before them."""
        past = list(self._past.get(name, ()))
        while past and current.num < self.min_calls:
            current = current + past.pop()
        return current, sum(past, Calls())

    def _is_suspected(self, name: str, current: Calls, kind: str) -> bool:
        window, past = self._window(name, current)
        share = getattr(window, kind) / window.num
        before = getattr(past, kind) / max(1, past.num)
        if window.num < self.min_calls or share - before <= self.max_rise:
            return False
        expected = (getattr(past, kind) + 0.5) / (past.num + 10)  # without a past, 1 of 20
        return window.num * _divergence(share, expected) > MIN_EVIDENCE

    def _examine(self, name: str, current: Calls, newest: list[RecordedCall], failed: list[RecordedCall]) -> bool:
        """Ask a suspected tool; whether the rollout is void."""
        window, past = self._window(name, current)
        succeeded = [*self._succeeded.get(name, []), *newest][:NUM_RECORDED]
        answer, is_suspect = self._answer(succeeded), window.num_suspect == window.num
        # It may have worked once, though no call of then is known any more.
        if answer is False or (answer is None and is_suspect and past.num_failed < past.num):
            self._wait(name, window, past, failed if answer is None else succeeded)
            return True
        if answer is None and is_suspect:
            self._on_void()
            self._on_outage()
            raise ToolOutageError(
                f"The tool {name!r} has never worked: {window}. Nothing was trained on. Try the tool by hand, start "
                f"what it needs, or raise its timeout (@tool(timeout_s=...)) if it is only slow. {_NOT_DOWN}"
            )
        if answer and self._is_suspected(name, current, "num_suspect") and not self._has_recovered:
            self._has_recovered = True
            return True
        cause = (
            "none has ever succeeded, so wrong arguments may cause this. Try the tool by hand."
            if answer is None
            else "calls that succeeded before still succeed, so this is taken for the model's doing."
        )
        if name not in self._warned_of and is_main_process():
            logger.warning("Tool %r: %s. The run goes on: %s Reported once for each tool.", name, window, cause)
        self._warned_of.add(name)
        return False

    def _answer(self, calls: Sequence[RecordedCall], num: int = NUM_ANSWERS) -> bool | None:
        """Whether most calls succeed, asked on all ranks; None if there is no call to make."""
        answers: list[bool] = []
        for call in itertools.islice(itertools.cycle(calls), num):
            answers.append(self.ask(call))
            if max(answers.count(True), answers.count(False)) > num // 2:
                break
        answers = gather_object(answers)
        return 2 * sum(answers) > len(answers) if answers else None

    def _wait(self, name: str, window: Calls, past: Calls, calls: Sequence[RecordedCall]) -> None:
        """Return when the tool answers.

        Raises:
            ToolOutageError: it does not.
        """
        self._has_recovered = False
        self._on_void()
        self._on_outage()
        for attempt in itertools.count(self._num_replays):
            wait_s = min(MAX_WAIT_S, 2.0**attempt, self.max_wait_s - self._waited_s)
            if wait_s <= 0:
                waited = f"{self._waited_s:.0f} s (outages.max_wait={self.max_wait_s:g})"
                raise ToolOutageError(
                    f"The tool {name!r} is down: {window} ({past.num_failed} of {past.num} before). It was asked "
                    f"again for {waited}, and nothing was trained on meanwhile. Restore what the tool needs, and "
                    f"resume the run from its last checkpoint. {_NOT_DOWN}"
                )
            if is_main_process():
                logger.warning("The run waits %.0f s: the tool %r is down. %s.", wait_s, name, window)
            start = time.monotonic()
            if any(gather_object([bool(self.sleep(wait_s))])):
                return  # the rollout that follows is cancelled
            answer = self._answer(calls, num=1) and self._answer(calls)
            # Of all ranks the longest, so that all give up together.
            self._waited_s += max(wait_s, *gather_object([time.monotonic() - start]))
            if answer is not False:  # None: there is no call to make, so the next rollout shows it
                return


def _divergence(share: float, expected: float) -> float:
    """Kullback-Leibler divergence of two coins, in nats.

    exp(-n * divergence) bounds the probability that n throws of the second coin show such a share (Chernoff).
    """
    parts: list[Any] = [(share, expected), (1 - share, 1 - expected)]
    return sum(p * math.log(p / q) for p, q in parts if p > 0)
