"""Generation with a transformers model in this process: whatever requests are waiting run as one batch.

Requests join the running batch between two decode steps and leave it when they end, so no trajectory waits for
another's turn to finish. What a row samples depends on its seed and the weights, not on the rows beside it (up to the
rounding of matrix products).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from agent_r1_trl.generation.base import Generation, GenerationError
from agent_r1_trl.generation.local.decoding import ModelRunner, PrefixCache, evaluation_mode
from agent_r1_trl.generation.local.sampling import UniformStream, draw, kept_in, policy_logprobs
from agent_r1_trl.generation.weights import check_adapters
from agent_r1_trl.generation.worker import ThreadedGenerator, WorkerRequest
from agent_r1_trl.kept_ids import KeptIds

logger = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 32768
"""Prompt tokens, padding included, of a forward pass; a single request may have more."""
PREFIX_CACHE_BYTES = 2**30


class _ActiveRow:
    """A request in the batch and what it has sampled so far."""

    def __init__(self, request: WorkerRequest) -> None:
        self.request = request
        self.uniforms = UniformStream(request.asked.seed)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.kept_ids = KeptIds.of([])
        self.seen: torch.Tensor | None = None
        """(V,) bool, the ids so far; only with a repetition penalty."""

    @property
    def ids(self) -> list[int]:
        """Prompt and sampled ids."""
        return self.request.asked.prompt_ids + self.token_ids

    def cut(self) -> None:
        """End here, with what there is."""
        if self.request.outcome is None:
            self.request.outcome = self._generation("interrupted")

    def _generation(self, stop: Literal["stop", "length", "interrupted"]) -> Generation:
        kept_ids = self.kept_ids if len(self.kept_ids) else None
        return Generation(token_ids=self.token_ids, logprobs=self.logprobs, stop=stop, kept_ids=kept_ids)

    def append(
        self, token_id: int, logprob: float, kept_ids: list[int] | None, stop_token_ids: frozenset[int]
    ) -> None:
        """Take a sampled token, which may be the last one, and the ids that it was drawn from."""
        if logprob != logprob:
            self.request.outcome = GenerationError(
                "The model's logits contain NaN or infinity: in training, lower learning_rate."
            )
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if kept_ids is not None:
            self.kept_ids.append(kept_ids)
        if self.seen is not None:
            self.seen[token_id] = True
        is_stopped = token_id in stop_token_ids
        if is_stopped or len(self.token_ids) == self.request.asked.max_tokens:
            self.request.outcome = self._generation("stop" if is_stopped else "length")

    def seen_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """(V,) bool, which ids occur in the row so far."""
        if self.seen is None:
            self.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            self.seen[self.ids] = True
        return self.seen


class TransformersGenerator(ThreadedGenerator):
    """A `Generator` that samples from a transformers causal LM, PEFT and DDP wrappers included.

    The weights are read in place, so the next request after an optimiser step uses the new ones; do not step while
    requests are running. The model is in eval mode while requests run and back in its former mode before the last of
    them returns.

    Args:
        model: the policy. Under DeepSpeed ZeRO-3, gather the parameters around the rollout.
        pad_token_id: any valid id; padding is masked.
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id.
        max_batch_size: maximum number of rows per forward pass. Halved permanently when the device runs out of memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        stop_token_ids: Collection[int],
        max_batch_size: int = 64,
    ) -> None:
        super().__init__("transformers-generator")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: at least one row must run; set it to 1 or more.")
        from accelerate.utils import extract_model_from_parallel

        check_adapters(model)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length: for every token
        # DDP's own forward may broadcast buffers: a collective call, which ranks of unequal load must not make.
        self._model: nn.Module = extract_model_from_parallel(model)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_batch_size = max_batch_size
        self._runner = ModelRunner(self._model, pad_token_id)
        # Keys and values kept between the turns of a trajectory. On a GPU training needs the memory.
        keeps_rows = self._runner.can_move_rows and self._runner.device.type == "cpu"
        self._prefixes = PrefixCache(PREFIX_CACHE_BYTES if keeps_rows else 0)
        self._versions: list[tuple[int, int]] = []
        self._rows: list[_ActiveRow] = []  # same order as the runner's rows
        self._resuming: list[_ActiveRow] = []  # put back when memory ran out; they go first

    def _serve(self) -> None:
        """Run until no request is left; the answers of the last ones stay in `_ended`.

        Those are delivered outside: whoever receives the last answer may train at once and must find the model's own
        mode.
        """
        if self._runner.device.type == "cuda":  # the current device is a property of the thread
            torch.cuda.set_device(self._runner.device)
        if self._prefixes.max_bytes:
            self._check_versions()
        with torch.no_grad(), evaluation_mode(self._model):
            while True:
                try:
                    self._cut()
                    self._admit()
                    self._leave()
                    if self._rows:
                        self._sample(self._rows, self._runner.decode([row.token_ids[-1] for row in self._rows]))
                        self._leave()
                except torch.OutOfMemoryError as error:
                    self._shrink(error)
                except Exception as error:
                    self._fail_all(error)
                with self._changed:
                    if not self._rows and not self._waiting and not self._resuming:
                        return
                self._deliver()

    def _cut(self) -> None:
        """End the rows in the batch and in line where they are, if that is asked for."""
        if not self._is_cut():
            return
        resuming, self._resuming = self._resuming, []
        for row in [*self._rows, *resuming]:
            row.cut()
        self._ended.extend(row.request for row in resuming)
        self._leave()

    def sync(self, model: nn.Module) -> bool:
        """Forget what was computed with older weights; there are none to take over."""
        self._prefixes.clear()
        return False

    def _check_versions(self) -> None:
        """Forget keys and values of older weights where nobody calls `sync`.

        PyTorch counts changes of a tensor in place, but not those made through `.data`, as some optimisers do.
        """
        parameters = [item for item in self._model.parameters() if not item.is_inference()]
        versions = [(item.data_ptr(), item._version) for item in parameters]
        if versions != self._versions:
            self._prefixes.clear()
        self._versions = versions

    def _rest(self) -> None:
        self._prefixes.clear()

    def _admit(self) -> None:
        """Let waiting requests join the batch, first come first served, as long as they sample alike."""
        new: list[_ActiveRow] = []
        longest = 0
        with self._changed:
            self._check_open()
            while self._runner.accepts_rows and len(self._rows) + len(new) < self._max_batch_size:
                row = self._next_row()
                if row is None:
                    break
                longest = max(longest, len(row.ids))
                running = self._rows or new
                is_alike = not running or row.request.asked.params == running[0].request.asked.params
                if not is_alike or (new and longest * (len(new) + 1) > MAX_PREFILL_TOKENS):
                    self._resuming.insert(0, row)
                    break
                new.append(row)
        if new:
            self._prefill(new)

    def _prefill(self, new: list[_ActiveRow]) -> None:
        """Bring rows into the batch: those that start, then those that go on from a parked row."""
        parked = [self._prefixes.take(row.ids) for row in new]
        starting = [row for row, prefix in zip(new, parked, strict=True) if prefix is None]
        going_on = [row for row, prefix in zip(new, parked, strict=True) if prefix is not None]
        self._rows += starting + going_on
        if starting:
            self._sample(starting, self._runner.prefill([row.ids for row in starting]))
        if going_on:
            prefixes = [prefix for prefix in parked if prefix is not None]
            self._sample(going_on, self._runner.prefill([row.ids for row in going_on], prefixes))

    def _next_row(self) -> _ActiveRow | None:
        """The row that is next in line, taken from the line."""
        while self._resuming or self._waiting:
            row = self._resuming.pop(0) if self._resuming else _ActiveRow(self._waiting.popleft())
            if not row.request.is_cancelled:
                return row
            self._ended.append(row.request)
        return None

    def _sample(self, rows: list[_ActiveRow], logits: torch.Tensor) -> None:
        """Draw one token per row from `logits` (n, V) and note which rows have ended."""
        params = rows[0].request.asked.params
        seen = torch.stack([row.seen_ids(logits) for row in rows]) if params.repetition_penalty != 1.0 else None
        uniforms = None if params.temperature == 0 else [row.uniforms[len(row.token_ids)] for row in rows]
        distribution = policy_logprobs(logits, params, seen)  # (n, V)
        kept = [ids.tolist() for ids in kept_in(distribution)] if params.cuts else [None] * len(rows)
        token_ids, logprobs = draw(distribution, uniforms)
        for row, token_id, logprob, kept_ids in zip(rows, token_ids, logprobs, kept, strict=True):
            if row.request.outcome is None:  # else the row had to stay because its batch cannot shrink
                row.append(token_id, logprob, kept_ids, self._stop_token_ids)

    def _leave(self) -> None:
        """Take the rows that have ended or were cancelled out of the batch."""
        ended = [
            (index, row)
            for index, row in enumerate(self._rows)
            if row.request.outcome is not None or row.request.is_cancelled
        ]
        for index, row in ended:
            if self._prefixes.max_bytes and isinstance(row.request.outcome, Generation):
                self._prefixes.put(self._runner.park(index, row.ids))
        if ended:
            self._ended.extend(row.request for _, row in ended)
            self._rows = [self._rows[index] for index in self._runner.drop_rows([index for index, _ in ended])]

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Out of memory: from now on half the rows; all go back to the line and continue where they were."""
        if len(self._rows) <= 1:
            self._fail_all(error)
            return
        self._prefixes.clear()
        self._max_batch_size = len(self._rows) // 2
        logger.warning("Out of memory with %d rows: max_batch_size is now %d.", len(self._rows), self._max_batch_size)
        self._resuming[:0] = [row for row in self._rows if row.request.outcome is None]
        self._forget_rows()

    def _fail_all(self, error: BaseException) -> None:
        """End every row in the batch with the error as its cause; once closed, everything in line too."""
        if self._must_end:
            with self._changed:
                self._rows.extend([*self._resuming, *map(_ActiveRow, self._waiting)])
                self._resuming.clear()
                self._waiting.clear()
        self._say(error)
        hint = "" if self._runner.has_decoded else self._runner.what_it_needs
        for row in self._rows:
            row.request.fail(error, hint)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._ended.extend(row.request for row in self._rows if row.request.outcome is not None)
        self._rows = []
        self._runner.clear()
