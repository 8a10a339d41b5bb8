"""Summaries: the policy writes down what it needs, and goes on after that (`context.policy="summarise"`).

When the context would reach `context.tokens`, or after `context.turns` turns, the policy is asked for a summary by a
user message that follows the last observations. What it samples is a turn like any other, trained in the row it was
written in, but the environment does not see it. The next context, which opens a row, is

    prompt + summary + last turn and what answered it

The last turn is there so that nothing unanswered is lost; it is left out where the context would be too long with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.chat.rendering import calling, tool_answer
from agent_r1_trl.generation.base import Generation
from agent_r1_trl.rollout.context_policies import SUMMARISE
from agent_r1_trl.rollout.draft import Draft
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.trajectory import Author, Message

if TYPE_CHECKING:
    from agent_r1_trl.tools.json_schema import Schema

HEADING = "Summary of your work so far, written by you:\n\n"
NO_SUMMARY = "(You wrote no summary.)"
CUT = "\n[The summary was cut off here.]"
DEFAULT_PROMPT = (
    "Your context is almost full. Before you go on, write a summary of your work so far, in at most {summary_tokens} "
    "tokens. From then on you will see only the task, this summary and your last turn. Say what you have found out "
    "(keep names, numbers and results exactly), what you have tried and what came of it, and what is to be done next. "
    "Write plain text, and call no tool now."
)
"""The request for a summary where `context.summary_prompt` is None; `{summary_tokens}` becomes the number."""


def summary_request(settings: RolloutLimits) -> dict[str, str]:
    """The user message that asks for a summary."""
    prompt = settings.context.summary_prompt or DEFAULT_PROMPT
    return {"role": "user", "content": prompt.replace("{summary_tokens}", str(settings.context.summary_tokens))}


class Summaries:
    """The summaries of one trajectory; none are asked for under another `context.policy`."""

    def __init__(self, draft: Draft, chat: ChatFormat, tools: Sequence[Schema] | None, limits: RolloutLimits) -> None:
        self._draft = draft
        self._chat = chat
        self._tools = tools
        self._limits = limits
        self._message = summary_request(limits)
        self._num_before = 0
        """Turns up to the last summary, with it."""

    def ask(self, observations: list[Message], closing: list[int], ids: list[int]) -> bool:
        """Answer the last turn and ask for a summary, which is then to be sampled; False if none is due or has room.

        `closing` are the ids that close the turn, `ids` (N,) the rendered observations.
        """
        draft, limits = self._draft, self._limits
        if limits.context.policy != SUMMARISE:
            return False
        num_turns = len(draft.turns) - self._num_before
        length = sum(draft.lengths) + len(closing) + len(ids)
        is_full = limits.context.tokens is not None and length > limits.context.tokens
        if not is_full and num_turns < (limits.context.turns or num_turns + 1):
            return False
        assert limits.context.summary_tokens is not None
        asked = [*observations, self._message]
        if observations and observations[-1].get("role") == "tool" and not _takes_users_after_tools(self._chat):
            asked = _joined(observations, self._message["content"])
        asked_ids, authors = self._chat.encode_observations(draft.turns[-1].message, asked, self._tools or None)
        # One token of the turn after it has room, too.
        if len(closing) + len(asked_ids) + limits.context.summary_tokens >= limits.room(*draft.lengths):
            return False
        draft.turns[-1].observations = observations
        draft.add_context([*closing, *asked_ids], [*[Author.TEMPLATE] * len(closing), *authors])
        return True

    def take(self, answer_ids: list[int], generation: Generation, message: Message, *, generate_s: float) -> bool:
        """Add the summary that was sampled and open the context after it; False if that has no room for a turn.

        `answer_ids`: (N,) what answered the last turn, rendered.
        """
        draft, limits = self._draft, self._limits
        answered = draft.turns[-1]
        # Calls in it are not made, so they are not recorded as calls.
        message = {name: value for name, value in message.items() if name not in ("tool_calls", "malformed_tool_call")}
        turn = draft.add_turn(generation, message, generate_s=generate_s)
        turn.summary_request = dict(self._message)
        prompt = self._next_prompt(self._text_of(turn.message, turn.is_truncated))
        base = self._chat.encode_prompt(prompt, self._tools or None)
        last = [*draft.completion_ids[answered.start : answered.end], *answer_ids]
        longest = (limits.max_model_length or len(base) + len(last) + 1) - 1
        if len(base) > longest:
            return False
        if len(base) + len(last) <= min(longest, limits.context.tokens or longest):
            base += last
        draft.rewrite_context(base, [], [])
        self._num_before = len(draft.turns)
        return True

    def _text_of(self, message: Message, is_cut: bool) -> str:
        """The summary as it stands in the next context: no reasoning, no calls, and no longer than was asked."""
        text = str(message.get("content") or "").strip()
        text = self._chat.truncate(text, self._limits.context.summary_tokens or 0)
        if not text:
            return HEADING + NO_SUMMARY
        return HEADING + text + (CUT if is_cut else "")

    def _next_prompt(self, text: str) -> list[Message]:
        """The prompt with the summary at its end: in its last message, as some templates want roles to alternate."""
        text = self._chat.encoder.hide(text)  # what looks like a control token stays text
        prompt = self._draft.prompt_messages
        if prompt[-1].get("role") == "user":
            return _joined(prompt, text)
        return [*prompt, {"role": "user", "content": text}]


def check_room(chat: ChatFormat, limits: RolloutLimits) -> None:
    """Refuse limits under which a context that is full could never hold the request and its summary."""
    if limits.context.policy != SUMMARISE or limits.max_model_length is None or limits.context.tokens is None:
        return
    ids, _ = chat.encode_observations({"role": "assistant", "content": ""}, [summary_request(limits)])
    most = limits.max_model_length - len(ids) - (limits.context.summary_tokens or 0) - 1
    if limits.context.tokens >= most:
        raise ValueError(
            f"context.tokens={limits.context.tokens} with context.summary_tokens={limits.context.summary_tokens}: the "
            f"request for a summary has {len(ids)} tokens, and the model or engine holds {limits.max_model_length}, "
            f"so that a full context would have no room for its summary. Set context.tokens below {most} (well below, "
            "because the turn and the observations that fill the context come on top), or lower "
            "context.summary_tokens."
        )


def _joined(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text at the end of the last one."""
    *before, last = messages
    content = as_text(last.get("content"), "the last message")
    longer = f"{content}\n\n{text}" if content else text
    return [*before, {**last, "content": longer}]


def _takes_users_after_tools(chat: ChatFormat) -> bool:
    """Whether the template renders a user message after a tool's; Mistral's want a turn between them."""
    question: Message = {"role": "user", "content": "."}
    try:
        chat.encode_prompt([question, calling(), tool_answer("."), question])
    except ChatFormatError:
        return False
    return True
