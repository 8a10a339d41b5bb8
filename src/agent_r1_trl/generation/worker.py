"""A generator whose requests are served by one worker thread: to the thread and back, cancelling, closing, hanging."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    check_request,
    current_slot,
)

logger = logging.getLogger(__name__)

_IDLE_S = 2.0  # an idle worker thread ends, so a forgotten close() leaks nothing; the next request starts another
_POLL_S = 0.1  # how soon an idle worker notices that the program ends
_EXIT_S = 10.0  # how long the end of the program waits for a step in progress
_GATHER_S = 0.001  # requests sent together arrive one by one: wait while more keep coming


@dataclass(kw_only=True, eq=False)
class WorkerRequest:
    """One call of `generate`."""

    asked: GenerationRequest
    order: int = 0
    """Where requests wait, those of the smallest number are served first; see `TrajectorySlot`."""
    done: Future[Generation] = field(default_factory=Future)
    """Answered once the request no longer uses the model."""
    outcome: Generation | Exception | None = None
    """How it ended."""
    is_cancelled: bool = False

    def fail(self, error: BaseException, hint: str = "") -> None:
        """End with a `GenerationError` caused by `error`, unless it has ended already; `hint` is a sentence that
        ends its message.
        """
        if self.outcome is None:
            text = f"{type(error).__name__}: {error}"
            self.outcome = GenerationError(f"{text.rstrip('.: ')}. {hint}" if hint else text)
            self.outcome.__cause__ = error


class ThreadedGenerator(Generator):
    """A `Generator` that collects requests and serves them in one worker thread.

    Subclasses implement `_serve`, which takes requests from `_waiting` (guarded by `_changed`) until none is left,
    and `_fail_all`, for an error that escaped from it. Both put requests that have ended on `_ended`; `_deliver`
    answers those, and `_note_step` says that a step begins.

    Args:
        name: of the thread.
        step_timeout_s: seconds after which a step counts as hanging; None waits for ever. Requests then fail, while
            the thread stays where it is: nothing can end it.
    """

    def __init__(self, name: str, *, step_timeout_s: float | None = None) -> None:
        self._name = name
        self._step_timeout_s = step_timeout_s
        self._step_began: float | None = None  # None while no step is in flight
        self._ended: list[WorkerRequest] = []
        self._waiting: deque[WorkerRequest] = deque()
        self._changed = threading.Condition()  # guards _waiting, _worker and _is_closed
        self._worker: threading.Thread | None = None
        self._is_closed = False
        self._must_cut = False
        """Whether the requests in flight are to be answered with what they have sampled so far (`interrupt`)."""
        self._said: tuple[type[BaseException], ...] = (GenerationError,)  # classes of errors that are in the log

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; see `Generator`.

        Cancelling waits for the step in progress (milliseconds), after which the request no longer uses the model.

        Raises:
            GenerationError: the back end failed (the cause is chained), hangs or was closed.
        """
        check_request(request)
        slot = current_slot.get()
        call = WorkerRequest(
            asked=replace(request, prompt_ids=list(request.prompt_ids)), order=0 if slot is None else slot.order
        )
        self._submit(call)
        answer = asyncio.wrap_future(call.done)
        try:
            return await self._unless_it_hangs(answer)
        except asyncio.CancelledError:
            call.is_cancelled = True
            with contextlib.suppress(Exception):
                await self._unless_it_hangs(answer)
            raise

    async def _unless_it_hangs(self, answer: asyncio.Future[Generation]) -> Generation:
        poll_s = None if self._step_timeout_s is None else min(1.0, self._step_timeout_s / 2)
        while not answer.done():
            await asyncio.wait({answer}, timeout=poll_s)
            if not answer.done():
                self._check_step()
        return answer.result()

    def interrupt(self) -> bool:
        """See `Generator`; the worker thread cuts the requests before its next step (`_is_cut`)."""
        with self._changed:
            self._must_cut = bool(self._waiting) or self._step_began is not None
        return True

    @property
    def is_idle(self) -> bool:  # type: ignore[override]
        """See `Generator`."""
        with self._changed:
            return not self._waiting and self._step_began is None

    def _is_cut(self) -> bool:
        """Whether the requests in flight are to be cut now; those in line are."""
        with self._changed:
            if not self._must_cut:
                return False
            self._must_cut = False
            for request in self._waiting:
                request.outcome = Generation(token_ids=[], logprobs=[], stop="interrupted")
            self._ended.extend(self._waiting)
            self._waiting.clear()
        return True

    def _note_step(self) -> None:
        self._step_began = time.monotonic()

    def _check_step(self) -> None:
        """Refuse to wait once the worker thread has been in one step for longer than `step_timeout_s`."""
        began, limit = self._step_began, self._step_timeout_s
        if began is not None and limit is not None and time.monotonic() - began > limit:
            raise GenerationError(
                f"{self._name} hangs: it has been in one step for more than servers.request_timeout={limit:g} "
                "seconds. If it is only slow, raise servers.request_timeout."
            )

    def close(self) -> None:
        """Fail the requests that are in flight and refuse further ones."""
        with self._changed:
            self._is_closed = True
            worker = self._worker
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join(self._step_timeout_s)

    def _submit(self, request: WorkerRequest) -> None:
        with self._changed:
            if self._is_closed:
                raise GenerationError("The generator is closed.")
            self._check_step()
            place = len(self._waiting)
            while place and self._waiting[place - 1].order > request.order:
                place -= 1
            self._waiting.insert(place, request)
            if self._worker is None:
                # A daemon, because the program must be able to end while a step hangs. One that is killed inside torch
                # takes the process down with an abort, so the end of the program waits for the step in progress.
                # While it is idle it knows the generator by a weak reference alone: else a trainer that is dropped
                # would stay, with its model, until the thread ends.
                idle = (weakref.ref(self), self._changed, self._waiting)
                self._worker = threading.Thread(target=_work, args=idle, name=self._name, daemon=True)
                self._worker.start()
                atexit.register(self._worker.join, _EXIT_S)
            self._changed.notify_all()

    # ---------------------------------------------------------------- worker thread

    def _work_off(self) -> bool:
        """Serve what waits, and whatever comes meanwhile; False if nothing does: then the thread ends.

        The requests that ended last stay in `_ended`.
        """
        if not self._gather_requests():
            return False
        self._note_step()
        try:
            self._serve()
        except BaseException as error:  # a SystemExit too: the thread must not leave its requests waiting
            self._fail_all(error)
        with self._changed:
            self._step_began = None
            self._must_cut = self._must_cut and bool(self._waiting)  # what comes later is not meant
        return True

    def _gather_requests(self) -> bool:
        with self._changed:
            if not self._waiting:
                self._rest()
                self._worker = None
                atexit.unregister(threading.current_thread().join)
                return False
            size = 0
            while size < len(self._waiting) and not self._must_end:
                size = len(self._waiting)
                self._changed.wait(_GATHER_S)
            return True

    @property
    def _must_end(self) -> bool:
        """Closed, or the program is about to exit and waits for this thread."""
        return self._is_closed or _program_ends()

    def _check_open(self) -> None:
        if self._must_end:
            raise GenerationError("The generator was closed before the request ended.")

    def _serve(self) -> None:
        raise NotImplementedError

    def _rest(self) -> None:
        """Free what only helps while requests keep coming."""

    def _fail_all(self, error: BaseException) -> None:
        raise NotImplementedError

    def _say(self, error: BaseException) -> None:
        """Write where a model failed, once for errors of one class: trajectories keep the error's text alone."""
        if not isinstance(error, self._said):
            self._said += (type(error),)
            logger.error("%s: the model failed, and what it sampled fails with it.", self._name, exc_info=error)

    def _deliver(self) -> None:
        """Answer the requests that have ended."""
        ended, self._ended = self._ended, []
        _answer(ended)


def _answer(ended: list[WorkerRequest]) -> None:
    for request in ended:
        if request.done.done():
            continue
        if isinstance(request.outcome, Generation):
            request.done.set_result(request.outcome)
        else:
            request.done.set_exception(request.outcome or GenerationError("The request was cancelled."))


def _work(
    reference: weakref.ref[ThreadedGenerator], changed: threading.Condition, waiting: deque[WorkerRequest]
) -> None:
    """The worker thread of a generator: serve whenever requests wait; end when idle, closed, or left by everyone."""
    while True:
        deadline = time.monotonic() + _IDLE_S
        with changed:
            while not waiting and time.monotonic() < deadline and not _has_no_use(reference):
                changed.wait(_POLL_S)
        generator = reference()
        if generator is None:
            atexit.unregister(threading.current_thread().join)
            return
        goes_on = generator._work_off()
        ended, generator._ended = generator._ended, []
        # Not while it waits, and not once a rollout knows that it has ended: its trainer may be dropped then.
        del generator
        _answer(ended)
        if not goes_on:
            return


def _has_no_use(reference: weakref.ref[ThreadedGenerator]) -> bool:
    generator = reference()
    return generator is None or generator._must_end


def _program_ends() -> bool:
    return not threading.main_thread().is_alive()
