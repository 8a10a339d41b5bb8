"""Which context each turn is sampled after (`context_policy`).

A policy returns the messages of the next context. Its ids are put together from those that were sampled and rendered
already, as far as the messages are those of the trajectory; only what a policy changed is rendered anew. A context
that extends an earlier one goes on in its row, any other one opens a new row (`agent_r1_trl.rows`).

Covered here: the protocol, the policies of the package, ids of a context. Not covered: what a row is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.objects import import_object
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.limits import RolloutLimits, RolloutSettings
from agent_r1_trl.trajectory import Author, Message, Turn


@dataclass(frozen=True, kw_only=True)
class ContextView:
    """What a policy reads before a turn. It holds the trajectory's own records, which a policy must not change."""

    prompt_messages: Sequence[Message]
    turns: Sequence[Turn]
    """All turns so far, each with the observations that answered it; at least one."""
    messages: Sequence[Message]
    """The context as it goes on if nothing is rewritten: the last one, the last turn and its observations."""
    num_tokens: int
    """Length of that context."""
    max_tokens: int | None
    """What a context can hold, turn included, as the model or the engine says; None if neither does."""


class ContextPolicy(Protocol):
    """Decides what the policy gets to read. It depends on the view alone, so that a killed run can be resumed."""

    def __call__(self, view: ContextView) -> Sequence[Message]:
        """The messages of the next context; `view.messages` leaves it as it is.

        Messages that are taken over should be the view's own objects: their ids are then those that were sampled.
        """


@dataclass(frozen=True)
class Window:
    """The prompt and the last turns."""

    num_turns: int
    """Turns that stay."""
    num_tokens: int | None = None
    """A context of up to so many tokens stays whole; None: the window moves with every turn."""

    def __call__(self, view: ContextView) -> Sequence[Message]:
        """See `ContextPolicy`."""
        if self.num_tokens is not None and view.num_tokens <= self.num_tokens:
            return view.messages
        kept = view.turns[-self.num_turns :]
        return [*view.prompt_messages, *(message for turn in kept for message in messages_of(turn))]


@dataclass(frozen=True)
class DropObservations:
    """Everything, but of what answered the older turns only a note that says what was there."""

    num_turns: int
    """Last turns whose observations stay."""
    num_tokens: int | None = None
    """A context of up to so many tokens stays whole; None: with every turn another observation goes."""

    def __call__(self, view: ContextView) -> Sequence[Message]:
        """See `ContextPolicy`."""
        if self.num_tokens is not None and view.num_tokens <= self.num_tokens:
            return view.messages
        old = {id(message) for turn in view.turns[: -self.num_turns] for message in turn.observations}
        return [left_out(message) if id(message) in old else message for message in view.messages]


def left_out(observation: Message) -> Message:
    """The note in place of an observation; the observation itself where that is shorter.

    >>> left_out({"role": "tool", "name": "search", "content": "Paris is the capital of ..." * 9})["content"]
    '[243 characters of search left out]'
    """
    content = str(observation.get("content") or "")
    source = f" of {observation['name']}" if observation.get("name") else ""
    note = f"[{len(content)} characters{source} left out]"
    return {**observation, "content": note} if len(note) < len(content) else observation


def messages_of(turn: Turn) -> list[Message]:
    """A turn and what answered it."""
    return [turn.message, *turn.observations]


POLICIES: dict[str, Callable[[RolloutSettings], ContextPolicy | None]] = {
    "keep": lambda limits: None,
    "window": lambda limits: Window(limits.context_turns or 1, limits.context_tokens),
    "drop_observations": lambda limits: DropObservations(limits.context_turns or 1, limits.context_tokens),
}
"""Name in `context_policy` -> what makes the policy; None for one that never rewrites a context."""


def find_policy(limits: RolloutSettings) -> ContextPolicy | None:
    """The policy that `context_policy` names, or to which it is the path; None if no context is ever rewritten.

    Raises:
        ValueError: there is none, or it cannot be called.
    """
    name = limits.context_policy
    if name in POLICIES:
        return POLICIES[name](limits)
    if "." not in name and ":" not in name:
        raise ValueError(
            f"context_policy={name!r} is not one of {', '.join(map(repr, POLICIES))}. Set context_policy to one of "
            "them, or to the path of your own function, such as my_module.my_policy."
        )
    target: Any = import_object(name, "context_policy")
    if not callable(target):
        raise ValueError(
            f"context_policy={name!r} is of type {type(target).__name__}, which cannot be called. Name a function "
            "from a ContextView to a list of messages."
        )
    return target  # type: ignore[no-any-return]


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
        self._messages: Sequence[Message] = list(draft.prompt_messages)
        """Of the present context."""
        self._deltas: list[list[int]] = []
        """Of each turn, the ids that followed its sampled ones."""

    def go_on(self, observations: list[Message], ids: list[int], authors: list[Author]) -> bool:
        """Answer the last turn, after which another one can be sampled; False, and no change, if there is no room.

        Args:
            observations: what the environment answered.
            ids: (N,) what closes the turn, the rendered observations and the next generation prompt.
            authors: (N,)
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
        turn.observations = observations
        self._deltas.append(ids)
        messages = self._rewritten(turn, len(draft.context_ids) + len(ids))
        context = self._ids_of(messages)
        if len(ids) >= num_left or (limits.max_model_length or len(context) + 1) <= len(context):
            turn.observations = []
            return False
        self._messages = messages
        draft.rewrite_context(context, authors)
        return True

    def _rewritten(self, turn: Turn, num_tokens: int) -> Sequence[Message]:
        """What the policy makes of the context.

        Raises:
            ValueError: it returned no messages.
        """
        assert self._policy is not None
        view = ContextView(
            prompt_messages=self._draft.prompt_messages,
            turns=self._draft.turns,
            messages=[*self._messages, *messages_of(turn)],
            num_tokens=num_tokens,
            max_tokens=self._limits.max_model_length,
        )
        messages = self._policy(view)
        if not isinstance(messages, list | tuple) or not all(
            isinstance(message, dict) and "role" in message for message in messages
        ):
            raise ValueError(
                f"context_policy={self._limits.context_policy!r} returned {messages!r:.200}. Return a list of "
                "messages, or view.messages to leave the context as it is."
            )
        return messages

    # ---------------------------------------------------------------- ids

    def _ids_of(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a context, those that were sampled wherever a message is a turn of this trajectory."""
        prompt = self._draft.prompt_messages
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
