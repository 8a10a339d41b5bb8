"""Many trajectories at once, each at its own pace.

run -> start -> _run_all -> _try -> run_one -> run_trajectory (`loop.py`), one turn after another
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, TypeVar

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.generation.base import Generator, SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.rollout.context_policies import check_thinking
from agent_r1_trl.rollout.draft import ENDED, Draft
from agent_r1_trl.rollout.env_session import CLOSE_TIMEOUT_S, EnvSession
from agent_r1_trl.rollout.failures import MAX_CAUSES, FailureCause, failure_of, may_pass
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.loop import run_trajectory
from agent_r1_trl.rollout.places import Places
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.rollout.summaries import check_room
from agent_r1_trl.rollout.watchdog import LoopLostError, Watchdog, publish
from agent_r1_trl.tools.event_loop import LoopThread, give_up_loop, shared_loop
from agent_r1_trl.tools.pool import prepare_thread
from agent_r1_trl.trajectory import StopReason, Trajectory

T = TypeVar("T")
logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.5
"""Seconds before the second try of a failed trajectory; doubled before each further one."""
STOP_TIMEOUT_S = CLOSE_TIMEOUT_S + 10.0
"""Seconds that `stop` waits for environments to be closed."""
COLLECT_EVERY_S = 60.0
"""Seconds after which the start of a rollout has all garbage collected, which takes up to one."""
LOOK_S = 0.2
"""Seconds between two looks at whether the run is told to end."""


class Journal(Protocol):
    """Keeps a rollout on disk, and knows what a killed run has finished; see `agent_r1_trl.features.journal`."""

    def finished(self, request: RolloutRequest) -> Trajectory | None:
        """A trajectory that has ended before."""

    def open(self, request: RolloutRequest, *parts: object) -> tuple[Draft, EnvSession, Generator]:
        """The parts of a trajectory: made of the environment's factory, `truncate` and the generator."""

    def end(self, request: RolloutRequest, trajectory: Trajectory) -> None:
        """A trajectory has ended."""


class RolloutFuture(Future[list[Trajectory]]):
    """The trajectories of one run, in the order of its requests, and its environments."""

    def __init__(self) -> None:
        super().__init__()
        self.environments: list[Any] = []
        """In the order of the requests (None where none could be made), once the run has ended."""
        self.is_lost = False
        """Whether its event loop was given up, and with it every trajectory."""
        self.task: asyncio.Task[Any] | None = None
        """The run, from when its loop has come to it until it ends."""


