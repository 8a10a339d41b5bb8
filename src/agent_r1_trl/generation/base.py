"""The Generator protocol: one trajectory's token ids in, the ids the policy sampled out.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable


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


@dataclass(kw_only=True)
class Generation:
    """What the policy sampled for one turn."""

    token_ids: list[int]
    """(N,) sampled ids, the stop token included when the model sampled it."""
    logprobs: list[float]
    """(N,) log-probability of each sampled id after temperature and filters (greedy: under temperature 1)."""
    stop: Literal["stop", "length"]
    """`stop`: a stop token was sampled (it is the last id). `length`: `max_tokens` ran out."""


@runtime_checkable
class Generator(Protocol):
    """A generation back end. `generate` never blocks the event loop and many calls run at once."""

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """Sample up to `max_tokens` ids after `prompt_ids`.

        Args:
            prompt_ids: everything so far (prompt + completion), (P,).
            max_tokens: the most ids to sample, >= 1.
            seed: of this request; the same request with the same seed and weights gives the same ids.
            params: sampling settings.
        """
        ...


@dataclass
class TrajectorySlot:
    """What a back end remembers about one trajectory, such as the server that holds its keys and values."""

    place: int | None = None


current_slot: ContextVar[TrajectorySlot | None] = ContextVar("current_slot", default=None)
"""The slot of the trajectory whose task is running; the rollout sets it."""


class GenerationError(RuntimeError):
    """The generation back end failed; not the policy's fault. The cause is chained."""


def check_request(prompt_ids: list[int], max_tokens: int) -> None:
    """Refuse a request that no back end can serve.

    Raises:
        ValueError: for an empty prompt or a token limit below 1.
    """
    if not prompt_ids:
        raise ValueError(
            "prompt_ids is empty: the model needs at least one token to continue; start with a BOS token."
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: a request samples at least one token; end the rollout instead.")
