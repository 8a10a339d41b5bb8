"""A generator whose requests are served by one worker thread.

Covered here: the path of a request from the event loop to the thread and back, cancellation, closing. Not covered: how
tokens are sampled (the subclasses).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from agent_r1_trl.generation.base import Generation, GenerationError, Generator, SamplingParams, check_request

_IDLE_S = 2.0  # an idle worker thread ends, so a forgotten close() leaks nothing; the next request starts another
_POLL_S = 0.1  # how soon an idle worker notices that the program ends
_GATHER_S = 0.001  # requests sent together arrive one by one: wait while more keep coming


@dataclass(kw_only=True, eq=False)
class Request:
    """One call of `generate`."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int
    params: SamplingParams
    done: Future[Generation] = field(default_factory=Future)
    """Answered once the request no longer uses the model."""
    outcome: Generation | Exception | None = None
    """How it ended."""
    is_cancelled: bool = False

    def fail(self, error: Exception) -> None:
        """End with a `GenerationError` caused by `error`, unless it has ended already."""
        if self.outcome is None:
            self.outcome = GenerationError(f"{type(error).__name__}: {error}")
            self.outcome.__cause__ = error


class ThreadedGenerator(Generator):
    """A `Generator` that collects requests and serves them in one worker thread.

    Subclasses implement `_serve`, which takes requests from `_waiting` (guarded by `_changed`) until none is left,
    and `_fail_all`, for an error that escaped from it. Both put requests that have ended on `_ended`; `_deliver`
    answers those.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()  # guards _waiting, _worker and _is_closed
        self._worker: threading.Thread | None = None
        self._is_closed = False

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """Sample up to `max_tokens` ids after `prompt_ids`; see `Generator`.

        Cancelling waits for the step in progress (milliseconds), after which the request no longer uses the model.

        Raises:
            GenerationError: the back end failed (the cause is chained) or was closed.
        """
        check_request(prompt_ids, max_tokens)
        request = Request(prompt_ids=list(prompt_ids), max_tokens=max_tokens, seed=seed, params=params)
        self._submit(request)
        answer = asyncio.wrap_future(request.done)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            request.is_cancelled = True
            with contextlib.suppress(Exception):
                await asyncio.shield(answer)
            raise

    def close(self) -> None:
        """Fail the requests that are under way and refuse further ones."""
        with self._changed:
            self._is_closed = True
            worker = self._worker
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _submit(self, request: Request) -> None:
        with self._changed:
            if self._is_closed:
                raise GenerationError("The generator is closed.")
            self._waiting.append(request)
            if self._worker is None:
                # Not a daemon: killed at exit inside torch, such a thread takes the process down with an abort. Set
                # explicitly, because a thread started by a daemon (the rollout's loop) would otherwise be one as well.
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=False)
                self._worker.start()
            self._changed.notify_all()

    # ---------------------------------------------------------------- worker thread

    def _work(self) -> None:
        """Serve whenever requests wait; end when idle or closed."""
        while self._wait_for_requests():
            try:
                self._serve()
            except Exception as error:
                self._fail_all(error)
            self._deliver()

    def _wait_for_requests(self) -> bool:
        with self._changed:
            deadline = time.monotonic() + _IDLE_S
            while not self._waiting and not self._must_end and time.monotonic() < deadline:
                self._changed.wait(_POLL_S)
            if not self._waiting:
                self._rest()
                self._worker = None
                return False
            size = 0
            while size < len(self._waiting) and not self._must_end:
                size = len(self._waiting)
                self._changed.wait(_GATHER_S)
            return True

    @property
    def _must_end(self) -> bool:
        """Closed, or the program is about to exit and waits for this thread."""
        return self._is_closed or not threading.main_thread().is_alive()

    def _check_open(self) -> None:
        if self._must_end:
            raise GenerationError("The generator was closed before the request ended.")

    def _serve(self) -> None:
        raise NotImplementedError

    def _rest(self) -> None:
        """Free what only helps while requests keep coming."""

    def _fail_all(self, error: Exception) -> None:
        raise NotImplementedError

    def _deliver(self) -> None:
        """Answer the requests that have ended."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request.done.done():
                continue
            if isinstance(request.outcome, Generation):
                request.done.set_result(request.outcome)
            else:
                request.done.set_exception(request.outcome or GenerationError("The request was cancelled."))
