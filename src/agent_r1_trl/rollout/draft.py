"""A trajectory under construction: masks are made where the token is made."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.environments.data_files import short_tags
from agent_r1_trl.generation.base import Generation
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.trajectory import (
    USAGE,
    Author,
    Message,
    Segment,
    StopReason,
    ToolResult,
    Trajectory,
    Turn,
    extended_row,
)

NOT_STARTED, ENDED = "waiting", "ended"
"""The first and the last phase of a draft."""
WAITING_FOR_WEIGHTS = "waiting for weights"
"""The last words of the phase in which a turn waits for the end of an update, or of a weight sync."""
RESET, AGENT_START = "reset", "start of the agent"
"""The time before the first turn: an environment is made and reset, or an agent comes to its first call."""


@dataclass(kw_only=True)
class Draft:
    """Token lists that only grow."""

    request: RolloutRequest
    prompt_messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    action_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    authors: list[Author] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """The rows so far, once a context was rewritten: the ids of the context that opened each, which nobody changes and
    which therefore need no copy, and those that followed. The last segment says which row goes on."""
    num_dropped: int = 0
    """Tokens of observations that stand in no row's completion, because the context after them was rewritten."""
    phase: str = NOT_STARTED
    """The trajectory's present wait; watchdog and `rollout_status` report it."""
    since: float = field(default_factory=time.monotonic)
    """When that began, in seconds of `time.monotonic`."""
    error: str | None = None
    is_refused: bool = False
    """The back end refused the request and would refuse it again."""
    rendered: dict[str, str] = field(default_factory=dict)
    """The state after `reset`, for readers of the record."""
    usage: dict[str, int] | None = None
    """Token counts by the server, for a trajectory without ids (`hosted.py`); None for one with ids."""
    info: dict[str, Any] = field(default_factory=dict)
    """Notes of a user's own agent (`drive`)."""
    cancelled_in: str | None = None
    """The phase in which `rollout_timeout` passed."""
    time_limit: asyncio.Timeout | None = None
    """The clock of `rollout_timeout`, while it runs."""
    _num_paused: int = 0
    """Turns that wait for weights; an agent may have asked for several."""
    _phase_before: str = NOT_STARTED
    _left_s: float | None = None
    """Seconds that the clock has left, while it stands still."""
    _paused_at: float | None = None
    """When it was stopped, in seconds of `time.perf_counter`; None while it runs."""
    _waited_s: float = 0.0
    """Seconds of the pauses that are over."""

    def enter(self, phase: str) -> None:
        """From now on the trajectory waits for something else."""
        self.phase, self.since = phase, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside it a turn waits for weights: the clock of `rollout_timeout` stands still."""
        if self._num_paused == 0:
            self._stop_clock()
        self._num_paused += 1
        if not self.phase.endswith(WAITING_FOR_WEIGHTS):  # an agent's other calls have phases, too
            self._phase_before = self.phase
            self.enter(f"{self.phase.partition(':')[0]}: {WAITING_FOR_WEIGHTS}")
        try:
            yield
        finally:
            self._num_paused -= 1
            if self._num_paused == 0:
                self._start_clock()

    def _stop_clock(self) -> None:
        self._paused_at, self._left_s = time.perf_counter(), None
        limit = self.time_limit
        # One that has passed cannot be moved: an agent may ask for a last turn while it is being ended.
        if limit is not None and not limit.expired() and (deadline := limit.when()) is not None:
            self._left_s = deadline - asyncio.get_running_loop().time()
            limit.reschedule(None)

    def _start_clock(self) -> None:
        self._waited_s, self._paused_at = self.waited_s, None
        if self.phase.endswith(WAITING_FOR_WEIGHTS):
            self.enter(self._phase_before)
        if self.time_limit is not None and self._left_s is not None:
            self.time_limit.reschedule(asyncio.get_running_loop().time() + self._left_s)

    @property
    def waited_s(self) -> float:
        """Seconds that the trajectory has waited for weights: they count for none of its times."""
        now = time.perf_counter()
        return self._waited_s + (0.0 if self._paused_at is None else now - self._paused_at)

    @property
    def name(self) -> str:
        """The trajectory, and what it is waiting for."""
        return f"example {self.request.example_id!r} generation {self.request.generation}, {self.phase}"

    @property
    def _row(self) -> tuple[list[int], list[int]]:
        """The row that goes on."""
        return self.rows[self.segments[-1].row] if self.rows else (self.prompt_ids, self.completion_ids)

    @property
    def context_ids(self) -> list[int]:
        """Everything that the next turn is sampled after."""
        opened, rest = self._row
        return opened + rest if rest else opened

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the context that do not count as the trajectory's, and those of the trajectory after its prompt.

        Without rewritten contexts these are the prompt and the completion.
        """
        num_spent = len(self.completion_ids) + self.num_dropped
        return sum(map(len, self._row)) - num_spent, num_spent

    def add_turn(self, generation: Generation, message: Message, *, generate_s: float) -> Turn:
        """Append what the policy sampled: the only tokens with mask 1."""
        start, count = len(self.completion_ids), len(generation.token_ids)
        self._add(generation.token_ids, generation.logprobs, [Author.POLICY] * count, turn_id=len(self.turns))
        turn = Turn(
            start=start, end=start + count, message=message, generate_s=generate_s, kept_ids=generation.kept_ids
        )
        turn.versions = list(generation.versions)
        turn.is_truncated = generation.stop == "length"
        self.turns.append(turn)
        return turn

    def add_context(self, ids: Sequence[int], authors: Sequence[Author]) -> None:
        """Append what the template or the environment wrote."""
        self._add(ids, [0.0] * len(ids), authors, turn_id=-1)

    def rewrite_context(
        self,
        ids: list[int],
        delta: Sequence[int],
        authors: Sequence[Author],
        *,
        num_same: int = 0,
        opens_row: bool = False,
        room: int | None = None,
    ) -> bool:
        """Let the next turn be sampled after `ids`, in the row that they extend or in a new one.

        Args:
            ids: the context; nobody may change it afterwards.
            delta: what follows the last turn if nothing is rewritten, as a rule the new tokens of a row that goes on.
            authors: of `delta`.
            num_same: ids of the last turn's context that stand before `ids`.
            opens_row: whether they open a new one in any case.
            room: tokens that the trajectory may still hold, the next turn included; None: no limit.

        Returns:
            Whether there is room to go on; if not, nothing has changed.
        """
        rows = self.rows or [(self.prompt_ids, self.completion_ids)]
        current = self.segments[-1].row if self.segments else 0
        opened, said = rows[current]
        num_said = num_same - len(opened)
        tail = said[num_said:] if num_said >= 0 else opened[num_same:] + said
        row: int | None = 0
        if len(rows) == 1 and not opens_row and ids[: len(tail)] == tail:  # without a look at a long context
            rest = ids[len(tail) :]
        else:
            whole = opened[:num_same]
            whole += said[: max(0, num_said)]
            whole += ids
            ids, row = whole, None if opens_row else extended_row(rows, whole)
            rest = [] if row is None else ids[sum(map(len, rows[row])) :]
        if room is not None and max(len(authors), len(rest)) >= room:
            return False
        self.num_dropped += max(0, len(authors) - len(rest))
        start = len(self.completion_ids)
        if row is None:
            self.rows = [*(self.rows or [(self.prompt_ids, list(self.completion_ids))]), (ids, [])]
            self.segments.append(Segment(start=start, row=len(rows), prompt_ids=ids))
            return True
        if row != current:
            self.segments.append(Segment(start=start, row=row))
        self.add_context(rest, authors_of(rest, delta, authors))
        return True

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], authors: Sequence[Author], *, turn_id: int) -> None:
        self.completion_ids += ids
        self.logprobs += logprobs
        self.action_mask += [int(turn_id >= 0)] * len(ids)
        self.turn_ids += [turn_id] * len(ids)
        self.authors += authors
        if self.rows:
            self._row[1].extend(ids)

    def finish(self, stop_reason: StopReason, *, duration_s: float) -> Trajectory:
        """The trajectory as it stands."""
        same = ("prompt_messages", "prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "authors")
        segments = [item for item in self.segments if item.start < len(self.completion_ids)]
        is_open = len(segments) < len(self.segments)  # the context after the last token is another row's
        return Trajectory(
            **{name: getattr(self, name) for name in same},
            turns=self.turns,
            segments=segments,
            open_context=self.context_ids if is_open and stop_reason.is_truncated else None,
            stop_reason=stop_reason,
            example_id=self.request.example_id,
            tags=short_tags(self.request.example),
            generation=self.request.generation,
            seed=self.request.seed,
            error=self.error,
            rendered=self.rendered,
            info=self.info if self.usage is None else {USAGE: dict(self.usage)},
            duration_s=duration_s,
        )


def authors_of(ids: Sequence[int], known: Sequence[int], authors: Sequence[Author]) -> list[Author]:
    """Authors of ids that differ little from those whose authors are known.

    What both begin and end with has the same authors. Between that, everything is the environment's if anything is, or
    if nothing is known.

    >>> of_delta = [Author.TEMPLATE, Author.ENVIRONMENT, Author.TEMPLATE]
    >>> [author.value[0] for author in authors_of([7, 1, 2, 9], [1, 2, 9], of_delta)]
    ['t', 't', 'e', 't']
    """
    shorter = min(len(ids), len(known))
    num_first = 0  # that both begin with
    while num_first < shorter and ids[num_first] == known[num_first]:
        num_first += 1
    num_last = 0  # that both end with
    while num_last < shorter - num_first and ids[-1 - num_last] == known[-1 - num_last]:
        num_last += 1
    end = len(known) - num_last
    is_heard = not authors or Author.ENVIRONMENT in authors[num_first:end]
    author = Author.ENVIRONMENT if is_heard else Author.TEMPLATE
    between = [author] * (len(ids) - num_first - num_last)
    return [*authors[:num_first], *between, *authors[end:]]


def record_step(turn: Turn, reward: float, info: dict[str, Any], *, env_s: float) -> None:
    """Write what the environment said about a turn into the turn."""
    turn.reward = reward
    turn.env_s = env_s
    results = info.get("tool_results") or []
    turn.tool_results = [result for result in results if isinstance(result, ToolResult)]
    turn.reward_parts = {str(name): float(value) for name, value in (info.get("reward_parts") or {}).items()}
    turn.is_invalid = bool(info.get("is_invalid", bool(turn.message.get("malformed_tool_call"))))
