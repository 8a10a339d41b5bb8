"""The contexts that the turns of a trajectory are sampled after.

A policy (`context_policies.py`) returns the messages of the next context. Its ids are put together from those that
were sampled and rendered already, as far as the messages are those of the trajectory; only what a policy changed is
rendered anew. A context that extends an earlier one goes on in its row, any other one opens a new row.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.rollout.context_policies import (
    POLICIES,
    STRIP_POLICY,
    ContextView,
    find_policy,
    is_context,
    messages_of,
)
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.env_session import EnvironmentFailure, named
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.trajectory import Author, Message, Turn

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema


class Contexts:
    """The contexts of one trajectory, whose draft has its prompt; `tools`: schemas of the environment's."""

    def __init__(self, draft: Draft, chat: ChatFormat, tools: Sequence[Schema] | None, limits: RolloutLimits) -> None:
        self._draft = draft
        self._chat = chat
        self._tools = tools
        self._limits = limits
        self._policy = find_policy(limits)
        self._history = chat.history(tools) if limits.context.policy == STRIP_POLICY else None
        self._originals: dict[int, Message] = {}
        """Identity of a message as policies see it -> the trajectory's own. Policies see copies, made once."""
        self._prompt = self._shown(draft.prompt_messages)
        self._turns: list[Turn] = []
        """As policies see them."""
        self._messages: Sequence[Message] = self._prompt
        """Messages of the present context."""
        self._turn_by_id: dict[int, int] = {}
        self._turn_by_text: dict[str, int] = {}
        """A message's identity, and what it says -> its turn: finding it costs the same after any number of turns."""
        self._deltas: list[list[int]] = []
        """The ids that followed the sampled ones of each turn."""
        self._rendered_deltas: dict[int, tuple[list[Message], list[int]]] = {}
        """Turn -> messages that took the place of what answered it, and what they were rendered to."""
        self._is_ours = limits.context.policy in POLICIES
        """The policy is one of the package, which changes no message and reuses none for another text."""
        self._last: tuple[list[Message], dict[int, int]] = ([], {})
        """The last context: its messages, and how many ids stand before each of its turns, by position."""

    def go_on(
        self,
        observations: list[Message],
        ids: list[int],
        authors: list[Author],
        next_context: list[Message] | None = None,
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
        if next_context is not None and not is_context(next_context):
            raise EnvironmentFailure(
                f"step returned info['next_context']={next_context!r:.200}, which is no context. Return a list of "
                "messages such as [{'role': 'user', 'content': '...'}], or leave it out."
            )
        assert limits.max_completion_length is not None
        room = limits.max_completion_length - draft.lengths[1]
        # A copy, which stays as it is whatever the environment does with its own.
        turn.observations, turn.next_context = observations, copy.deepcopy(next_context)
        self._add(turn, ids)
        messages, num_same, context = self._rewritten(sum(draft.lengths) + len(ids))
        opens_row = limits.context.policy == "step"  # every turn is a row of its own
        if num_same + len(context) >= (limits.max_model_length or math.inf) or not draft.rewrite_context(
            context, ids, authors, num_same=num_same, opens_row=opens_row, room=room
        ):
            turn.observations, turn.next_context = [], None
            return False
        self._messages = messages
        return True

    def _add(self, turn: Turn, delta: list[int]) -> None:
        """Take note of the last turn."""
        index = len(self._turns)
        given = None if turn.next_context is None else self._shown(turn.next_context)
        (said,) = self._shown([turn.message])
        observations = self._shown(turn.observations)
        self._turns.append(replace(turn, message=said, observations=observations, next_context=given))
        self._deltas.append(delta)
        self._turn_by_id[id(said)] = index
        self._turn_by_text[repr(turn.message)] = index

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The copies that policies see."""
        shown = [copy.deepcopy(message) for message in messages]
        self._originals |= {id(copied): message for copied, message in zip(shown, messages, strict=True)}
        return shown

    def _rewritten(self, num_tokens: int) -> tuple[list[Message], int, list[int]]:
        """The context as the policy rewrites it, and its ids as `_ids_of` gives them."""
        assert self._policy is not None
        view = ContextView(
            prompt_messages=self._prompt,
            turns=self._turns,
            messages=[*self._messages, *messages_of(self._turns[-1])],
            num_tokens=num_tokens,
            max_tokens=self._limits.max_model_length,
        )
        name = f"context.policy={self._limits.context.policy!r}"
        with named(what=f"{name} raised "):
            messages = self._policy(view)
        if not self._is_ours:
            self._check(messages, name)
        with named(what=f"{name}: the chat template refuses its messages: "):
            messages = list(messages)
            return messages, *self._ids_of(messages)

    def _check(self, messages: Any, name: str) -> None:
        """Refuse what a user's policy returned."""
        if not is_context(messages):
            problem = f"returned {messages!r:.200}. Return a list of messages, or view.messages"
        elif any(self._originals.get(id(message), message) != message for message in messages):
            problem = "changed a message of its view. Return another one in its place, such as {**message, ...}"
        else:
            return
        raise EnvironmentFailure(f"{name} {problem}.")

    def _ids_of(self, messages: list[Message]) -> tuple[int, list[int]]:
        """Ids of a context, the sampled ones of every turn after which no message of the model is a policy's.

        Returns:
            how many ids at the start are those of the last context, and the ids after them.
        """
        prompt = self._draft.prompt_messages
        if self._history is not None and (shown := self._history.encode(messages, len(prompt))) is not None:
            return shown
        head = len(prompt) if messages[: len(prompt)] == prompt else 0
        _, lengths = self._last
        kept = self._num_kept(messages)  # the beginning costs the same after any number of turns
        turns = {}
        for position in reversed(range(max(head, kept), len(messages))):
            if messages[position]["role"] == "assistant":
                index = self._turn_of(messages[position])
                if index is None or position == 0:
                    kept = 0
                    break
                turns[position] = index
        starts = [*sorted(turns), len(messages)]
        if kept:
            num_same, ids = lengths[kept], []
            while lengths and next(reversed(lengths)) >= kept:  # the other turns may be hundreds
                lengths.popitem()
        else:
            before, lengths = messages[: starts[0]], {}
            num_same = 0
            ids = list(self._draft.prompt_ids) if head == len(before) else self._rendered(before)
        for start, end in itertools.pairwise(starts):
            lengths[start] = num_same + len(ids)
            ids += self._sampled(turns[start]) + self._delta(turns[start], messages[start + 1 : end])
        if self._is_ours:
            self._last = (messages, lengths)
        return num_same, ids

    def _num_kept(self, messages: list[Message]) -> int:
        """How many messages begin both this context and the last one, up to a turn of the latter; 0 for none."""
        known, lengths = self._last
        is_same = [*map(operator.is_, messages, known), False]
        same = min(is_same.index(False), len(messages) - 1)
        return next((position for position in reversed(lengths) if position <= same), 0)

    def _turn_of(self, message: Message) -> int | None:
        index = self._turn_by_id.get(id(message))
        return self._turn_by_text.get(repr(message)) if index is None else index

    def _sampled(self, index: int) -> list[int]:
        turn = self._draft.turns[index]
        return self._draft.completion_ids[turn.start : turn.end]

    def _delta(self, index: int, observations: list[Message]) -> list[int]:
        """The ids between a turn and the next one."""
        turn = self._draft.turns[index]
        if observations == turn.observations:
            return self._deltas[index]
        known, delta = self._rendered_deltas.get(index, (None, []))
        if known != observations:
            rendered, _ = self._chat.encode_observations(turn.message, observations, self._tools or None)
            closing = self._chat.encode_turn_end(self._sampled(index), stopped=not turn.is_truncated)
            delta = [*closing, *rendered]
            self._rendered_deltas[index] = ([dict(message) for message in observations], delta)
        return delta

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages that are not the trajectory's own; what looks like a special token in them stays text."""
        hide = self._chat.encoder.hide
        safe = [
            hide(message, special_only=True) if message["role"] == "assistant" else message for message in messages
        ]
        return self._chat.encode_prompt(safe, self._tools or None)
