"""The contexts that the turns of a trajectory are sampled after.

A policy (`agent_r1_trl.rollout.context_policies`) returns the messages of the next context. Its ids are put together
from those that were sampled and rendered already, as far as the messages are those of the trajectory; only what a
policy changed is rendered anew. A context that extends an earlier one goes on in its row, any other one opens a new
row (`agent_r1_trl.rows`).

Covered here: ids of a context. Not covered: what a row is trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.rollout.context_policies import (
    ContextView,
    find_policy,
    has_row_per_turn,
    is_context,
    messages_of,
)
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvironmentFailure
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.trajectory import Author, Message, Turn


class Contexts:
    """The contexts of one trajectory.

    Args:
        draft: of the trajectory, with its prompt.
        chat: the model's chat format.
        tools: schemas of the environment's tools.
        limits: with the policy's settings.
    """

    def __init__(self, draft: Draft, chat: ChatFormat, tools: Any, limits: RolloutLimits) -> None:
        self._draft, self._chat, self._tools, self._limits = draft, chat, tools, limits
        self._policy = find_policy(limits)
        self._history = chat.history(tools) if limits.context_policy == "strip_thinking" else None
        self._messages: Sequence[Message] = list(draft.prompt_messages)
        """Of the present context."""
        self._deltas: list[list[int]] = []
        """Of each turn, the ids that followed its sampled ones."""

    def go_on(
        self, observations: list[Message], ids: list[int], authors: list[Author], next_context: Any = None
    ) -> bool:
        """Answer the last turn, after which another one can be sampled; False, and no change, if there is no room.

        Args:
            observations: what the environment answered.
            ids: (N,) what closes the turn, the rendered observations and the next generation prompt.
            authors: (N,)
            next_context: messages of the next context, if the environment gave them. Policies read it.

        Raises:
            EnvironmentFailure: the policy, or what it or the environment returned, makes no context.
        """
        draft, limits = self._draft, self._limits
        turn = draft.turns[-1]
        if self._policy is None:
            if len(ids) >= limits.room(*draft.lengths):
                return False
            turn.observations = observations
            draft.add_context(ids, authors)
            return True
        assert limits.max_completion_length is not None
        num_left = limits.max_completion_length - draft.lengths[1]
        turn.observations, turn.next_context = observations, _checked(next_context)
        self._deltas.append(ids)
        messages, context = self._rewritten(turn, len(draft.context_ids) + len(ids))
        if len(ids) >= num_left or (limits.max_model_length or len(context) + 1) <= len(context):
            turn.observations, turn.next_context = [], None
            return False
        self._messages = messages
        draft.rewrite_context(context, ids, authors, opens_row=has_row_per_turn(self._policy))
        return True

    def _rewritten(self, turn: Turn, num_tokens: int) -> tuple[Sequence[Message], list[int]]:
        """What the policy makes of the context, and its ids."""
        assert self._policy is not None
        view = ContextView(
            prompt_messages=self._draft.prompt_messages,
            turns=self._draft.turns,
            messages=[*self._messages, *messages_of(turn)],
            num_tokens=num_tokens,
            max_tokens=self._limits.max_model_length,
        )
        name = f"context_policy={self._limits.context_policy!r}"
        try:
            messages = self._policy(view)
        except Exception as error:
            raise EnvironmentFailure(f"{name} raised {type(error).__name__}: {error}") from error
        if not is_context(messages):
            raise EnvironmentFailure(
                f"{name} returned {messages!r:.200}. Return a list of messages, or view.messages to leave the context "
                "as it is."
            )
        try:
            return messages, self._ids_of(messages)
        except Exception as error:
            raise EnvironmentFailure(
                f"{name}: the chat template refuses its messages: {type(error).__name__}: {error}"
            ) from error

    # ---------------------------------------------------------------- ids

    def _ids_of(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a context, those that were sampled wherever a message is a turn of this trajectory."""
        prompt = self._draft.prompt_messages
        if self._history is not None and (shown := self._history.encode(messages, len(prompt))) is not None:
            return shown
        if list(messages[: len(prompt)]) != prompt:
            return self._rendered(messages)
        ids, position = list(self._draft.prompt_ids), len(prompt)
        while position < len(messages):
            index = self._turn_of(messages[position])
            if index is None:
                return self._rendered(messages)
            following = position + 1
            while following < len(messages) and messages[following].get("role") != "assistant":
                following += 1
            ids += self._sampled(index) + self._delta(index, list(messages[position + 1 : following]))
            position = following
        return ids

    def _turn_of(self, message: Message) -> int | None:
        turns = self._draft.turns
        for index in reversed(range(len(turns))):
            if turns[index].message is message:
                return index
        return next((index for index in reversed(range(len(turns))) if turns[index].message == message), None)

    def _sampled(self, index: int) -> list[int]:
        turn = self._draft.turns[index]
        return self._draft.completion_ids[turn.start : turn.end]

    def _delta(self, index: int, observations: list[Message]) -> list[int]:
        """The ids between a turn and the next one."""
        turn, delta = self._draft.turns[index], self._deltas[index]
        if observations == turn.observations:
            return delta
        rendered, _ = self._chat.encode_observations(turn.message, observations, self._tools or None)
        closing = self._chat.encode_turn_end(self._sampled(index), stopped=not turn.is_truncated)
        return [*closing, *rendered]

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages that are not the trajectory's own; what looks like a special token in them stays text."""
        hide = self._chat.encoder.hide
        safe = [
            hide(message, special_only=True) if message["role"] == "assistant" else message for message in messages
        ]
        return self._chat.encode_prompt(safe, self._tools or None)


def _checked(next_context: Any) -> list[Message] | None:
    """A copy of the context that an environment gave, which stays as it is whatever the environment does with it."""
    if next_context is None:
        return None
    if not is_context(next_context):
        raise EnvironmentFailure(
            f"step returned info['next_context']={next_context!r:.200}, which is no context. Return a list of "
            "messages such as [{'role': 'user', 'content': '...'}], or leave it out."
        )
    return [copy.deepcopy(message) for message in next_context]