class RolloutRunner:
    """Rolls out trajectories concurrently; one that fails or hangs never disturbs another.

    Args:
        env_factory: makes a fresh environment; called once per trajectory.
        limits: of every trajectory.
        params: how tokens are drawn, unless `run` is told otherwise.
        retry_failed: how often a trajectory that was lost for no fault of the policy is tried again.
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
        """The environments of the run that ended last. Each run in flight has its own in its `RolloutFuture`."""
        self._warned_of: set[str] = set()
        self._in_flight: dict[asyncio.Task[Any], LoopThread] = {}
        self._submitted: dict[Future[Any], LoopThread] = {}
        """What was given to a loop, which may not have come to it yet."""
        self._places: tuple[asyncio.AbstractEventLoop, Places] | None = None

    @property
    def limits(self) -> RolloutLimits:
        """The budget of a trajectory; a change counts from the next one on.

        Raises:
            ValueError: the chat format or the generator cannot keep them.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: RolloutLimits) -> None:
        self._limits = limits.within(getattr(self.generator, "max_model_length", None))
        self._check()

    def _check(self) -> None:
        check_room(self.chat, self.limits)
        check_thinking(self.chat, self.limits.context.policy)

    def run(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
    ) -> list[Trajectory]:
        """Roll out one trajectory per request and return them in the order of the requests.

        Works where a loop is already running (notebooks): the trajectories run on a thread of their own.

        Raises:
            LoopLostError: the thread on which the trajectories ran has ended.
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
        """
        future = self.start(requests, params=params, journal=journal)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt as well: stop what is running
            self.stop()
            raise
        finally:
            self.environments = future.environments

    def start(
        self,
        requests: Sequence[RolloutRequest],
        *,
        params: SamplingParams | None = None,
        journal: Journal | None = None,
        order: int = 0,
    ) -> RolloutFuture:
        """`run` that returns at once; `stop` ends it early, and the future is then cancelled.

        Several runs may be in flight: they share `max_concurrency`, and the trajectories of the smallest `order` come
        first, here and, where it can tell, in the sampler.
        """
        slots = [_Slot(*self._opened(request, journal), limits=self.limits) for request in requests]
        answer, thread = RolloutFuture(), shared_loop()

        def copy_outcome(ended: Future[list[Trajectory]]) -> None:
            if answer.done():  # the loop was given up
                return
            if ended.cancelled():
                answer.cancel()
            elif error := ended.exception():
                answer.set_exception(error)
            else:
                answer.set_result(ended.result())

        def drafts() -> list[Draft]:
            return [each.draft for each in slots]

        watchdog = Watchdog(
            drafts,
            thread.loop,
            thread,
            interval_s=self.limits.watchdog_interval,
            stall_timeout_s=self.limits.stall_timeout,
            give_up=functools.partial(self._give_up, slots, answer, journal, thread),
        )
        _FrozenHeap.add(1)
        answer.add_done_callback(lambda _: _FrozenHeap.add(-1))
        stop_watching = watchdog.has_ended.set  # a future keeps its callbacks, and the watchdog the future
        answer.add_done_callback(lambda _: stop_watching())
        answer.add_done_callback(publish(drafts))
        watchdog.start()
        running = self._run_all(slots, params or self.params, journal, answer, order)
        self._submit(running, thread).add_done_callback(copy_outcome)
        return answer

    def _opened(self, request: RolloutRequest, journal: Journal | None) -> tuple[Draft, EnvSession, Generator]:
        if journal is not None:
            return journal.open(request, self.env_factory, self.chat.truncate, self.generator)
        session = EnvSession(self.env_factory, truncate=self.chat.truncate)
        return Draft(request=request), session, self.generator

    async def _run_all(
        self,
        slots: Sequence[_Slot],
        params: SamplingParams,
        journal: Journal | None,
        answer: RolloutFuture,
        order: int,
    ) -> list[Trajectory]:
        places, answer.task = self._places_on_this_loop(), asyncio.current_task()

        async def run(each: _Slot) -> Trajectory:
            failed: list[str] = []
            async with places.taken(order):
                while True:
                    trajectory = await self._try(each, params, journal, order)
                    cause = failure_of(trajectory)
                    is_final = not may_pass(trajectory, is_refused=each.draft.is_refused)
                    if cause is None or len(failed) == self.retry_failed or is_final:
                        break
                    failed.append(f"{cause.stop_reason}: {cause.error}")
                    self._warn_of_retry(cause)
                    each.draft.enter(f"waiting for try {len(failed) + 1}")
                    await asyncio.sleep(RETRY_WAIT_S * 2 ** (len(failed) - 1))
                    request = replace(each.draft.request, attempt=len(failed))
                    each.draft, each.session, each.generator = self._opened(request, journal)
            each.trajectory, trajectory.failed_tries = trajectory, failed
            each.draft.enter(ENDED)
            self._warn_of_timeout(each.draft)
            if self.on_trajectory is not None:
                self.on_trajectory(trajectory)
            return trajectory

        tasks = [asyncio.ensure_future(run(each)) for each in slots]
        try:
            return list(await asyncio.gather(*tasks))
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: the loop is gone then, and nothing can wait
            await _cancel(tasks)
            raise
        finally:
            answer.environments = self.environments = [each.session.env for each in slots]
            answer.task = None  # which holds the answer: environments would outlive their step

    def _places_on_this_loop(self) -> Places:
        """The places that all runs in flight share; the limit that counts is the last run's."""
        loop, number = asyncio.get_running_loop(), self.limits.max_concurrency
        if self._places is None or self._places[0] is not loop:  # the loop before it was given up
            self._places = loop, Places(number)
        self._places[1].number = number
        return self._places[1]

    async def _try(self, each: _Slot, params: SamplingParams, journal: Journal | None, order: int) -> Trajectory:
        draft = each.draft
        current_slot.set(TrajectorySlot(seed=draft.request.seed, order=order, paused=draft.paused))
        if journal is not None and (finished := journal.finished(each.draft.request)) is not None:
            return finished
        trajectory = await self.run_one(draft, each.session, each.generator, params, each.limits)
        if journal is not None:
            journal.end(each.draft.request, trajectory)
        return trajectory

    async def run_one(
        self,
        draft: Draft,
        session: EnvSession,
        generator: Generator,
        params: SamplingParams,
        limits: RolloutLimits,
    ) -> Trajectory:
        """Roll out one trajectory; see `run_trajectory`."""
        return await run_trajectory(draft, session, generator, self.chat, limits, params, keep_going=self.keep_going)

    def _warn_of_retry(self, cause: FailureCause) -> None:
        if cause.key not in self._warned_of and len(self._warned_of) < MAX_CAUSES:
            self._warned_of.add(cause.key)
            logger.warning(
                "A trajectory was lost and is tried again (retry_failed=%d): %s. This cause is reported once; "
                "rollout/tries counts on.",
                self.retry_failed,
                cause,
            )

    def _warn_of_timeout(self, draft: Draft) -> None:
        if draft.cancelled_in and draft.error is None and "rollout_timeout" not in self._warned_of:
            self._warned_of.add("rollout_timeout")
            logger.warning(
                "rollout_timeout=%g s has stopped a trajectory (example %r, in %s), which counts as truncated. If "
                "your model or your tools need longer, raise rollout_timeout. Reported once; stop/timeout counts on.",
                self.limits.rollout_timeout,
                draft.request.example_id,
                draft.cancelled_in,
            )

    # ---------------------------------------------------------------- the event loop, and the end

    def stop(self, timeout_s: float = STOP_TIMEOUT_S, *, only: RolloutFuture | None = None) -> bool:
        """Cancel the trajectories in flight and wait, at most so long, until their environments are closed.

        May be called from any thread, and more than once at a time. With `only` the other runs go on.

        Returns:
            Whether all environments are closed, or were given up by their own time limit.
        """
        deadline = time.monotonic() + timeout_s

        async def cancel_on(thread: LoopThread) -> None:
            tasks = _tasks_on(thread, dict(self._in_flight))  # also of a run that had not begun when this was called
            await _cancel(task for task in tasks if only is None or task is only.task)

        threads = {*dict(self._in_flight).values(), *dict(self._submitted).values()}
        for thread in [thread for thread in threads if thread.is_alive()]:
            stopping = asyncio.run_coroutine_threadsafe(cancel_on(thread), thread.loop)
            try:
                stopping.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                logger.warning(
                    "The rollout has not ended %g s after it was cancelled; environments may be open.", timeout_s
                )
                return False
        return True

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, is_cancelled: threading.Event) -> T | None:
        """The result of a coroutine that runs where the trajectories run; None if it was cancelled or took too long.

        Once `is_cancelled` says that the run is told to end, the wait takes `CLOSE_TIMEOUT_S` at the longest.
        """
        thread, deadline = shared_loop(), time.monotonic() + timeout_s
        future = self._submit(coroutine, thread)
        while not is_cancelled.is_set() and time.monotonic() < deadline:
            if wait_for_futures([future], LOOK_S).done:
                break
        try:
            return future.result(max(0.0, min(deadline - time.monotonic(), CLOSE_TIMEOUT_S)))
        except CancelledError:
            return None
        except TimeoutError:
            future.cancel()
            if not thread.answers():  # the coroutine holds the loop; what comes next gets another one
                give_up_loop(thread, self._forget(thread))
            return None

    def _submit(self, coroutine: Coroutine[Any, Any, T], thread: LoopThread) -> Future[T]:
        """Run it where the trajectories run, as a task that `stop` ends."""

        async def tracked() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._in_flight[task] = thread
            thread.runs.add(task)
            prepare_thread()  # the loop may be older than what there is to prepare
            try:
                return await coroutine
            finally:
                self._in_flight.pop(task, None)
                thread.runs.discard(task)

        future = asyncio.run_coroutine_threadsafe(tracked(), thread.loop)
        self._submitted[future] = thread
        future.add_done_callback(lambda done: self._submitted.pop(done, None))  # a future keeps its callbacks
        return future

    def _forget(self, thread: LoopThread) -> list[asyncio.Task[Any]]:
        """Tasks on a loop that nobody waits for any more."""
        tasks = _tasks_on(thread, dict(self._in_flight))
        for task in tasks:
            self._in_flight.pop(task, None)
        for future in [future for future, on in dict(self._submitted).items() if on is thread]:
            self._submitted.pop(future, None)
        return tasks

    def _give_up(
        self,
        slots: Sequence[_Slot],
        answer: RolloutFuture,
        journal: Journal | None,
        thread: LoopThread,
        error: Exception,
    ) -> None:
        """Answer for a loop that will not go on; called by the watchdog. The next run gets a fresh loop.

        Trajectories that have not ended are infrastructure failures; a loop whose thread is gone ends the run.
        """
        give_up_loop(thread, self._forget(thread))  # if it ever wakes up, it ends what ran on it, and then itself
        answer.is_lost = all(each.trajectory is None for each in slots)
        trajectories = []
        for each in slots:
            if each.trajectory is None:
                each.draft.error = str(error)
                each.trajectory = _detached(each.draft.finish(StopReason.ENVIRONMENT_ERROR, duration_s=0.0))
                if journal is not None and not isinstance(error, LoopLostError):
                    journal.end(each.draft.request, each.trajectory)
            trajectories.append(each.trajectory)

        async def close_all() -> None:
            await asyncio.gather(*(each.session.close() for each in slots), return_exceptions=True)

        closing = asyncio.run_coroutine_threadsafe(close_all(), shared_loop().loop)
        with contextlib.suppress(Exception):  # said in the log; what is lost must not hold up the rest
            closing.result(timeout=2 * CLOSE_TIMEOUT_S)
        answer.environments = self.environments = [each.session.env for each in slots]
        if isinstance(error, LoopLostError):
            for task in asyncio.all_tasks(thread.loop):
                with contextlib.suppress(RuntimeError):  # nobody will go on with it, and Python would complain later
                    task.get_coro().close()  # type: ignore[union-attr]
            answer.set_exception(error)
        else:
            answer.set_result(trajectories)

    def close(self) -> None:
        """Stop what is running. The event loop goes on: others share it."""
        self.stop()


