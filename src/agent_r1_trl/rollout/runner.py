"""Many trajectories at once, each at its own pace.

    run -> start -> _play_all -> _try -> run_one -> run_trajectory (`loop.py`), one turn after another

Covered here: concurrency, the event loop's thread and its replacement. Not covered: what happens inside a trajectory
(`loop.py`), how a standstill is noticed (`watchdog.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.generation.base import Generator, SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.rollout.collector import rollout_begins, rollout_ends
from agent_r1_trl.rollout.context_policies import find_policy
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import CLOSE_TIMEOUT_S, EnvSession
from agent_r1_trl.rollout.failures import MAX_CAUSES, FailureCause, failure_of, may_pass
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.rollout.summaries import check_room
from agent_r1_trl.rollout.thinking import check_thinking
from agent_r1_trl.rollout.waiting import copy_outcome, end_when_free, result_in_time
from agent_r1_trl.rollout.watchdog import LoopLostError, Watchdog
from agent_r1_trl.tools.pool import prepare_thread
from agent_r1_trl.trajectory import StopReason, Trajectory

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.5
"""Seconds before a failed trajectory is played for the second time; doubled before each further try."""
STOP_TIMEOUT_S = CLOSE_TIMEOUT_S + 10.0
"""Seconds that `stop` waits for environments to be closed."""


class Journal(Protocol):
    """Keeps a rollout on disk, and knows what a killed run has played of it; see `agent_r1_trl.features.journal`."""

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
        retry_failed: how often a trajectory that failed for no fault of the policy is played again.
        on_trajectory: called with each trajectory as it ends (from the event loop's thread).
        keep_going: see `run_trajectory`.
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
        on_trajectory: Callable[[Trajectory], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.env_factory = env_factory
        self.generator = generator
        self.chat = chat
        self.params = params or SamplingParams()
        self.limits = limits or RolloutLimits()  # refused here, not in the first trajectory
        self.retry_failed, self.keep_going = retry_failed, keep_going
        self.on_trajectory = on_trajectory
        self.environments: list[Any] = []
        """The environments of the last run, in the order of its requests (None where none could be made)."""
        self._retried: set[str] = set()
        """Causes of failures that were reported."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread = threading.current_thread()
        """Runs the loop, if there is one."""
        self._has_reported_timeout = False
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def limits(self) -> RolloutLimits:
        """What a trajectory may spend; a change counts from the next one on.

        Raises:
            ValueError: the chat format or the generator cannot keep them.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: RolloutLimits) -> None:
        self._limits = limits.within(getattr(self.generator, "max_model_length", None))
        self._check()

    def _check(self) -> None:
        find_policy(self.limits)
        check_room(self.chat, self.limits)
        check_thinking(self.chat, self.limits.context.policy)

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
            LoopLostError: the thread on which the trajectories were played has ended.
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
        """
        future = self.start(requests, params=params, journal=journal)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt as well: stop what is running
            self.stop()
            raise

    def start(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
    ) -> Future[list[Trajectory]]:
        """`run` that returns at once; `stop` ends it early, and the future is then cancelled."""
        plays, answer = self._plays(requests, journal), Future[list[Trajectory]]()
        loop = self._event_loop()

        async def play() -> list[Trajectory]:
            with self._tracked():
                return await self._play_all(plays, params, journal)

        watchdog = Watchdog(
            lambda: [each.draft for each in plays],
            loop,
            self._thread,
            interval_s=self.limits.watchdog_interval,
            stall_timeout_s=self.limits.stall_timeout,
            give_up=functools.partial(self._give_up, plays, answer, journal),
        )
        rollout_begins()
        answer.add_done_callback(lambda _: rollout_ends())
        answer.add_done_callback(lambda _: watchdog.stop())
        watchdog.start()
        played = asyncio.run_coroutine_threadsafe(play(), loop)
        played.add_done_callback(functools.partial(copy_outcome, to=answer))
        return answer

    def _plays(self, requests: Sequence[RolloutRequest], journal: Journal | None) -> list[_Play]:
        return [_Play(*self._player(request, journal)) for request in requests]

    def _player(self, request: RolloutRequest, journal: Journal | None) -> tuple[Draft, EnvSession, Generator]:
        if journal is not None:
            return journal.open(request, self.env_factory, self.chat.truncate, self.generator)
        session = EnvSession(self.env_factory, truncate=self.chat.truncate)
        return Draft(request=request), session, self.generator

    async def _play_all(
        self, plays: Sequence[_Play], params: SamplingParams | None, journal: Journal | None
    ) -> list[Trajectory]:
        places = asyncio.Semaphore(self.limits.max_concurrency)

        async def play(each: _Play) -> Trajectory:
            failed: list[str] = []
            async with places:
                while True:
                    trajectory = await self._try(each, params or self.params, journal)
                    cause = failure_of(trajectory)
                    is_final = not may_pass(trajectory, is_refused=each.draft.is_refused)
                    if cause is None or len(failed) == self.retry_failed or is_final:
                        break
                    failed.append(f"{cause.stop_reason}: {cause.error}")
                    self._warn_of_retry(cause)
                    each.draft.phase = f"waiting for try {len(failed) + 1}"
                    await asyncio.sleep(RETRY_WAIT_S * 2 ** (len(failed) - 1))
                    request = replace(each.draft.request, attempt=len(failed))
                    each.draft, each.session, each.generator = self._player(request, journal)
            each.trajectory, trajectory.failed_tries = trajectory, failed
            each.draft.phase = "ended"
            self._report_timeout(each)
            if self.on_trajectory is not None:
                self.on_trajectory(trajectory)
            return trajectory

        tasks = [asyncio.ensure_future(play(each)) for each in plays]
        try:
            trajectories = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                if not task.cancelling():  # a second time would interrupt its closing
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.environments = [each.session.env for each in plays]
        return list(trajectories)

    async def _try(self, each: _Play, params: SamplingParams, journal: Journal | None) -> Trajectory:
        current_slot.set(TrajectorySlot())
        request = each.draft.request
        trajectory = None if journal is None else journal.finished(request)
        if trajectory is None:
            trajectory = await self.run_one(each.draft, each.session, each.generator, params)
            if journal is not None:
                journal.end(request, trajectory)
        return trajectory

    async def run_one(
        self, draft: Draft, session: EnvSession, generator: Generator, params: SamplingParams
    ) -> Trajectory:
        """Play one trajectory; see `run_trajectory`."""
        return await run_trajectory(
            draft, session, generator, self.chat, self.limits, params, keep_going=self.keep_going
        )

    def _warn_of_retry(self, cause: FailureCause) -> None:
        if cause.key not in self._retried and len(self._retried) < MAX_CAUSES:
            self._retried.add(cause.key)
            logger.warning(
                "A trajectory failed and is played again (retry_failed=%d): %s. This cause is reported once; "
                "rollout/tries counts on.",
                self.retry_failed,
                cause,
            )

    def _report_timeout(self, play: _Play) -> None:
        if play.draft.cut_in and play.draft.error is None and not self._has_reported_timeout:
            self._has_reported_timeout = True
            logger.warning(
                "rollout_timeout=%g s has stopped a trajectory (example %r, in %s), which counts as truncated. If "
                "your model or your tools need longer, raise rollout_timeout. Reported once; stop/timeout counts on.",
                self.limits.rollout_timeout,
                play.draft.request.example_id,
                play.draft.cut_in,
            )

    # ---------------------------------------------------------------- the event loop, and the end

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Cut the trajectories that are in flight, and wait until their environments are closed.

        May be called from any thread, and more than once at a time.

        Args:
            timeout_s: the longest wait.

        Returns:
            Whether all environments are closed, or were given up by their own time limit.
        """
        loop = self._loop
        if loop is None:
            return True
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), loop)
        try:
            stopping.result(timeout_s)
        except TimeoutError:
            logger.warning("The rollout has not ended %g s after it was cut; environments may be open.", timeout_s)
            return False
        return True

    async def _stop(self) -> None:
        tasks = [*self._under_way]
        for task in tasks:
            if not task.cancelling():  # a second time would interrupt its closing
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, is_cut: threading.Event) -> T | None:
        """The result of a coroutine that runs where the trajectories run; None if it was cut (`result_in_time`)."""

        async def tracked() -> T:
            with self._tracked():
                return await coroutine

        loop = self._event_loop()
        try:
            return result_in_time(asyncio.run_coroutine_threadsafe(tracked(), loop), timeout_s, is_cut)
        except CancelledError:
            return None
        except TimeoutError:  # the coroutine holds the loop; what comes next gets another one
            self._loop = None
            self._under_way.clear()
            end_when_free(loop)
            return None

    @contextlib.contextmanager
    def _tracked(self) -> Iterator[None]:
        """The task that runs this is one that `stop` ends."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)

    def _give_up(
        self, plays: Sequence[_Play], answer: Future[list[Trajectory]], journal: Journal | None, error: Exception
    ) -> None:
        """Answer for a loop that will not go on; called by the watchdog. The next run gets a fresh loop.

        Trajectories that have ended are kept, and the others are infrastructure failures; but a loop whose thread is
        gone ends the run with the error.
        """
        lost, self._loop = self._loop, None
        self._under_way.clear()
        trajectories = []
        for each in plays:
            if each.trajectory is None:
                each.draft.error = str(error)
                each.trajectory = each.draft.finish(StopReason.ENVIRONMENT_ERROR, duration_s=0.0)
                if journal is not None and not isinstance(error, LoopLostError):
                    journal.end(each.draft.request, each.trajectory)
            trajectories.append(each.trajectory)
        closing = asyncio.run_coroutine_threadsafe(_close_all(plays), self._event_loop())
        with contextlib.suppress(Exception):  # said in the log; what is lost must not hold up the rest
            closing.result(timeout=2 * CLOSE_TIMEOUT_S)
        self.environments = [each.session.env for each in plays]
        if lost is not None:  # if it ever wakes up, it ends what it played, and then itself
            end_when_free(lost)
        if isinstance(error, LoopLostError):
            answer.set_exception(error)
        else:
            answer.set_result(trajectories)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self._thread.is_alive():
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run_loop, args=(loop,), name="rollout", daemon=True)
            self._thread.start()
        return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        prepare_thread()
        loop.run_forever()
        while self._loop is loop:
            logger.warning("A tool or environment stopped the event loop that plays the trajectories; it goes on.")
            loop.run_forever()
        loop.close()

    def close(self) -> None:
        """Stop what is running, and end the event loop's thread."""
        self.stop()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


@dataclass(eq=False)
class _Play:
    """A trajectory of a run."""

    draft: Draft
    session: EnvSession
    generator: Generator
    trajectory: Trajectory | None = None
    """Once it has ended."""


async def _close_all(plays: Sequence[_Play]) -> None:
    await asyncio.gather(*(each.session.close() for each in plays), return_exceptions=True)
