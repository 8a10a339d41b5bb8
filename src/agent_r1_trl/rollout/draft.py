"""A trajectory under construction: masks are made where the token is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.generation.base import Generation
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.trajectory import Author, Message, StopReason, ToolResult, Trajectory, Turn


@dataclass(kw_only=True)
class Draft:
    """Token lists that only grow."""

    request: RolloutRequest
    prompt_messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    action_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    authors: list[Author] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    phase: str = "waiting"
    """What the trajectory is waiting for; the watchdog reports it."""
    error: str | None = None
    is_refused: bool = False
    """The back end refused the request and would refuse it again."""
    cut_in: str | None = None
    """The phase in which `rollout_timeout` passed."""

    @property
    def name(self) -> str:
        """The trajectory, and what it is waiting for."""
        return f"example {self.request.example_id!r} generation {self.request.generation}, {self.phase}"

    @property
    def context_ids(self) -> list[int]:
        """Everything so far."""
        return self.prompt_ids + self.completion_ids

    def add_turn(self, generation: Generation, message: Message, *, generate_s: float) -> Turn:
        """Append what the policy sampled: the only tokens with mask 1."""
        start, count = len(self.completion_ids), len(generation.token_ids)
        self.completion_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.action_mask += [1] * count
        self.turn_ids += [len(self.turns)] * count
        self.authors += [Author.POLICY] * count
        turn = Turn(
            start=start,
            end=start + count,
            message=message,
            is_truncated=generation.stop == "length",
            generate_s=generate_s,
        )
        self.turns.append(turn)
        return turn

    def add_context(self, ids: Sequence[int], authors: Sequence[Author]) -> None:
        """Append what the template or the environment wrote."""
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.action_mask += [0] * len(ids)
        self.turn_ids += [-1] * len(ids)
        self.authors += authors

    def finish(self, stop_reason: StopReason, *, duration_s: float) -> Trajectory:
        """The trajectory as it stands."""
        return Trajectory(
            prompt_messages=self.prompt_messages,
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            action_mask=self.action_mask,
            logprobs=self.logprobs,
            turn_ids=self.turn_ids,
            authors=self.authors,
            turns=self.turns,
            stop_reason=stop_reason,
            example_id=self.request.example_id,
            generation=self.request.generation,
            seed=self.request.seed,
            error=self.error,
            duration_s=duration_s,
        )


def record_step(turn: Turn, reward: float, info: dict[str, Any], *, env_s: float) -> None:
    """Write what the environment said about a turn into the turn."""
    turn.reward = reward
    turn.env_s = env_s
    results = info.get("tool_results") or []
    turn.tool_results = [result for result in results if isinstance(result, ToolResult)]
    turn.reward_parts = {str(name): float(value) for name, value in (info.get("reward_parts") or {}).items()}
    turn.is_invalid = bool(info.get("is_invalid", bool(turn.message.get("malformed_tool_call"))))
