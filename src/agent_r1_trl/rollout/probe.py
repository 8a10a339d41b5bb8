"""Calls of a rollout that can be made again: how a tool that failed is asked whether it works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.rollout.env_session import EnvSession
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.trajectory import Message, Trajectory

PROBE_TIMEOUT_S = 120.0


@dataclass(kw_only=True, frozen=True)
class RecordedCall:
    """A call, and the turns that lead to it."""

    tool: str
    request: RolloutRequest
    messages: list[Message]
    """Assistant messages of the turns up to the call's, which is the last."""

    def to_json(self) -> str | None:
        """The call as text; None if its row or its messages hold what JSON does not."""
        try:
            text = json.dumps({**vars(self), "request": vars(self.request)})
            return text if self.from_json(text) == self else None
        except (TypeError, ValueError):
            return None

    @classmethod
    def from_json(cls, text: str) -> RecordedCall:
        """The inverse of `to_json`."""
        record = json.loads(text)
        return cls(**{**record, "request": RolloutRequest(**record["request"])})


def recorded_calls(
    trajectories: Sequence[Trajectory], requests: Sequence[RolloutRequest], *, that_failed: bool, limit: int
) -> dict[str, list[RecordedCall]]:
    """For each tool at most `limit` calls, those of the earliest turns first.

    `that_failed` says whether calls are looked for that failed, or that succeeded.
    """
    found: dict[str, list[RecordedCall]] = {}
    for trajectory, request in zip(trajectories, requests, strict=True):
        for index, turn in enumerate(trajectory.turns):
            messages = [turn.message for turn in trajectory.turns[: index + 1] if not turn.is_summary]
            for name in {result.call.name for result in turn.tool_results if result.is_error is that_failed}:
                call = RecordedCall(tool=name, request=request, messages=messages)
                found[name] = sorted([*found.get(name, []), call], key=lambda call: len(call.messages))[:limit]
    return found


async def succeeds(call: RecordedCall, env_factory: Callable[[], Any], truncate: Callable[[str, int], str]) -> bool:
    """Whether the call succeeds, made again in a fresh environment after the turns that led to it."""
    session = EnvSession(env_factory, truncate=truncate)

    async def repeat() -> bool:
        await session.reset(call.request)
        for message in call.messages:
            _, _, _, info = await session.step(message)
        results = [result for result in info.get("tool_results") or () if result.call.name == call.tool]
        return any(not result.is_error for result in results)

    try:
        return await asyncio.wait_for(repeat(), PROBE_TIMEOUT_S)
    except Exception:  # whatever it is, the call did not succeed
        return False
    finally:
        await session.close()
