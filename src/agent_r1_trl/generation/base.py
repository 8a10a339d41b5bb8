"""The interface of generation back ends: one trajectory's token ids in, the ids the policy sampled out."""

from __future__ import annotations

import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from agent_r1_trl.errors import RunError
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.objects import check_call

if TYPE_CHECKING:
    from torch import nn


@dataclass(kw_only=True, frozen=True)
class SamplingParams:
    """How tokens are drawn; the same for every request of a rollout."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature != 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass(kw_only=True, frozen=True)
class GenerationRequest:
    """One turn that is to be sampled."""

    prompt_ids: list[int]
    """(P,) everything so far, prompt and completion."""
    max_tokens: int
    """Maximum number of ids to sample, >= 1."""
    seed: int = 0
    """A request with this seed, asked again with the same weights, gives the same ids."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are drawn."""


@dataclass(kw_only=True)
class Generation:
    """One turn, sampled from the policy."""

    token_ids: list[int]
    """(N,) sampled ids, the stop token included when the model sampled it."""
    logprobs: list[float]
    """(N,) log-probability of each sampled id after temperature and filters (greedy: under temperature 1)."""
    stop: Literal["stop", "length", "interrupted"]
    """`stop`: a stop token was sampled (it is the last id). `length`: `max_tokens` ran out. `interrupted`:
    `Generator.interrupt` was called; the gate before the sampler goes on with the turn, and nobody else sees it."""
    kept_ids: KeptIds | None = field(default=None, repr=False)
    """The ids that each of the N was drawn from; None: the whole vocabulary, or the back end cannot tell."""
    versions: list[tuple[int, int]] = field(default_factory=list, repr=False)
    """Which weights sampled them, in order: (optimizer steps behind the weights, number of tokens); or empty."""
    waited_s: float = field(default=0.0, repr=False)
    """Seconds in which the turn waited for weights, before it was sampled or between two parts of it."""

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.kept_ids = None if self.kept_ids is None else self.kept_ids.first(num_tokens)
        versions, num_left = self.versions, num_tokens
        self.versions = []
        for version, num in versions:
            if (num_kept := min(num, num_left)) > 0:
                self.versions.append((version, num_kept))
            num_left -= num


class Generator(ABC):
    """A generation back end. Only `generate` is required; the other methods are for back ends that hold resources.

    `generate` never blocks the event loop, and many calls run at once.
    """

    max_model_length: int | None = None
    """Maximum number of tokens of a request, prompt included, where the back end has a limit that it can tell."""
    is_idle: bool = True
    """False while requests are served on a thread of this process, whoever still waits for their answers."""
    is_cancelled: threading.Event | None = None
    """Set when the run is told to end: `sync` need not wait for anything any more. The trainer gives it."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample up to `request.max_tokens` ids after `request.prompt_ids`."""

    def sync(self, model: nn.Module) -> bool:
        """Take over the weights of the policy, unwrapped; called after every optimizer step that precedes a rollout.

        Returns:
            True if it has weights of its own, so that it can sample while the policy's change (`rollouts_ahead`).
            False if there was nothing to do, as for a generator that reads the policy's own weights.
        """
        return False

    def scores(self, token_ids: list[int]) -> dict[str, list[float]] | None:
        """Name of each engine behind this generator -> log-probabilities of (N,) ids; None from one that cannot score.

        (N - 1,) numbers at temperature 1, of each id after the first given those before it. The trainer compares them
        with the policy's own after every `sync`.
        """
        return None

    def sleep(self) -> bool | None:
        """Give the memory of weights and cache to the trainer until the next `sync`.

        Returns:
            False if there was nothing to give, so that the weights are still there.
        """
        return False

    def interrupt(self) -> bool:
        """Have every request in flight answered at once with what it has sampled so far; from any thread.

        Their `stop` is "interrupted". Requests that come later are not meant.

        Returns:
            False if this back end cannot: its requests then end by themselves.
        """
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics of the engines behind this generator; read after every `sync`."""
        return {}

    @property
    def can_score(self) -> bool:
        """Whether `scores` is implemented."""
        return getattr(self.scores, "__func__", None) is not Generator.scores

    def close(self) -> None:  # noqa: B027 - optional
        """Fail the requests that are in flight and free what the generator holds."""


class _Adapted(Generator):
    """A user's object that has `generate` and perhaps some of the optional methods."""

    def __init__(self, given: Any) -> None:
        self._given = given
        for name in ("sync", "scores", "sleep", "interrupt", "metrics", "close", "max_model_length"):
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._given.generate(request)


