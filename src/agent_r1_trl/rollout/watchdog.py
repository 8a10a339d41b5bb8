"""Says what a rollout waits for: a watchdog on a thread of its own, and `rollout_status()` to whoever asks.

Four things can hold up a rollout. A trajectory that waits for its tool, its environment or the sampler is named. A
call that holds the event loop (`time.sleep` in an async tool) stops every trajectory: it is named with its stack, and
after `stall_timeout` the loop is given up. A C call that keeps Python's global lock stops this thread as well; for it,
`faulthandler` prints all stacks and ends the process. A loop whose thread has ended is reported as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.rollout.draft import AGENT_START, ENDED, NOT_STARTED, WAITING_FOR_WEIGHTS, Draft
from agent_r1_trl.safe_text import shown

logger = logging.getLogger(__name__)

SLOW_INTERVALS = 12
"""How much less often a rollout is reported in which all wait for the sampler, or start: either takes long."""
MAX_NAMED, MAX_NAME_CHARS, MAX_STACK_LINES = 5, 200, 24
"""Bounds of a message: trajectories, characters of a name, lines of a stack."""
GRACE_S = 30.0
"""How much longer than the loop the whole interpreter may stand still: a busy machine is no reason to end."""


class LoopLostError(RunError):
    """The thread of the rollout's event loop ended while trajectories were in flight."""


class Watchdog:
    """Watches the drafts of one rollout and the event loop on which they grow.

    Args:
        drafts: gives those of the rollout; a second try has a new one.
        loop: the event loop.
        thread: of the loop.
        interval_s: without any progress, between two messages; None: no messages.
        stall_timeout_s: for which one call may hold the event loop, or the interpreter; None: no limit.
        give_up: called once, with the reason, from the watchdog's thread, when the loop will not go on.
    """

    def __init__(
        self,
        drafts: Callable[[], Sequence[Draft]],
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        *,
        interval_s: float | None,
        stall_timeout_s: float | None,
        give_up: Callable[[Exception], None],
    ) -> None:
        self._drafts = drafts
        self._loop = loop
        self._thread = thread
        self._give_up = give_up
        self._interval_s, self._stall_timeout_s = interval_s, stall_timeout_s
        self._tick_s = min(1.0, (interval_s or 4.0) / 4, (stall_timeout_s or 4.0) / 4)
        self.has_ended = threading.Event()
        """Set it when the rollout has ended."""
        self._asked_at: float | None = None
        """When the loop was asked to answer; None once it has."""
        self._said_at = self._moved_at = time.monotonic()
        self._seen = _progress(drafts())

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._postpone_exit()
            while not self.has_ended.wait(self._tick_s):
                self._postpone_exit()
                if self._has_given_up(time.monotonic()):
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _postpone_exit(self) -> None:
        """Have all stacks printed, and the process ended, if it takes too long until this is called again.

        `faulthandler` needs no Python to run. A process has one such timer: a rollout beside this one sets it anew.
        """
        if self._stall_timeout_s is not None and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # it is closed
                faulthandler.dump_traceback_later(self._stall_timeout_s + GRACE_S, exit=True, file=sys.__stderr__)

    def _has_given_up(self, now: float) -> bool:
        try:
            lost = self._lost(now)
            if lost is None:
                self._report(now)
                return False
            faulthandler.cancel_dump_traceback_later()  # closing may take longer than it waits
            self._give_up(lost)
            return True
        except Exception:  # a message is not worth a rollout
            logger.exception("The rollout's watchdog failed; it goes on.")
            return False

    def _lost(self, now: float) -> Exception | None:
        """Ask the loop to answer; why it must be given up, if its thread has ended or it has not answered for long."""
        if not self._thread.is_alive() or self._loop.is_closed():
            return LoopLostError(
                f"{which_process()}The rollout's event loop ended while trajectories were in flight. A tool or "
                f"environment has closed its file descriptors or ended its thread. {self._names()} Correct that tool."
            )
        if self._asked_at is None:
            self._asked_at = now
            with contextlib.suppress(RuntimeError):  # it is being closed: found at the next look
                self._loop.call_soon_threadsafe(setattr, self, "_asked_at", None)
        elif self._stall_timeout_s is not None and now - self._asked_at >= self._stall_timeout_s:
            held_by = self._holder()
            logger.error("%sThe event loop is given up: %s.\n%s", which_process(), held_by, _stack_of(self._thread))
            return TimeoutError(
                f"{which_process()}{held_by} held the event loop for longer than "
                f"stall_timeout={self._stall_timeout_s:g} s, so the rollout was given up. The stack is in the log"
            )
        return None

    def _report(self, now: float) -> None:
        seen = _progress(self._drafts())
        if seen != self._seen:
            self._seen = seen
            self._moved_at = now
            self._said_at = now
        asked_at = self._asked_at
        if self._interval_s is None or now - self._said_at < self._interval_s:
            return
        is_held = asked_at is not None and now - asked_at >= self._interval_s
        running = self._running()
        if not is_held and all(draft.phase.endswith(WAITING_FOR_WEIGHTS) for draft in running):
            return  # for the update, or for places that another rollout has
        slow = ("generation", WAITING_FOR_WEIGHTS, AGENT_START)
        is_slow = all(draft.phase.endswith(slow) for draft in running)
        if not is_held and is_slow and now - self._said_at < self._interval_s * SLOW_INTERVALS:
            return
        self._said_at = now
        if is_held:
            logger.warning(
                "%s%s has held the event loop for %.0f s, and every trajectory waits for it. Async code must await "
                "what takes long; make a tool that cannot a plain function, which runs on a thread. "
                "Stack of the loop:\n%s",
                which_process(),
                self._holder(),
                now - (asked_at or now),
                _stack_of(self._thread),
            )
        else:
            logger.warning(
                "%sNo trajectory has moved for %.0f s. %s The limits of a wait are rollout_timeout, reset_timeout, "
                "scoring_timeout and a tool's timeout_s.",
                which_process(),
                now - self._moved_at,
                self._names(),
            )

    def _running(self) -> list[Draft]:
        return [draft for draft in self._drafts() if draft.phase not in (NOT_STARTED, ENDED)]

    def _names(self) -> str:
        running = self._running()
        more = " ..." if len(running) > MAX_NAMED else "."
        return f"{len(running)} running: {'; '.join(_cut(draft.name) for draft in running[:MAX_NAMED])}{more}"

    def _holder(self) -> str:
        """The innermost call on the loop's thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "A call"
        return _cut(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})")


@contextlib.contextmanager
def reported(what: str, interval_s: float | None) -> Iterator[None]:
    """Say every `interval_s` seconds that `what`, which this thread does meanwhile, has not ended, with its stack."""
    thread = threading.current_thread()
    has_ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not has_ended.wait(interval_s):
            logger.warning(
                "%s%s for %.0f s. Stack:\n%s", which_process(), what, time.monotonic() - began, _stack_of(thread)
            )

    if interval_s is not None:
        threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def which_process() -> str:
    """`Rank 1 of 2: ` in a launch of several processes, as its launcher has written it into the environment; else "".

    Ranks wait for each other: the one whose rollout does not move is where to look.
    """
    rank, num_ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    return "" if rank is None or num_ranks == "1" else f"Rank {rank} of {num_ranks}: "


def _cut(name: str) -> str:
    """Names hold what the model and the data say, such as the tools of 100 calls or a question for an id."""
    return shown(name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]} ...")


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    lines = traceback.format_stack(frame) if frame is not None else []
    return "".join(lines[-MAX_STACK_LINES:]).rstrip()


def _progress(drafts: Sequence[Draft]) -> list[tuple[str, int]]:
    return [(draft.phase, len(draft.completion_ids)) for draft in drafts]


# -------------------------------------------------------------------- at this moment

MAX_TOOL_CHARS = 24
"""Characters of a tool's name that are shown: the model has written it."""
_WORDS = {"generation": "generating", "summary": "generating", "outcome_reward": "being scored"}
_in_flight: list[Callable[[], Sequence[Draft]]] = []


