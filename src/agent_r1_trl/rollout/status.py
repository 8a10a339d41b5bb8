"""What the rollouts of this process do at this moment: `rollout_status()`, for a terminal or a dashboard of your own.

It is read from the drafts when somebody asks, from any thread; a trajectory only looks at the clock when what it waits
for changes.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.rollout.draft import ENDED, NOT_STARTED, Draft
from agent_r1_trl.safe_text import shown

MAX_NAME_CHARS = 24
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
    """What trajectories wait for, in words -> how many of them, and the seconds of the one that has waited longest."""

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
    """What the rollouts of this process do now; None while there is none. Waits for tools come first."""
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
    """What a draft waits for.

    >>> [_words(phase) for phase in ("turn 2: tools search", "turn 0: generation", "reset", "waiting for try 2")]
    ['waiting for search', 'generating', 'waiting for reset', 'waiting for try 2']
    """
    what = re.sub(r"^turn \d+: (tools )?", "", phase)
    if what in _WORDS or what.startswith("waiting"):
        return _WORDS.get(what, what)
    names = " ".join(", ".join(dict.fromkeys(what.split(", "))).split())
    return f"waiting for {shown(names if len(names) <= MAX_NAME_CHARS else f'{names[: MAX_NAME_CHARS - 1]}…')}"