def as_generator(given: Any, path: str | None = None) -> Generator:
    """A `Generator` from what a user passed as `generator=`; any object with an async `generate` will do.

    Raises:
        ValueError: the object has no `generate`, or one with other arguments; names the `path` that led to it.
    """
    setting = f"generator={(given if path is None else path)!r:.200}"
    form = "an object with async generate(request)"
    if isinstance(given, type) or not callable(getattr(given, "generate", None)):
        raise ValueError(f"{setting} cannot sample: pass {form}, or leave generator out.")
    if _takes_fields(given.generate):
        raise ValueError(
            f"{setting}: its generate takes prompt_ids, max_tokens, seed and params one by one. It is called with one "
            "GenerationRequest, which holds them: write async def generate(self, request), and read "
            "request.prompt_ids, request.max_tokens, request.seed and request.params."
        )
    check_call(f"{setting}: its generate", given.generate, form, None)
    return given if isinstance(given, Generator) else _Adapted(given)


def _takes_fields(generate: Callable[..., object]) -> bool:
    """Whether a `generate` names what a `GenerationRequest` holds among its own arguments."""
    try:
        parameters = inspect.signature(generate).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(item.name in parameters for item in fields(GenerationRequest))


@dataclass
class TrajectorySlot:
    """A back end's memory of one trajectory, such as the server that holds its keys and values."""

    place: int | None = None
    """Number of the server; None before the first request."""
    seed: int = 0
    """The trajectory's own, of which those of its requests are derived."""
    order: int = 0
    """Where more requests wait than can be served, those of the smallest number come first."""
    paused: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside it one of the trajectory's turns waits for weights, which takes nothing of its time."""


current_slot: ContextVar[TrajectorySlot | None] = ContextVar("current_slot", default=None)
"""The slot of the trajectory whose task is running; the rollout sets it."""


class GenerationError(RunError):
    """The generation back end failed, which is not the policy's fault. The cause is chained."""


class RefusedRequestError(GenerationError):
    """The back end will not serve this request, however often it is asked."""


class RequestTooLongError(RefusedRequestError):
    """Prompt and `max_tokens` are more than the back end's context holds."""


def check_generation(generation: Generation, max_tokens: int) -> None:
    """Refuse an answer that is no `Generation` of at most so many ids with one finite log-probability each.

    Some back ends answer NaN or None where their logits overflowed: such a token cannot be trained on.

    Raises:
        GenerationError: says what is wrong; of a number its position, its id and itself.
    """
    if problem := _problem_with(generation, max_tokens):
        raise GenerationError(problem)


def _problem_with(generation: object, max_tokens: int) -> str | None:
    if not isinstance(generation, Generation):
        return f"generate returned {generation!r:.200}; it must be a Generation"
    ids, logprobs = generation.token_ids, generation.logprobs
    if len(ids) > max_tokens:
        return f"{len(ids)} ids came where max_tokens={max_tokens}"
    if generation.stop not in ("stop", "length"):
        return f"stop={generation.stop!r} came; it must be 'stop' or 'length'"
    if len(logprobs) != len(ids):
        return f"{len(ids)} ids came with {len(logprobs)} log-probabilities; each needs one"
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value):
            return f"the log-probability of sampled token {position} (id {ids[position]}) is {value!r}"
    kept = generation.kept_ids
    if kept is not None and len(kept) != len(ids):
        return f"{len(ids)} ids came with kept_ids of {len(kept)}; each needs some"
    for position, drawn_from in enumerate(kept or ()):
        if ids[position] not in drawn_from:
            return f"sampled token {position} (id {ids[position]}) is not among those it was drawn from (kept_ids)"
    return None


def check_request(request: GenerationRequest) -> None:
    """Refuse a request that no back end can serve."""
    if not request.prompt_ids or request.max_tokens < 1:
        problem = f"max_tokens={request.max_tokens}" if request.prompt_ids else "prompt_ids is empty"
        raise ValueError(
            f"{problem}: a request continues at least one token (start with BOS) and samples one or more."
        )
