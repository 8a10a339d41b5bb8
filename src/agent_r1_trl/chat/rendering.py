"""Renders messages with one chat template, and knows what particular templates demand of whoever renders them.

What a template writes after an assistant turn is found by rendering stand-in turns. Such a turn says a mark that no
data contains. Everything the template writes after the mark, up to the end-of-turn token, closes the turn; everything
after that token belongs to the observations.

Not covered: ids (`encoding.py`), which template it is (`templates.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.encoding import TextEncoder
from agent_r1_trl.chat.errors import GENERAL_FIX, ChatFormatError
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_r1_trl.tools.json_schema import Schema

CALL_ID = "c00000000"
"""An id of 9 letters and digits: Mistral's templates take no other."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "e"}}},
    },
}
"""Shown to templates that cannot be rendered without tools."""


class ChatTemplate:
    """One chat template of one tokenizer.

    Args:
        tokenizer: renders; it is not changed.
        source: the template.
        kwargs: passed to the template in every rendering.
        plain: the template of conversations without tools, if the tokenizer has another one for those.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        kwargs: dict[str, Any] | None = None,
        *,
        plain: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.plain = plain
        self.kwargs = dict(kwargs or {})
        self._reads_thinking = re.search(r"\.thinking\b|[\"']thinking[\"']", source) is not None
        # The generation prompt of a template that writes it after every conversation, asked or not.
        self._unasked = ""
        self.no_tools: list[dict[str, Any]] | None = None
        """The value of `tools` where there are none; some templates cannot count None."""
        self.probe_tools: list[dict[str, Any]] | None = [PROBE_TOOL] if plain else None
        """The value of `tools` where a rendering is only a probe: Hermes' template for tools needs some."""
        question: Message = {"role": "user", "content": "?"}
        if not self.attempt([question]):
            self.no_tools, self.probe_tools = [], [PROBE_TOOL]
        eos = getattr(tokenizer, "eos_token", None)
        begun = self.attempt([question], generation_prompt=True)
        if eos and eos in begun.rpartition("?")[2] and begun == self.attempt([question]):
            self._unasked = begun.rpartition(eos)[2]

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] | None, *, generation_prompt: bool) -> str:
        """Text of a conversation; whatever the template raises propagates."""
        messages = [self._readable(message) for message in messages]
        try:
            text = self._apply(messages, tools, generation_prompt)
        except TypeError:
            # DeepSeek's templates concatenate the arguments of a call, which must then be text.
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == messages:
                raise
            text = self._apply(as_text, tools, generation_prompt)
        return text if generation_prompt else text.removesuffix(self._unasked)

    def probe(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """`render` for a conversation that no model will see."""
        return self.render(messages, self.probe_tools, generation_prompt=generation_prompt)

    def attempt(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """`probe`, or "" if the template refuses the conversation."""
        try:
            return self.probe(messages, generation_prompt=generation_prompt)
        except Exception:  # templates raise what they like
            return ""

    def _apply(self, messages: Sequence[Message], tools: Sequence[Schema] | None, generation_prompt: bool) -> str:
        source = self.source
        if not tools and self.plain:
            source = self.plain
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else self.no_tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self.kwargs,
        )
        return str(text)

    def _readable(self, message: Message) -> Message:
        """GPT-OSS and LFM2.5 call reasoning `thinking`."""
        if self._reads_thinking and message.get("reasoning_content") and "thinking" not in message:
            return {**message, "thinking": message["reasoning_content"]}
        return message


def _with_text_arguments(message: Message) -> Message:
    """The message, arguments of its calls as JSON texts."""
    changed = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        changed.append({**call, "function": function})
    if not changed:
        return message
    return {**message, "tool_calls": changed}


# ---------------------------------------------------------------- what a template can do

_MARKS = ("name_a8f3e2b1", "key_b9d4f5c2", "value_d6e7a9f3", "content_c4f9a8e2")
_HI: Message = {"role": "user", "content": "hi"}


def calling(name: str = "f", arguments: object = None, **more: object) -> Message:
    """An assistant message with one call."""
    if arguments is None:
        arguments = {"x": 1}
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": CALL_ID, "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def tool_answer(content: str, name: str = "f") -> Message:
    """The answer to the call of `calling`."""
    return {"role": "tool", "name": name, "tool_call_id": CALL_ID, "content": content}


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the template shows a call's name and arguments and the tool's answer."""
    name, key, value, content = _MARKS
    text = template.attempt([_HI, calling(name, {key: value}), tool_answer(content, name)])
    return all(mark in text for mark in _MARKS)


def preserves_prefixes(template: ChatTemplate, **reasoning: str) -> bool:
    """Whether a turn with a call stays as it is when the tool's answer follows."""
    turns = [_HI, calling(_MARKS[0], {}, **reasoning)]
    alone = template.attempt(turns)
    whole = template.attempt([*turns, tool_answer("dummy", _MARKS[0])], generation_prompt=True)
    if not alone or not whole:
        return False
    # Nemotron Nano's template does not show the calls of the last message at all; a rollout never renders it last.
    shows_last_call = _MARKS[0] in alone
    return whole.startswith(alone) or not shows_last_call


def ends_turns(template: ChatTemplate) -> bool:
    """Whether anything follows what an assistant said (GLM's published template leaves its turns open)."""
    text = template.attempt([_HI, {"role": "assistant", "content": "said"}])
    return bool(text) and not text.endswith("said")


def keeps_reasoning(template: ChatTemplate) -> bool:
    """Whether a turn with reasoning stays as it is when a user message follows."""
    turns = [_HI, {"role": "assistant", "content": "said", "reasoning_content": "thought"}]
    alone = template.attempt(turns)
    whole = template.attempt([*turns, _HI])
    return bool(alone and whole) and whole.startswith(alone)


# ---------------------------------------------------------------- what stands between turns

# Markers of reasoning in any family's generation prompt, opening and closing.
_REASONING_MARKS = r"</?(?:\w+:)?think>|\[/?THINK\]"
_QUESTION: Message = {"role": "user", "content": "."}


@dataclass(frozen=True)
class TurnEnd:
    """How one kind of assistant turn ends."""

    lead: str
    """The template's text between the stand-in and the end-of-turn token."""
    sampled: str
    """The end-of-turn token that the policy is expected to sample."""
    rendered: str
    """The one that the template writes once something follows (GPT-OSS: `<|end|>` after `<|return|>` sampled)."""
    needs_follower: bool = False
    """The template ends such a turn only when a message follows (GLM: with the token that opens that message)."""


@dataclass(frozen=True)
class Staging:
    """Observations as the template renders them after an assistant turn."""

    end: TurnEnd
    delta: str
    """Text after the end-of-turn token, generation prompt included."""
    glue: str
    """That text with `marks` in place of the observations' contents."""
    marks: list[str]


class TemplateRenderer:
    """Renders conversations with one template.

    Raises:
        ChatFormatError: if the template does not end turns in a way that a rollout can follow.
    """

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, *, supports_tools: bool) -> None:
        self.template = template
        self.encoder = encoder
        self.supports_tools = supports_tools
        self._said = encoder.mark("s")
        self._question: Message = {"role": "user", "content": self._said}
        self._asked = template.attempt([self._question])
        self._begun = template.attempt([self._question], generation_prompt=True)
        self.text_end = self._find_end(self._stand_in(), {"role": "user", "content": "."})
        """How a turn without calls ends."""
        self.call_end = self.text_end
        """How a turn with calls ends."""
        if supports_tools:
            turn = self._stand_in([{"function": {"name": "f"}}])
            self.call_end = self._find_end(turn, self._follower(turn["tool_calls"], "."))

    def turn_start(self) -> str:
        """The generation prompt without a forced `<think>`; empty for a template that writes none."""
        if not self._begun.startswith(self._asked):
            return ""
        generation_prompt = self._begun.removeprefix(self._asked)
        return generation_prompt.partition("<think>")[0]

    def prompt_ends(self) -> list[str]:
        """The template's text after a user message and after a tool message, up to where the policy goes on."""
        ends = [self._begun.rpartition(self._said)[2]]
        if self.supports_tools:
            marks = [self.encoder.mark("o0")]
            calls = [{"function": {"name": "f"}}]
            staging = self.stage(calls, [self._follower(calls, marks[0])], None)
            ends.append(staging.glue.rpartition(marks[0])[2])
        return ends

    def reply(self, message: Message) -> tuple[str, str]:
        """The end of a prompt, from its last control token, and the reply, end-of-turn token included."""
        end = self.text_end
        if calls := message.get("tool_calls"):
            end = self.call_end
            message = {**message, "tool_calls": _with_ids(calls)}
        begun = self.template.probe([_QUESTION], generation_prompt=True)
        if end.needs_follower:
            mark = self.encoder.mark("f")
            follower = self._follower(message.get("tool_calls"), mark)
            whole = self.template.probe([_QUESTION, message, follower], generation_prompt=True)
            limit = whole.rindex(mark)
        else:
            whole = self.template.probe([_QUESTION, message])
            limit = len(whole)
        start = self._reply_start(begun, whole)
        until = whole.rindex(end.sampled, start, limit) + len(end.sampled)
        said = whole[start:until]
        said = self._rest_of_reasoning(begun, said, message) + said
        tokens = self.encoder.valid_tokens(begun)
        last_token = tokens[-1][0] if tokens else 0
        return begun[last_token:], said

    def _reply_start(self, begun: str, whole: str) -> int:
        """Where in `whole`, a conversation with the reply, the policy's part begins."""
        if whole.startswith(begun):
            return len(begun)
        # A forced prefix may differ from what the template writes for a finished turn (`<think>` and a newline).
        asked = len(self.template.probe([_QUESTION]))
        header = re.split(_REASONING_MARKS, begun[asked:], maxsplit=1)[0]
        if whole.startswith(begun[:asked] + header):
            return asked + len(header)
        start = num_common(begun, whole)
        for text in (begun, whole):  # never inside of a token
            for left, right, _ in self.encoder.valid_tokens(text):
                if left < start < right:
                    start = left
        if start <= asked:
            raise _unusable("The chat template does not start an assistant turn with its generation prompt.")
        return start

    def _rest_of_reasoning(self, begun: str, reply: str, message: Message) -> str:
        """The reasoning that the generation prompt opens and the rendered turn does not show; it is often empty."""
        opener = re.search(rf"({_REASONING_MARKS})\s*$", begun)
        if opener is None or "/" in opener[1]:
            return ""
        bracket, name = opener[1][0], opener[1][1:]
        closer = f"{bracket}/{name}"
        if closer in reply:
            return ""
        reasoning = message.get("reasoning_content") or ""
        return f"{reasoning}\n{closer}\n\n"

    def _follower(self, calls: Sequence[dict[str, Any]] | None, content: str) -> Message:
        if not calls:
            return {"role": "user", "content": content}
        name = calls[0].get("function", {}).get("name")
        return tool_answer(content, name) | {"tool_call_id": calls[0].get("id") or CALL_ID}

    def stage(self, calls: Sequence[Any], observations: Sequence[Message], tools: Sequence[Schema] | None) -> Staging:
        """Render observations after a turn with these calls, as faithfully as the template allows.

        Of the calls only names and ids matter. Control tokens are hidden in all of it.
        """
        marks = [self.encoder.mark(f"o{index}") for index in range(len(observations))]
        for turn, rest in self._stagings(calls, observations):
            end = self.call_end if "tool_calls" in turn else self.text_end
            marked = [{**observation, "content": mark} for observation, mark in zip(rest, marks, strict=False)]
            try:
                glue = self._after_end(end, turn, marked, tools)
                delta = self._after_end(end, turn, rest, tools)
            except ChatFormatError:
                continue
            # An attempt counts only if the template shows every observation.
            if all(mark in glue for mark in marks[: len(rest)]):
                return Staging(end=end, delta=delta, glue=glue, marks=marks[: len(rest)])
        raise _unusable("The chat template does not show a user message after an assistant turn.")

    # ---------------------------------------------------------------- stand-ins

    def _stand_in(self, calls: Sequence[Any] = ()) -> Message:
        """An assistant turn that says `_said`, or makes calls whose arguments say it."""
        if not calls:
            return {"role": "assistant", "content": self._said}
        saying = []
        for call in _with_ids(calls):
            (one,) = calling(call["function"]["name"], {"x": self._said})["tool_calls"]
            saying.append(one | {"id": call["id"]})
        return {**calling(), "tool_calls": saying}

    def _stagings(
        self, calls: Sequence[Any], observations: Sequence[Message]
    ) -> Iterator[tuple[Message, Sequence[Message]]]:
        """Ways to render the observations after a stand-in turn, the most faithful first."""
        if not any(observation.get("role") == "tool" for observation in observations):
            yield self._stand_in(), observations
        elif self.supports_tools:
            ids = [observation.get("tool_call_id") for observation in observations]
            # Llama 3 renders one call per turn, and a tool message may come without a readable call.
            named = {"function": {"name": observations[0].get("name") or "f"}}
            for some in (calls, calls[:1], [named]):
                if not some:
                    continue
                turn = self._stand_in(some)
                yield turn, self._answering(turn, observations, ids)
                # Mistral's templates refuse ids of another length than 9.
                without_ids = [{"function": call["function"]} for call in some]
                turn = self._stand_in(without_ids)
                yield turn, self._answering(turn, observations, [None] * len(ids))
        contents = [observation["content"] for observation in observations]
        yield self._stand_in(), [{"role": "user", "content": content} for content in contents]
        yield self._stand_in(), [{"role": "user", "content": "\n".join(contents)}]

    def _answering(
        self, turn: Message, observations: Sequence[Message], ids: Sequence[str | None]
    ) -> Sequence[Message]:
        """The tool messages with the ids given, or those of the turn's calls in their order."""
        of_calls = [call["id"] for call in turn["tool_calls"]]
        answers = []
        for index, (message, own) in enumerate(zip(observations, ids, strict=True)):
            call_id = own or of_calls[min(index, len(of_calls) - 1)]
            answers.append({**message, "tool_call_id": call_id})
        return answers

    def _after_end(self, end: TurnEnd, reply: Message, rest: Sequence[Message], tools: Sequence[Schema] | None) -> str:
        after = self._after_reply(reply, rest, tools, generation_prompt=True)
        if "tool_calls" in reply and not after.startswith(end.lead):
            # The text that closes a call may hold its id (Mistral): skip to the end-of-turn token.
            for start, _, token in self.encoder.valid_tokens(after):
                if token in (end.rendered, end.sampled):
                    after = after[start:]
                    break
            after = end.lead + after
        # With nothing after it, a turn may end on the sampled token (GPT-OSS).
        for token in (end.rendered, end.sampled):
            if after.startswith(end.lead + token):
                return after[len(end.lead) + len(token) :]
        raise _unusable("The chat template ends this turn in another way than others of its kind.")

    def _after_reply(
        self, reply: Message, rest: Sequence[Message], tools: Sequence[Schema] | None, *, generation_prompt: bool
    ) -> str:
        conversation = [_QUESTION, reply, *rest]
        try:
            text = self.template.render(
                conversation, tools or self.template.probe_tools, generation_prompt=generation_prompt
            )
        except Exception as error:  # templates raise what they like
            roles = [message["role"] for message in conversation]
            raise _unusable(f"The chat template cannot render messages of the roles {roles}: {error}.") from error
        _, said, after = text.rpartition(self._said)
        if not said:
            raise _unusable("The chat template does not show what the assistant said.")
        return after

    def _find_end(self, reply: Message, follow: Message) -> TurnEnd:
        after = self._after_reply(reply, [follow], None, generation_prompt=True)
        try:
            alone = self._after_reply(reply, [], None, generation_prompt=False)
        except ChatFormatError:
            alone = ""
        live = self.encoder.valid_tokens(alone)
        special = [token for token in live if token[2] in self.encoder.special_ids]
        if not special and (found := self._find_open_end(after)):
            return found
        if not live:
            raise ChatFormatError(
                "The chat template does not end an assistant turn with a token of its own (it writes "
                f"{alone!r} after it), so a rollout could not tell where a turn ends.",
                "Use a template that ends turns with the tokenizer's end-of-turn token, and add that token to the "
                "tokenizer as a special token.",
            )
        start, _, sampled = (special or live)[-1]
        lead = alone[:start]
        following = self.encoder.valid_tokens(after[len(lead) :])
        if not after.startswith(lead) or not following or following[0][0] != 0:
            raise _unusable(
                f"The chat template ends an assistant turn with {sampled!r}, but not once a {follow['role']} message "
                "follows: it is not prefix preserving."
            )
        return TurnEnd(lead=lead, sampled=sampled, rendered=following[0][2])

    def _find_open_end(self, after: str) -> TurnEnd | None:
        """The end of a turn after which the template writes no token of its own unless a message follows.

        Either the template shows the last turn in another way than the others (Nemotron Nano), or the turn ends with
        the token that opens the next message, which the policy samples (GLM). A token that opens assistant turns as
        well cannot end one.
        """
        special = [token for token in self.encoder.valid_tokens(after) if token[2] in self.encoder.special_ids]
        if not special:
            return None
        start, _, token = special[0]
        known = getattr(self, "text_end", None)  # turns with calls may end as those without do
        if known is not None:
            for place, _, spelling in special:
                if spelling == known.rendered:
                    start, token = place, spelling
                    break
        opening = self._begun.removeprefix(self._asked)
        if token in opening:
            return None
        return TurnEnd(lead=after[:start], sampled=token, rendered=token, needs_follower=True)


