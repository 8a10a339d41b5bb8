"""Context policies: which messages each turn gets to read (`context.policy`); `contexts.py` makes ids of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agent_r1_trl.objects import OwnObject, own_object
from agent_r1_trl.settings import Count, SettingsGroup, Words, setting
from agent_r1_trl.trajectory import Message, Turn

if TYPE_CHECKING:
    from agent_r1_trl.chat.format import ChatFormat
    from agent_r1_trl.rollout.limits import RolloutSettings


STRIP_POLICY = "strip_thinking"
"""The context policy that renders every context anew."""
SUMMARISE = "summarise"
"""The one under which the policy sums up its work (`summaries.py`)."""


@dataclass(kw_only=True)
class ContextSettings(SettingsGroup):
    """The setting `context`: a policy and what it reads."""

    main_key: ClassVar[str | None] = "policy"

    policy: str = setting(
        "keep",
        "What each turn reads: 'keep', 'window', 'drop_observations', 'step', 'summarise', 'strip_thinking' or "
        "'agent' (docs/long-agents.md). Or your own: a function, or its path, my_module.my_policy.",
    )
    turns: Count | None = setting(
        None,
        "Number of last turns that `policy` leaves as they are (None for 'step': 1); with 'summarise', number of "
        "turns before a summary.",
    )
    tokens: Count | None = setting(
        None,
        "Rewrite a context only where it would have more tokens than this. None: rewrite it before every turn "
        "('summarise': as `turns` says).",
    )
    summary_tokens: Count | None = setting(None, "Maximum number of tokens of a summary, reasoning included.")
    summary_prompt: Words | None = setting(
        None,
        "User message that asks for a summary; {summary_tokens} in it stands for the number. None: one in plain "
        "English.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            form = "a function from a ContextView to a list of messages"
            self.policy = own_object("context.policy", self.policy, POLICIES, form)


@dataclass(frozen=True, kw_only=True)
class ContextView:
    """The context policy's input before a turn. Its messages are not to be changed: return others in their place."""

    prompt_messages: Sequence[Message]
    turns: Sequence[Turn]
    """All turns so far, each with the observations that answered it; at least one."""
    messages: Sequence[Message]
    """The context as it goes on if nothing is rewritten: the last one, the last turn and its observations."""
    num_tokens: int
    """Length of that context."""
    max_tokens: int | None
    """The size of a context, turn included, as the model or the engine says; None if neither does."""


ContextPolicy = Callable[[ContextView], Sequence[Message]]
"""Decides what the policy gets to read: the messages of the next context; `view.messages` leaves it as it is.

It depends on the view alone, so that a killed run can be resumed. Messages that are taken over should be the view's
own objects: their ids are then those that were sampled.
"""


def window(view: ContextView, num_turns: int) -> Sequence[Message]:
    """The prompt and the last turns."""
    return [*view.prompt_messages, *(message for turn in view.turns[-num_turns:] for message in messages_of(turn))]


def step(view: ContextView, num_turns: int) -> Sequence[Message]:
    """The environment's own next context; the window where it gives none."""
    given = view.turns[-1].next_context
    return window(view, num_turns) if given is None else given


def drop_observations(view: ContextView, num_turns: int) -> Sequence[Message]:
    """Everything, but of what answered the turns before the last ones only a note that says what was there."""
    messages = list(view.messages)
    position = len(messages)
    for age, turn in enumerate(reversed(view.turns)):  # the context ends with them
        for message in reversed(messages_of(turn)):
            position -= 1
            if messages[position] is not message:  # it is a note already, and so are those before it
                return messages
            if age >= num_turns and message is not turn.message:
                messages[position] = left_out(message)
    return messages


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


POLICIES: dict[str, Callable[[ContextView, int], Sequence[Message]] | None] = {
    "keep": None,
    "agent": None,  # an environment with `drive` opens its contexts itself
    "window": window,
    SUMMARISE: None,  # contexts only grow until a summary opens another (`summaries.py`)
    "drop_observations": drop_observations,
    "step": step,
    # Everything as the chat template shows it: `agent_r1_trl.chat.reasoning` renders the same messages anew.
    STRIP_POLICY: lambda view, num_turns: view.messages,
}
"""Name in `context.policy` -> what rewrites the context; None where nothing decides before each turn."""


def is_context(messages: object) -> bool:
    """Whether this is a list of messages, at least one."""
    return (
        isinstance(messages, list | tuple)
        and bool(messages)
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )


def find_policy(limits: RolloutSettings) -> ContextPolicy | None:
    """The policy that `context.policy` names, or that it is; None if none decides before each turn."""
    context = limits.context
    if isinstance(context.policy, OwnObject):
        return context.policy.target
    rewrite = POLICIES[context.policy]
    if rewrite is None:
        return None

    def policy(view: ContextView) -> Sequence[Message]:
        is_short = context.tokens is not None and view.num_tokens <= context.tokens
        return view.messages if is_short else rewrite(view, context.turns or 1)

    return policy


def check_thinking(chat: ChatFormat, policy: str) -> None:
    """Refuse a `ChatFormat` and a policy that were not made for each other."""
    strips = chat.reasoning_rule is not None
    if strips != (policy == STRIP_POLICY):
        raise ValueError(
            f"context.policy={policy!r} with a chat format {'' if strips else 'not '}made by strips_reasoning=True: "
            f"the policy {STRIP_POLICY!r} needs that format, and no other one does. Set "
            f"context={STRIP_POLICY!r} and ChatFormat(tokenizer, strips_reasoning=True), or neither."
        )
