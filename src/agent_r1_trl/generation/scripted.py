"""Generation from a script: what the "policy" says is written down beforehand.

For tests and demonstrations: no weights, no randomness, failures and delays on demand. A prompt that begins with an
earlier prompt and its answer asks for the next turn of that trajectory; every other prompt asks for a first turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    SamplingParams,
    check_request,
    current_slot,
)


@dataclass(kw_only=True)
class ScriptedTurn:
    """One answer of the script."""

    token_ids: Sequence[int]
    """(N,) what is "sampled"; cut to the request's `max_tokens`."""
    logprobs: Sequence[float] | None = None
    """(N,), default -1 everywhere."""
    delay_s: float = 0.0
    """Seconds until the answer comes."""


@dataclass(kw_only=True, frozen=True)
class ScriptedRequest:
    """A request as the script sees it."""

    prompt_ids: tuple[int, ...]
    turn: int
    """0 for a prompt that continues no earlier answer."""
    index: int
    """Number of requests before it."""
    max_tokens: int
    seed: int
    """The request's own, a different one in each turn."""
    trajectory_seed: int
    """Seed of the trajectory, which tells the members of a group apart; 0 outside a rollout."""
    params: SamplingParams


Answer: TypeAlias = ScriptedTurn | Sequence[int] | Exception
"""An exception is raised (after its turn's delay) instead of an answer."""
Script: TypeAlias = Callable[[ScriptedRequest], Answer] | Sequence[Answer]


class ScriptedGenerator(Generator):
    """A `Generator` that follows a script.

    Args:
        script: a list of answers, one per turn, the same for every trajectory; or a function of the `ScriptedRequest`.
        stop_token_ids: if given, an answer that does not end in one of them has `stop="length"`; if not, every answer
            that `max_tokens` does not cut has `stop="stop"`.
        delay_s: seconds that every answer takes.

    >>> import asyncio
    >>> generator = ScriptedGenerator([[7, 8, 9], [5]])
    >>> asyncio.run(generator.generate(GenerationRequest(prompt_ids=[1], max_tokens=2)))
    Generation(token_ids=[7, 8], logprobs=[-1.0, -1.0], stop='length')
    >>> asyncio.run(generator.generate(GenerationRequest(prompt_ids=[1, 7, 8, 3], max_tokens=2)))
    Generation(token_ids=[5], logprobs=[-1.0], stop='stop')
    """

    def __init__(self, script: Script, *, stop_token_ids: Collection[int] = (), delay_s: float = 0.0) -> None:
        self._script = script
        self._stop_token_ids = frozenset(stop_token_ids)
        self._delay_s = delay_s
        self._turn_after: dict[tuple[int, ...], int] = {}  # prompt with its answer -> the turn that comes next
        self._num_running = 0
        self.requests: list[ScriptedRequest] = []
        """All requests, in order."""
        self.most_running = 0
        """Largest number of requests that were being answered at the same time."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Answer as the script says; see `Generator`.

        Raises:
            GenerationError: the script has no such turn. Whatever exception the script holds is raised as it is.
        """
        check_request(request)
        ids, slot = tuple(request.prompt_ids), current_slot.get()
        seen = ScriptedRequest(
            prompt_ids=ids,
            turn=self._find_turn(ids),
            index=len(self.requests),
            max_tokens=request.max_tokens,
            seed=request.seed,
            trajectory_seed=slot.seed if slot is not None else 0,
            params=request.params,
        )
        self.requests.append(seen)
        answer = self._look_up(seen)
        delay_s = answer.delay_s if isinstance(answer, ScriptedTurn) else 0.0
        self._num_running += 1
        self.most_running = max(self.most_running, self._num_running)
        try:
            await asyncio.sleep(self._delay_s + delay_s)
        finally:
            self._num_running -= 1
        if isinstance(answer, Exception):
            raise answer
        turn = answer if isinstance(answer, ScriptedTurn) else ScriptedTurn(token_ids=answer)
        generation = self._cut(turn, request.max_tokens)
        self._turn_after[ids + tuple(generation.token_ids)] = seen.turn + 1
        return generation

    def _find_turn(self, prompt_ids: tuple[int, ...]) -> int:
        """The turn after the longest earlier prompt-and-answer that this prompt begins with."""
        for ids in sorted(self._turn_after, key=len, reverse=True):
            tail = max(0, len(ids) - 8)  # comparing it first spares the copy of most that do not fit
            if prompt_ids[tail : len(ids)] == ids[tail:] and prompt_ids[: len(ids)] == ids:
                return self._turn_after[ids]
        return 0

    def _look_up(self, request: ScriptedRequest) -> Answer:
        if callable(self._script):
            return self._script(request)
        if request.turn >= len(self._script):
            raise GenerationError(
                f"The script has {len(self._script)} turns, turn {request.turn} (from 0) was asked for."
            )
        return self._script[request.turn]

    def _cut(self, turn: ScriptedTurn, max_tokens: int) -> Generation:
        token_ids = list(turn.token_ids)[:max_tokens]
        logprobs = [-1.0] * len(turn.token_ids) if turn.logprobs is None else list(turn.logprobs)
        if len(logprobs) != len(turn.token_ids):
            raise ValueError(f"A scripted turn has {len(turn.token_ids)} ids and {len(logprobs)} log-probabilities.")
        if self._stop_token_ids:
            is_stopped = bool(token_ids) and token_ids[-1] in self._stop_token_ids
        else:
            is_stopped = len(turn.token_ids) <= max_tokens
        return Generation(token_ids=token_ids, logprobs=logprobs[:max_tokens], stop="stop" if is_stopped else "length")