def _with_ids(calls: Sequence[Any]) -> list[Any]:
    """The calls, each with an id."""
    named = []
    for index, call in enumerate(calls):
        call_id = call.get("id") or f"{CALL_ID[:7]}{index:02d}"
        named.append({**call, "id": call_id})
    return named


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of 9 letters and digits, which Mistral's templates need, one for a call and its answer."""
    changed = []
    number = 0
    made: dict[Any, str] = {}
    """Own id (or number) of each call of the last turn with calls that has no answer yet, and its new id."""
    for message in messages:
        if calls := message.get("tool_calls"):
            made = {}
            numbered = []
            for call in calls:
                short = f"c{number:08d}"
                made[call.get("id") or number] = short
                numbered.append({**call, "id": short})
                number += 1
            message = {**message, "tool_calls": numbered}
        elif message.get("role") == "tool" and made:
            own = message.get("tool_call_id")
            if own not in made:
                own = next(iter(made))  # the first call without an answer
            message = {**message, "tool_call_id": made.pop(own)}
        changed.append(message)
    return changed


def num_common(first: str, second: str) -> int:
    """Length of what both begin with."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _unusable(problem: str) -> ChatFormatError:
    """The error of a template that another template can replace."""
    return ChatFormatError(problem, GENERAL_FIX)
