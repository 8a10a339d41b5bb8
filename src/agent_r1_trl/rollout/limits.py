"""What one trajectory may spend. All lengths are tokens of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, frozen=True)
class RolloutLimits:
    """Limits of a rollout.

    Raises:
        ValueError: names the limit, its value, the rule and the cure.
    """

    max_turns: int = 8
    """Assistant turns; the calls of the last one are still executed and rewarded."""
    max_completion_length: int = 2048
    """Everything after the prompt, tool text included. A turn may ask for what is left of it."""
    max_tokens_per_turn: int | None = None
    """Sampled in one turn. None: what is left of `max_completion_length`."""
    max_observation_tokens: int = 1024
    """Text of the observations after one turn (the template's glue not counted)."""
    max_invalid_calls: int = 2
    """Unusable turns in a row that are answered with feedback; one more ends the trajectory."""
    max_concurrency: int = 256
    """Trajectories in flight at once."""
    rollout_timeout: float | None = None
    """Seconds for one trajectory, from its start (not counting the wait for a free place); scoring it may take as long
    again. None: no limit."""
    max_model_length: int | None = None
    """Prompt and completion together. None: no limit of its own."""

    def __post_init__(self) -> None:
        for name, minimum, optional in (
            ("max_turns", 1, False),
            ("max_completion_length", 1, False),
            ("max_tokens_per_turn", 1, True),
            ("max_observation_tokens", 1, False),
            ("max_invalid_calls", 0, False),
            ("max_concurrency", 1, False),
            ("max_model_length", 2, True),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                none = ", or None" if optional else ""
                raise ValueError(
                    f"{name}={value!r} must be a whole number >= {minimum}{none}. Set {name} accordingly."
                )
        timeout = self.rollout_timeout
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not math.isfinite(timeout)
            or timeout <= 0
        ):
            raise ValueError(f"rollout_timeout={timeout!r} must be seconds > 0, or None for no limit.")

    def room(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """Tokens that still fit into the trajectory; <= 0 when it is full."""
        room = self.max_completion_length - num_completion_tokens
        if self.max_model_length is not None:
            room = min(room, self.max_model_length - num_prompt_tokens - num_completion_tokens)
        return room

    def turn_budget(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """Tokens that the next turn may sample; <= 0 when the trajectory is full."""
        room = self.room(num_prompt_tokens, num_completion_tokens)
        return room if self.max_tokens_per_turn is None else min(room, self.max_tokens_per_turn)


def context_length(config: Any) -> int | None:
    """Positions of a model, as its configuration says; None if it does not."""
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 1 else None