@dataclass(frozen=True, kw_only=True)
class RolloutStatus:
    """The trajectories of all rollouts in flight in this process.

    >>> waits = {"waiting for search": (3, 12.2), "generating": (60, 1.0)}
    >>> str(RolloutStatus(num_done=37, num_started=100, num_total=128, waits=waits))
    '37 of 128 done, 3 waiting for search, longest 12 s, 60 generating, 28 not started'
    """

    num_done: int
    num_started: int
    num_total: int
    waits: Mapping[str, tuple[int, float]]
    """Waits of trajectories, in words -> how many of them, and the seconds of the one that has waited longest."""

    def __str__(self) -> str:
        parts = [f"{self.num_done} of {self.num_total} done"]
        longest = max((seconds for _, seconds in self.waits.values()), default=0.0)
        for what, (num, seconds) in self.waits.items():
            parts.append(f"{num} {what}")
            if seconds == longest >= 1.0:
                parts.append(f"longest {seconds:.0f} s")
        if num := self.num_total - self.num_started:
            parts.append(f"{num} not started")
        return ", ".join(parts)


def publish(drafts: Callable[[], Sequence[Draft]]) -> Callable[[Any], None]:
    """A rollout has begun, of which this gives the drafts; to call the result, with anything, says that it is over."""
    _in_flight.append(drafts)
    return lambda _: _in_flight.remove(drafts)


def rollout_status() -> RolloutStatus | None:
    """Status of this process's rollouts; None while there is none. Waits for tools come first."""
    found = [draft for drafts in tuple(_in_flight) for draft in drafts()]
    if not found:
        return None
    now, began = time.monotonic(), defaultdict[str, list[float]](list)
    for draft in found:
        began[draft.phase].append(draft.since)
    num_done, num_waiting = (len(began.pop(phase, ())) for phase in (ENDED, NOT_STARTED))
    waits: dict[str, tuple[int, float]] = {}
    for phase, times in began.items():
        num, longest = waits.get(what := _words(phase), (0, 0.0))
        waits[what] = num + len(times), max(longest, now - min(times))
    return RolloutStatus(
        num_done=num_done,
        num_started=len(found) - num_waiting,
        num_total=len(found),
        waits=dict(sorted(waits.items(), key=lambda item: (item[0] in _WORDS.values(), -item[1][0]))),
    )


def _words(phase: str) -> str:
    """The wait of a draft.

    >>> [_words(phase) for phase in ("turn 2: tools search", "turn 0: generation", "reset", "waiting for try 2")]
    ['waiting for search', 'generating', 'waiting for reset', 'waiting for try 2']
    """
    what = re.sub(r"^turn \d+: (tools )?", "", phase)
    if what in _WORDS or what.startswith("waiting"):
        return _WORDS.get(what, what)
    names = " ".join(", ".join(dict.fromkeys(what.split(", "))).split())
    return f"waiting for {shown(names if len(names) <= MAX_TOOL_CHARS else f'{names[: MAX_TOOL_CHARS - 1]}…')}"
