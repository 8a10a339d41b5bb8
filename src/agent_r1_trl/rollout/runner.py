"""Many trajectories at once, each at its own pace.

Covered here: concurrency, the event loop's thread, the watchdog. Not covered: what happens inside a trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.generation.base import Generator, SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.trajectory import Trajectory

logger = logging.getLogger(__name__)


class Journal(Protocol):
    """Keeps a rollout on disk, and knows what a killed run has played of it; see `agent_r1_trl.journal`."""

    def finished(self, request: RolloutRequest) -> Trajectory | None:
        """A trajectory that has been played before."""

    def open(self, request: RolloutRequest, *parts: Any) -> tuple[Draft, EnvSession, Generator]:
        """What plays a trajectory: made of the environment's factory, `truncate` and the generator."""

    def end(self, request: RolloutRequest, trajectory: Trajectory) -> None:
        """A trajectory has been played."""


class RolloutRunner:
    """Plays trajectories concurrently; one that fails or hangs never disturbs another.

    Args:
        env_factory: makes a fresh environment; called once per trajectory.
        generator: samples turns.
        chat: the model's chat format.
        limits: of every trajectory.
        params: how tokens are drawn, unless `run` is told otherwise.
        watchdog_s: seconds without any progress after which a warning names what is being waited for.
        on_trajectory: called with each trajectory as it ends (from the event loop's thread).
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        generator: Generator,
        chat: ChatFormat,
        limits: RolloutLimits | None = None,
        params: SamplingParams | None = None,
        *,
        watchdog_s: float = 120.0,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.env_factory = env_factory
        self.generator = generator
        self.chat = chat
        self.limits = limits or RolloutLimits()
        self.params = params or SamplingParams()
        self.watchdog_s = watchdog_s
        self.on_trajectory = on_trajectory
        self.environments: list[Any] = []
        """The environments of the last run, in the order of its requests (None where none could be made)."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
    ) -> list[Trajectory]:
        """Play one trajectory per request and return them in the order of the requests.

        Works where a loop is already running (notebooks): the trajectories run on a thread of their own.

        Raises:
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
        """
        future = self.start(requests, params=params, journal=journal)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt as well: stop what is running
            future.cancel()
            raise

    def start(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
    ) -> Future[list[Trajectory]]:
        """`run` that returns at once; cancelling the future stops the trajectories."""
        running = self.run_async(requests, params=params, journal=journal)
        return asyncio.run_coroutine_threadsafe(running, self._event_loop())

    async def run_async(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
    ) -> list[Trajectory]:
        """`run` for a caller with an event loop of its own."""
        places = asyncio.Semaphore(self.limits.max_concurrency)
        players = [self._player(request, journal) for request in requests]
        drafts, sessions = [draft for draft, *_ in players], [session for _, session, _ in players]

        async def play(draft: Draft, session: EnvSession, generator: Generator) -> Trajectory:
            current_slot.set(TrajectorySlot())
            trajectory = None if journal is None else journal.finished(draft.request)
            if trajectory is None:
                async with places:
                    trajectory = await run_trajectory(
                        draft, session, generator, self.chat, self.limits, params or self.params
                    )
                if journal is not None:
                    journal.end(draft.request, trajectory)
            draft.phase = "ended"
            if self.on_trajectory is not None:
                self.on_trajectory(trajectory)
            return trajectory

        tasks = [asyncio.ensure_future(play(*player)) for player in players]
        watchdog = asyncio.ensure_future(self._watch(drafts))
        try:
            trajectories = await asyncio.gather(*tasks)
        finally:
            watchdog.cancel()
            for task in tasks:
                if not task.cancelling():  # a second time would interrupt its closing
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.environments = [session.env for session in sessions]
        return list(trajectories)

    def _player(self, request: RolloutRequest, journal: Journal | None) -> tuple[Draft, EnvSession, Generator]:
        if journal is not None:
            return journal.open(request, self.env_factory, self.chat.truncate, self.generator)
        session = EnvSession(self.env_factory, truncate=self.chat.truncate)
        return Draft(request=request), session, self.generator

    async def _watch(self, drafts: Sequence[Draft]) -> None:
        """Warn when nothing has moved for `watchdog_s`."""
        last, since = _progress(drafts), time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.watchdog_s / 2))
            now = _progress(drafts)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since >= self.watchdog_s:
                running = [draft for draft in drafts if draft.phase not in ("waiting", "ended")]
                names = "; ".join(
                    f"example {draft.request.example_id!r} generation {draft.request.generation}, {draft.phase}"
                    for draft in running[:5]
                )
                logger.warning(
                    "No trajectory has moved for %.0f s. %d running: %s.%s Set rollout_timeout or the tool's "
                    "timeout_s to bound the wait.",
                    time.monotonic() - since,
                    len(running),
                    names,
                    " ..." if len(running) > 5 else "",
                )
                since = time.monotonic()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_until_stopped, args=(self._loop,), name="rollout", daemon=True).start()
        return self._loop

    def close(self) -> None:
        """End the event loop's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _progress(drafts: Sequence[Draft]) -> list[tuple[str, int]]:
    return [(draft.phase, len(draft.completion_ids)) for draft in drafts]
