"""Generation with a transformers model in this process: whatever requests are waiting run as one batch.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

One worker thread runs the forward passes; the event loop never waits for them. Requests join the running batch
between two decode steps and leave it when they end, so no trajectory waits for another's turn to finish. What a row
samples depends on its seed and the weights, not on the rows beside it (up to the rounding of matrix products).

Covered here: requests, admission, failures, cancellation. Not covered: forward passes (`decoding.py`), draws
(`sampling.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import nn

from agent_r1_trl.generation.attention import grouped_attention
from agent_r1_trl.generation.base import Generation, GenerationError, SamplingParams, check_request
from agent_r1_trl.generation.decoding import ModelRunner, evaluation_mode
from agent_r1_trl.generation.sampling import UniformStream, draw, policy_logprobs

logger = logging.getLogger(__name__)

_IDLE_S = 2.0  # an idle worker thread ends, so a forgotten close() leaks nothing; the next request starts another
_GATHER_S = 0.001  # requests sent together arrive one by one: wait while more keep coming


@dataclass(kw_only=True, eq=False)
class _Request:
    """One call of `generate` and what it has sampled so far."""

    prompt_ids: list[int]
    max_tokens: int
    params: SamplingParams
    uniforms: UniformStream
    done: Future[Generation] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seen: torch.Tensor | None = None
    """(V,) bool, the ids so far; only with a repetition penalty."""
    outcome: Generation | Exception | None = None
    is_cancelled: bool = False


class TransformersGenerator:
    """A `Generator` that samples from a transformers causal LM, PEFT and DDP wrappers included.

    The weights are read in place, so the next request after an optimiser step uses the new ones; do not step while
    requests are running. The model is in eval mode while requests run and back in its former mode before the last of
    them returns.

    Args:
        model: the policy. Under DeepSpeed ZeRO-3 gather the parameters around the rollout.
        pad_token_id: any valid id; padding is masked.
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id.
        max_batch_size: most rows in one forward pass. Halved for good when the device runs out of memory.
        max_prefill_tokens: most prompt tokens (padding included) in one forward pass; one request always fits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        stop_token_ids: Collection[int],
        max_batch_size: int = 64,
        max_prefill_tokens: int = 32768,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: at least one row must run; set it to 1 or more.")
        from accelerate.utils import extract_model_from_parallel

        # DDP's own forward may broadcast buffers: a collective call, which ranks of unequal load must not make.
        self._model: nn.Module = extract_model_from_parallel(model)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._pad_token_id = pad_token_id
        self._runner = ModelRunner(self._model, pad_token_id)
        self._rows: list[_Request] = []  # same order as the runner's rows
        self._ended: list[_Request] = []  # to be answered
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()  # guards _waiting, _worker and _is_closed
        self._worker: threading.Thread | None = None
        self._is_closed = False

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """Sample up to `max_tokens` ids after `prompt_ids`; see `Generator`.

        Cancelling waits for the step in progress (milliseconds), after which the row no longer uses the model.

        Raises:
            GenerationError: the forward pass failed (the cause is chained) or the generator was closed.
        """
        check_request(prompt_ids, max_tokens)
        request = _Request(
            prompt_ids=list(prompt_ids), max_tokens=max_tokens, params=params, uniforms=UniformStream(seed)
        )
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

    def _submit(self, request: _Request) -> None:
        with self._changed:
            if self._is_closed:
                raise GenerationError("The generator is closed.")
            self._waiting.append(request)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="transformers-generator", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    # ---------------------------------------------------------------- worker thread

    def _work(self) -> None:
        """Serve whenever requests wait; end when idle or closed."""
        while self._wait_for_requests():
            try:
                with torch.no_grad(), evaluation_mode(self._model), grouped_attention(self._runner.config):
                    self._serve()
            except Exception as error:
                self._fail_rows(error)
            # Only now: whoever receives the last answer may train at once and must find the model's own mode.
            self._deliver()

    def _wait_for_requests(self) -> bool:
        with self._changed:
            if not self._waiting and not self._is_closed:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                self._worker = None
                return False
            size = 0
            while size < len(self._waiting) < self._max_batch_size and not self._is_closed:
                size = len(self._waiting)
                self._changed.wait(_GATHER_S)
            return True

    def _serve(self) -> None:
        """Run until no request is left; the answers of the last ones stay in `_ended`."""
        while True:
            try:
                self._admit()
                self._leave()
                if self._rows:
                    self._decode()
                    self._leave()
            except torch.OutOfMemoryError as error:
                self._shrink(error)
            except Exception as error:
                self._fail_rows(error)
            with self._changed:
                if not self._rows and not self._waiting:
                    return
            self._deliver()

    def _admit(self) -> None:
        """Let waiting requests join the batch, first come first served, as long as they sample alike."""
        new: list[_Request] = []
        longest = 0
        with self._changed:
            if self._is_closed:
                self._rows.extend(self._waiting)
                self._waiting.clear()
                raise GenerationError("The generator was closed before the request ended.")
            while self._waiting and self._runner.accepts_rows and len(self._rows) + len(new) < self._max_batch_size:
                request = self._waiting[0]
                longest = max(longest, len(request.prompt_ids) + len(request.token_ids))
                running = self._rows or new
                if running and request.params != running[0].params:
                    break
                if new and longest * (len(new) + 1) > self._max_prefill_tokens:
                    break
                self._waiting.popleft()
                (self._ended if request.is_cancelled else new).append(request)
        if new:
            self._rows.extend(new)
            self._sample(new, self._runner.prefill([request.prompt_ids + request.token_ids for request in new]))

    def _decode(self) -> None:
        """One more token for every row."""
        self._sample(self._rows, self._runner.decode([request.token_ids[-1] for request in self._rows]))

    def _sample(self, rows: list[_Request], logits: torch.Tensor) -> None:
        """Draw one token per row from `logits` (n, V) and note which rows have ended."""
        params = rows[0].params
        seen = None
        if params.repetition_penalty != 1.0:
            seen = torch.stack([_seen(request, logits) for request in rows])
        uniforms = None if params.temperature == 0 else [row.uniforms[len(row.token_ids)] for row in rows]
        for request, token_id, logprob in zip(
            rows, *draw(policy_logprobs(logits, params, seen), uniforms), strict=True
        ):
            if request.outcome is not None:  # a row that had to stay because its batch cannot shrink
                continue
            if logprob != logprob:
                request.outcome = GenerationError("The model's logits contain NaN or infinity.")
                continue
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            if request.seen is not None:
                request.seen[token_id] = True
            is_stopped = token_id in self._stop_token_ids
            if is_stopped or len(request.token_ids) == request.max_tokens:
                request.outcome = Generation(
                    token_ids=request.token_ids,
                    logprobs=request.logprobs,
                    stop="stop" if is_stopped else "length",
                )

    def _leave(self) -> None:
        """Take the rows that have ended or were cancelled out of the batch."""
        dropped = [row for row, request in enumerate(self._rows) if request.outcome or request.is_cancelled]
        if dropped:
            self._ended.extend(self._rows[row] for row in dropped)
            self._rows = [self._rows[row] for row in self._runner.drop_rows(dropped)]

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Out of memory: from now on half the rows; all go back to the queue and continue where they were."""
        if len(self._rows) <= 1:
            self._fail_rows(error)
            return
        self._max_batch_size = len(self._rows) // 2
        logger.warning("Out of memory with %d rows: max_batch_size is now %d.", len(self._rows), self._max_batch_size)
        with self._changed:
            self._waiting.extendleft(reversed([request for request in self._rows if request.outcome is None]))
        self._forget_rows()

    def _fail_rows(self, error: Exception) -> None:
        """End every row in the batch with the error as its cause."""
        for request in self._rows:
            if request.outcome is None:
                request.outcome = GenerationError(f"{type(error).__name__}: {error}")
                request.outcome.__cause__ = error
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._ended.extend(request for request in self._rows if request.outcome is not None)
        self._rows = []
        self._runner.clear()

    def _deliver(self) -> None:
        """Answer the requests that have ended."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request.done.done():  # delivered before, while its row had to stay
                continue
            if isinstance(request.outcome, Generation):
                request.done.set_result(request.outcome)
            else:
                request.done.set_exception(request.outcome or GenerationError("The request was cancelled."))


def _seen(request: _Request, logits: torch.Tensor) -> torch.Tensor:
    """(V,) the ids that occur in the request so far."""
    if request.seen is None:
        request.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        request.seen[request.prompt_ids + request.token_ids] = True
    return request.seen
