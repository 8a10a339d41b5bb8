"""The gate between trajectories and their sampler, shut while weights change: every token has one policy.

A trajectory that waits for its tool does not notice the gate. A turn that would begin while it is shut begins once it
opens. `shut` returns when no turn is inside: turns end by themselves, or are cut where they are (`cuts_turns`) and go
on behind the gate as another request, which reads everything again with the new weights. Either way a token's
log-probability is that of one set of weights given the tokens before it, and the turn says of which.

So a rollout can go on across a weight sync with any sampler. Nothing runs while weights change: the sampler needs no
pause, and no key of older weights outlives its cache.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_r1_trl.generation.base import Generation, GenerationRequest, Generator, check_generation, current_slot
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.tools.event_loop import is_given_up

if TYPE_CHECKING:
    from torch import nn

LOOK_S = 0.2
"""Seconds between two looks at whether the run was told to end."""
_NEXT_PART = 0x9E3779B97F4A7C15
"""Between the seeds of two parts of a turn: with one seed the second would repeat the draws of the first."""


class GatedGenerator(Generator):
    """A `Generator` behind a gate, which is shut at first.

    Args:
        generator: samples.
        cuts_turns: whether turns in flight are cut when the gate shuts, where the generator can (`interrupt`).
    """

    def __init__(self, generator: Generator, *, cuts_turns: bool = False) -> None:
        self.inner = generator
        self.cuts_turns = cuts_turns
        self.version = -1
        """Number of optimizer steps behind the sampler's weights; -1 before the gate was opened."""
        self.reads_policy = True
        """Whether the sampler may compute with the very weights that are trained: its `sync` has not returned True."""
        self._changed = threading.Condition()  # guards all that follows
        self._is_open = False
        self._inside: dict[object, asyncio.AbstractEventLoop] = {}
        """Each turn that is inside, and the loop that it runs on."""
        self._has_lost_turns = False
        """Whether the sampler may be at work for turns whose loop was given up: nobody hears of their end."""
        self._line: list[Future[None]] = []
        self._drain_s = 0.0
        self._num_cut = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a turn, in as many parts as there were weights; see `Generator`."""
        whole = await self._part(request)
        while whole.stop == "interrupted":
            rest = replace(
                request,
                prompt_ids=request.prompt_ids + whole.token_ids,
                max_tokens=request.max_tokens - len(whole.token_ids),
                seed=(request.seed + _NEXT_PART * len(whole.token_ids)) % 2**63,
            )
            whole = joined(whole, await self._part(rest))
        return whole

    async def _part(self, request: GenerationRequest) -> Generation:
        """What one set of weights samples."""
        waited_s = await self._enter(turn := object())
        version = self.version
        try:
            part = await self.inner.generate(request)
        finally:
            self._leave(turn)
        if getattr(part, "stop", None) != "interrupted":
            check_generation(part, request.max_tokens)  # before anything of it is read
        part.versions = [(version, len(part.token_ids))] if part.token_ids else []
        part.waited_s = waited_s
        return part

    # ---------------------------------------------------------------- the gate

    async def _enter(self, turn: object) -> float:
        """Go in, or wait until the gate opens; returns the seconds that it took."""
        if self._goes_in(turn) is None:
            return 0.0
        began, slot = time.perf_counter(), current_slot.get()
        with nullcontext() if slot is None else slot.paused():
            while (opened := self._goes_in(turn)) is not None:
                await asyncio.wrap_future(opened)
        return time.perf_counter() - began

    def _goes_in(self, turn: object) -> Future[None] | None:
        """Note a turn that goes in; where the gate is shut, what is done once it opens."""
        with self._changed:
            if self._is_open:
                self._inside[turn] = asyncio.get_running_loop()
                return None
            opened = Future[None]()
            self._line.append(opened)
            return opened

    def _leave(self, turn: object) -> None:
        with self._changed:
            self._inside.pop(turn, None)  # it may be a lost one, whose loop has woken up
            self._changed.notify_all()

    def _is_in_use(self) -> bool:
        """Whether turns are inside. Those of a loop that was given up never leave: their end is the sampler's."""
        for turn, loop in [*self._inside.items()]:
            if is_given_up(loop):
                del self._inside[turn]
                self._has_lost_turns = True
                self.inner.interrupt()
        self._has_lost_turns = self._has_lost_turns and not self.inner.is_idle
        return bool(self._inside) or self._has_lost_turns

    def shut(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Return when no turn is inside, or once the run was told to end; not from the trajectories' own thread."""
        began = time.perf_counter()
        with self._changed:
            was_open, self._is_open = self._is_open, False
            cuts = self.cuts_turns and bool(self._inside) and self.inner.interrupt()
            if cuts:
                self._num_cut += len(self._inside)
            while self._is_in_use() and not is_cancelled():
                self._changed.wait(LOOK_S)
                if cuts and self._inside:  # one may have been on its way to the sampler
                    self.inner.interrupt()
            if was_open:
                self._drain_s += time.perf_counter() - began

    def open(self, version: int) -> None:
        """Let turns begin, with the weights that so many optimizer steps have made."""
        with self._changed:
            self.version, self._is_open = version, True
            line, self._line = self._line, []
        for opened in line:
            if opened.set_running_or_notify_cancel():
                opened.set_result(None)

    def take_metrics(self) -> dict[str, float]:
        """What the gate has cost since the last call."""
        with self._changed:
            found = {"time/gate_drain_s": self._drain_s}
            if self.cuts_turns:
                found["sampling/cut_turns"] = float(self._num_cut)
            self._drain_s, self._num_cut = 0.0, 0
        return found

    # ---------------------------------------------------------------- the sampler's own

    def sync(self, model: nn.Module) -> bool:
        """See `Generator`; the gate is shut."""
        has_synced = self.inner.sync(model)
        self.reads_policy = not has_synced
        return has_synced

    def scores(self, token_ids: list[int]) -> dict[str, list[float]] | None:
        """See `Generator`."""
        return self.inner.scores(token_ids)

    @property
    def can_score(self) -> bool:
        """See `Generator`."""
        return self.inner.can_score

    def sleep(self) -> bool | None:
        """See `Generator`; the gate is shut."""
        return self.inner.sleep()

    def metrics(self) -> dict[str, float]:
        """See `Generator`."""
        return self.inner.metrics()

    @property
    def is_idle(self) -> bool:  # type: ignore[override]
        """See `Generator`."""
        return self.inner.is_idle

    @property
    def max_model_length(self) -> int | None:  # type: ignore[override]
        """See `Generator`."""
        return self.inner.max_model_length

    @property
    def is_cancelled(self) -> threading.Event | None:  # type: ignore[override]
        """See `Generator`."""
        return self.inner.is_cancelled

    @is_cancelled.setter
    def is_cancelled(self, event: threading.Event | None) -> None:
        self.inner.is_cancelled = event

    def close(self) -> None:
        """See `Generator`."""
        self.inner.close()


def joined(first: Generation, second: Generation) -> Generation:
    """Two parts of a turn as one."""
    versions = [*first.versions]
    for version, num in second.versions:
        if versions and versions[-1][0] == version:  # the gate opened again with the same weights
            num += versions.pop()[1]
        versions.append((version, num))
    kept = [part.kept_ids for part in (first, second) if part.token_ids]
    kept_ids = None
    if kept and all(part is not None for part in kept):
        kept_ids = KeptIds.of(list(ids) for part in kept if part is not None for ids in part)
    return Generation(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        stop=second.stop,
        kept_ids=kept_ids,
        versions=versions,
        waited_s=first.waited_s + second.waited_s,
    )
