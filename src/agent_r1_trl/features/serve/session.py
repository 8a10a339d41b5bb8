"""A conversation with an agent: the training rollout, with a person who says the next message.

After every message the trajectory is that of an environment whose user says the same (`ToolEnv.next_user_message`),
token for token: prompt, limits, context policy and masks are those of a training with these settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.evaluation.agent import Agent
from agent_r1_trl.features.serve.events import Event, Listener
from agent_r1_trl.features.serve.players import Stage, StageSession, Tape
from agent_r1_trl.generation.base import SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.rollout import Draft, RolloutRequest, run_trajectory
from agent_r1_trl.rollout.context_policies import find_policy
from agent_r1_trl.rollout.summaries import check_room
from agent_r1_trl.rollout.thinking import check_thinking
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

_LIMIT_OF = {
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_COMPLETION_LENGTH: "max_completion_length",
    StopReason.INVALID_CALLS: "max_invalid_calls",
    StopReason.TIMEOUT: "rollout_timeout",
}


class ConversationError(RuntimeError):
    """A message could not be answered, and was taken back: the model, a tool or the environment failed.

    Args:
        message: what failed.
        stop_reason: how the trajectory ended.
    """

    def __init__(self, message: str, stop_reason: StopReason) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


class Conversation:
    """Messages of a user, and what the agent says and does.

    Use it from one event loop, one message at a time; `close` it at the end.

    Args:
        agent: model, chat format and limits, which count over the whole conversation.
        env_factory: makes the environment. It sees a row whose `prompt` and `question` are the first message; its
            rewards are not asked for.
        params: how tokens are drawn; greedy by default.
        seed: of sampling and of the environment.
        row: further columns that the environment reads.
        on_event: is told what happens, while it does.

    Raises:
        ValueError: the limits do not fit the model's chat format; see `RolloutRunner`.
    """

    def __init__(
        self,
        agent: Agent,
        env_factory: Callable[[], Any],
        *,
        params: SamplingParams | None = None,
        seed: int = 0,
        row: dict[str, Any] | None = None,
        on_event: Listener | None = None,
    ) -> None:
        self.agent, self.limits = agent, agent.limits.within(getattr(agent.generator, "max_model_length", None))
        find_policy(self.limits)
        check_room(agent.chat, self.limits)
        check_thinking(agent.chat, self.limits.context.policy)
        self.params, self.seed = params or SamplingParams(temperature=0.0), seed
        self.on_event = on_event
        self._env_factory = env_factory
        self._tape = Tape(agent.generator, agent.chat, self._tell)
        self._stage = Stage(env_factory, agent.chat.truncate, dict(row or {}), self._tell)
        self._marks: list[tuple[int, int]] = []
        """Where tape and stage stood before each message."""
        self._slot = TrajectorySlot()
        self.trajectory: Trajectory | None = None
        """The conversation so far; None before the first answer."""
        self.ended: str | None = None
        """Why the conversation cannot go on; None while it can."""

    @property
    def num_messages(self) -> int:
        """Number of messages of the user."""
        return len(self._marks)

    async def say(self, message: str | Sequence[Message]) -> Trajectory:
        """Say something and hear the answer, after whatever calls the agent makes.

        Args:
            message: text; the first one may be a list of messages, as a row's `prompt`.

        Returns:
            The whole conversation. If a limit or the environment has ended it, `ended` says so.

        Raises:
            ValueError: the conversation has ended, or the environment breaks the protocol.
            ConversationError: the message could not be answered. It is taken back, and the conversation stays open.
        """
        if self.ended is not None:
            raise ValueError(f"The conversation has ended: {self.ended}. Take the last message back, or start anew.")
        if self._marks and not isinstance(message, str):
            raise ValueError(f"message={message!r:.100}: only the first may be a list. Pass a string.")
        num_generations = len(self._tape.recorded)
        self._marks.append((num_generations, len(self._stage.steps)))
        self._stage.said.append(message if isinstance(message, str) else [dict(item) for item in message])
        self._stage.is_changed = False
        try:
            trajectory = await self._play()
        except BaseException:  # Ctrl-C as well
            await self._take_back(is_changed=self._stage.is_changed)
            raise
        reason = trajectory.stop_reason
        if reason.is_infrastructure_failure or len(self._tape.recorded) == num_generations:
            await self._take_back(is_changed=self._stage.is_changed)
            raise ConversationError(trajectory.error or self._limit(reason), reason)
        self.trajectory = trajectory
        self.ended = self._end_of(reason)
        return trajectory

    async def undo(self) -> bool:
        """Take the last message and everything after it back; False if there is none.

        The environment is made again and gets the earlier messages again. Tools that are plain functions of a
        `ToolEnv` are not called again for that; others are.
        """
        if not self._marks:
            return False
        await self._take_back(is_changed=True)
        self.ended, self.trajectory = None, None
        if self._marks:
            self.trajectory = await self._play()
        return True

    async def reset(self) -> None:
        """Forget everything; the next message begins another conversation."""
        await self._stage.forget()
        self._tape.recorded, self._marks, self.trajectory, self.ended = [], [], None, None
        self._slot = TrajectorySlot()

    async def close(self) -> None:
        """Close the environment."""
        await self._stage.leave()

    async def _play(self) -> Trajectory:
        request = RolloutRequest(example=self._stage.row(), example_id="chat", seed=self.seed)
        session = StageSession(self._stage, self._env_factory, self.agent.chat.truncate)
        self._tape.rewind()
        current_slot.set(self._slot)
        draft = Draft(request=request)
        return await run_trajectory(draft, session, self._tape, self.agent.chat, self.limits, self.params)

    async def _take_back(self, *, is_changed: bool) -> None:
        num_generations, num_steps = self._marks.pop()
        del self._tape.recorded[num_generations:], self._stage.steps[num_steps:], self._stage.said[-1:]
        if not self._marks:
            await self._stage.forget()
        elif is_changed:
            await self._stage.leave()

    def _end_of(self, reason: StopReason) -> str | None:
        if reason is not StopReason.DONE:
            return self._limit(reason)
        return None if self._stage.steps[-1].is_answer else "the environment has ended the episode"

    def _limit(self, reason: StopReason) -> str:
        if reason is StopReason.PROMPT_TOO_LONG:
            longest = self.limits.max_model_length
            return f"the prompt leaves no room for an answer within the model's limit of {longest} tokens"
        name = _LIMIT_OF[reason]
        value = getattr(self.limits, name)
        if reason is StopReason.MAX_COMPLETION_LENGTH and self.limits.max_model_length is not None:
            return f"{name}={value} or the model's own limit of {self.limits.max_model_length} tokens is reached"
        return f"{name}={value} is reached"

    def _tell(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)