@dataclass(eq=False)
class _Slot:
    """A trajectory of a run."""

    draft: Draft
    session: EnvSession
    generator: Generator
    _: KW_ONLY
    limits: RolloutLimits
    """Those of the runner when the run began."""
    trajectory: Trajectory | None = None
    """Once it has ended."""


def _detached(trajectory: Trajectory) -> Trajectory:
    """With lists and turns of its own: a loop that was given up and wakes up goes on writing into those of the draft.

    What stands in them is only ever replaced, and an environment's own objects in messages need not be copied.
    """
    own = copy.copy(trajectory)
    for name, value in vars(trajectory).items():
        if isinstance(value, list | dict):
            setattr(own, name, copy.copy(value))
    own.turns = [copy.copy(turn) for turn in trajectory.turns]
    return own


def _tasks_on(thread: LoopThread, in_flight: Mapping[asyncio.Task[Any], LoopThread]) -> list[asyncio.Task[Any]]:
    return [task for task, on in in_flight.items() if on is thread]


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = [*tasks]
    for task in tasks:
        if not task.cancelling():  # a second time would interrupt its closing
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _FrozenHeap:
    """Objects from before the first rollout in flight, set aside for Python's garbage collector.

    With torch and transformers loaded, its visits there take a third of the processor time of our part of a rollout.
    """

    _lock = threading.Lock()
    _num_rollouts = 0
    _is_ours = False
    _is_theirs = False
    _collected_at = -math.inf

    @classmethod
    def add(cls, number: int) -> None:
        """So many rollouts more, or fewer."""
        with cls._lock:
            if cls._num_rollouts == 0 and gc.isenabled():
                # Young garbage need not wait until the rollout has ended. What is older, such as environments whose
                # methods are tools, would be set aside again and again.
                is_due = time.monotonic() - cls._collected_at >= COLLECT_EVERY_S
                gc.collect(2 if is_due else 1)
                cls._collected_at = time.monotonic() if is_due else cls._collected_at
                # The program, or vLLM, may have frozen objects itself: asked once, since it visits all of them.
                cls._is_theirs = cls._is_theirs or gc.get_freeze_count() > 0
                if not cls._is_theirs:
                    gc.freeze()
                    cls._is_ours = True
            cls._num_rollouts += number
            if cls._num_rollouts == 0 and cls._is_ours:
                gc.unfreeze()
                cls._is_ours = False
