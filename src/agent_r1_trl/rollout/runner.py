"""Many trajectories at once, each at its own pace.

Covered here: concurrency, the event loop's thread, the watchdog. Not covered: what happens inside a trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.generation.base import Generator, SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.rollout.failures import MAX_CAUSES, FailureCause, failure_of
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.trajectory import StopReason, Trajectory

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.5
"""Seconds before a failed trajectory is played for the second time; doubled before each further try."""


class RolloutRunner:
    """Plays trajectories concurrently; one that fails or hangs never disturbs another.

    Args:
        env_factory: makes a fresh environment; called once per trajectory.
        generator: samples turns.
        chat: the model's chat format.
        limits: of every trajectory.
        params: how tokens are drawn, unless `run` is told otherwise.
        retry_failed: how often a trajectory that failed for no fault of the policy is played again.
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
        retry_failed: int = 0,
        watchdog_s: float = 120.0,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.env_factory = env_factory
        self.generator = generator
        self.chat = chat
        self.limits = limits or RolloutLimits()
        self.params = params or SamplingParams()
        self.retry_failed = retry_failed
        self.watchdog_s = watchdog_s
        self.on_trajectory = on_trajectory
        self.environments: list[Any] = []
        """The environments of the last run, in the order of its requests (None where none could be made)."""
        self._retried: set[str] = set()
        """Causes of failures that were reported."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, requests: Sequence[RolloutRequest], *, params: SamplingParams | None = None) -> list[Trajectory]:
        """Play one trajectory per request and return them in the order of the requests.

        Works where a loop is already running (notebooks): the trajectories run on a thread of their own.

        Raises:
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
        """
        future = self.start(requests, params=params)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt as well: stop what is running
            future.cancel()
            raise

    def start(
        self, requests: Sequence[RolloutRequest], *, params: SamplingParams | None = None
    ) -> Future[list[Trajectory]]:
        """`run` that returns at once; cancelling the future stops the trajectories."""
        return asyncio.run_coroutine_threadsafe(self.run_async(requests, params=params), self._event_loop())

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs where the trajectories run."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._event_loop()).result()

    async def run_async(
        self, requests: Sequence[RolloutRequest], *, params: SamplingParams | None = None
    ) -> list[Trajectory]:
        """`run` for a caller with an event loop of its own."""
        places = asyncio.Semaphore(self.limits.max_concurrency)
        drafts = [Draft(request=request) for request in requests]
        sessions = [EnvSession(self.env_factory, truncate=self.chat.truncate) for _ in requests]

        async def play(index: int) -> Trajectory:
            failed: list[str] = []
            async with places:
                while True:
                    current_slot.set(TrajectorySlot())
                    draft, session = drafts[index], sessions[index]
                    trajectory = await run_trajectory(
                        draft, session, self.generator, self.chat, self.limits, params or self.params
                    )
                    cause = failure_of(trajectory)
                    if cause is None or len(failed) == self.retry_failed or not may_pass(trajectory):
                        break
                    failed.append(f"{cause.stop_reason}: {cause.error}")
                    self._warn_of_retry(cause)
                    draft.phase = f"waiting for try {len(failed) + 1}"
                    await asyncio.sleep(RETRY_WAIT_S * 2 ** (len(failed) - 1))
                    drafts[index] = Draft(request=replace(draft.request, attempt=len(failed)))
                    sessions[index] = EnvSession(self.env_factory, truncate=self.chat.truncate)
            draft.phase, trajectory.failed_tries = "ended", failed
            if self.on_trajectory is not None:
                self.on_trajectory(trajectory)
            return trajectory

        tasks = [asyncio.ensure_future(play(index)) for index in range(len(requests))]
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

    def _warn_of_retry(self, cause: FailureCause) -> None:
        if cause.key not in self._retried and len(self._retried) < MAX_CAUSES:
            self._retried.add(cause.key)
            logger.warning(
                "A trajectory failed and is played again (retry_failed=%d): %s. This cause is reported once; "
                "rollout/tries counts on.",
                self.retry_failed,
                cause,
            )

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


def may_pass(trajectory: Trajectory) -> bool:
    """Whether the trajectory failed for no fault of the policy, of something that may be over at the next try."""
    reason = trajectory.stop_reason
    return reason.is_infrastructure_failure and reason is not StopReason.PROMPT_TOO_LONG


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _progress(drafts: Sequence[Draft]) -> list[tuple[str, int]]:
    return [(draft.phase, len(draft.completion_ids)) for draft in drafts]
