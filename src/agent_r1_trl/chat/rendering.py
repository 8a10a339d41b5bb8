"""What a chat template writes after an assistant turn, found by rendering stand-in turns.

A stand-in turn says a mark that no data contains. Everything the template writes after the mark, up to the
end-of-turn token, closes the turn; everything after that token belongs to the observations.

Not covered: ids (`encoding.py`), which template it is (`templates.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.chat.encoding import TextEncoder
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.trajectory import Message


@dataclass(frozen=True)
class TurnEnd:
    """How one kind of assistant turn ends."""

    lead: str
    """What the template writes between the stand-in and the end-of-turn token."""
    sampled: str
    """The end-of-turn token that the policy is expected to sample."""
    rendered: str
    """The one that the template writes once something follows (GPT-OSS: `<|end|>` after `<|return|>` sampled)."""


@dataclass(frozen=True)
class Staging:
    """Observations as the template renders them after an assistant turn."""

    end: TurnEnd
    delta: str
    """Text after the end-of-turn token, generation prompt included."""
    glue: str
    """The same text with `marks` in place of the observations' contents."""
    marks: list[str]


class TemplateRenderer:
    """Renders conversations with one template.

    Args:
        tokenizer: renders; it is not changed.
        chat_template: source of the template.
        chat_template_kwargs: passed to the template in every rendering.
        encoder: knows the control tokens.
        supports_tools: whether the template renders calls and tool messages.

    Raises:
        ChatFormatError: if the template does not end turns in a way that a rollout can follow.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str,
        chat_template_kwargs: dict[str, Any],
        encoder: TextEncoder,
        *,
        supports_tools: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_template_kwargs = chat_template_kwargs
        self.encoder = encoder
        self.supports_tools = supports_tools
        self._said = encoder.mark("s")
        self.text_end = self._find_end(self._stand_in(), {"role": "user", "content": "."})
        """How a turn without calls ends."""
        self.call_end = self.text_end
        """How a turn with calls ends."""
        if supports_tools:
            turn = self._stand_in([{"function": {"name": "f"}}])
            self.call_end = self._find_end(turn, {"role": "tool", "name": "f", "content": "."})

    def render(self, messages: Sequence[Message], tools: Any, *, generation_prompt: bool) -> str:
        """Text of a conversation; whatever the template raises propagates."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.chat_template_kwargs,
            )
        )

    def turn_start(self) -> str:
        """The generation prompt without a forced `<think>`; empty for a template that writes none."""
        question = {"role": "user", "content": self._said}
        begun = self.render([question], None, generation_prompt=True)
        asked = self.render([question], None, generation_prompt=False)
        return begun.removeprefix(asked).partition("<think>")[0] if begun.startswith(asked) else ""

    def prompt_ends(self) -> list[str]:
        """What the template writes after a user message and after a tool message, up to where the policy goes on."""
        question: Message = {"role": "user", "content": self._said}
        ends = [self.render([question], None, generation_prompt=True).rpartition(self._said)[2]]
        if self.supports_tools:
            marks = [self.encoder.mark("o0")]
            calls = [{"function": {"name": "f"}}]
            staging = self.stage(calls, [{"role": "tool", "name": "f", "content": marks[0]}], None)
            ends.append(staging.glue.rpartition(marks[0])[2])
        return ends

    def reply(self, message: Message) -> str:
        """What the policy would write to say `message`, end-of-turn token included."""
        question = {"role": "user", "content": "."}
        asked = self.render([question], None, generation_prompt=False)
        begun = self.render([question], None, generation_prompt=True)
        whole = self.render([question, message], None, generation_prompt=False)
        # A forced prefix may differ from what the template writes for a finished turn (`<think>` and a newline).
        start = _common_prefix_length(begun, whole)
        if start <= len(asked):
            raise unusable("The chat template does not start an assistant turn with its generation prompt.")
        end = (self.call_end if message.get("tool_calls") else self.text_end).sampled
        return whole[start : whole.rindex(end) + len(end)]

    def stage(self, calls: Sequence[Any], observations: Sequence[Message], tools: Any) -> Staging:
        """Render observations after a turn with these calls, as faithfully as the template allows.

        Args:
            calls: of the assistant message, control tokens hidden; only their names and ids matter.
            observations: messages whose contents are strings with control tokens hidden.
            tools: schemas.
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
        raise unusable("The chat template does not show a user message after an assistant turn.")

    # ---------------------------------------------------------------- stand-ins

    def _stand_in(self, calls: Sequence[Any] = ()) -> Message:
        """An assistant turn that says `_said`, or makes calls whose arguments say it."""
        if not calls:
            return {"role": "assistant", "content": self._said}
        functions = [
            {
                "type": "function",
                "id": call.get("id") or f"call_{index}",
                "function": {"name": call["function"]["name"], "arguments": {"x": self._said}},
            }
            for index, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": "", "tool_calls": functions}

    def _stagings(
        self, calls: Sequence[Any], observations: Sequence[Message]
    ) -> Iterator[tuple[Message, Sequence[Message]]]:
        """Ways to render the observations after a stand-in turn, the most faithful first."""
        if not any(observation.get("role") == "tool" for observation in observations):
            yield self._stand_in(), observations
        elif self.supports_tools:
            # Llama 3 renders one call per turn, and a tool message may come without a readable call.
            named = [{"function": {"name": observation.get("name") or "f"}} for observation in observations][:1]
            for some in (calls, calls[:1], named):
                if some:
                    yield self._stand_in(some), observations
        told = [{"role": "user", "content": observation["content"]} for observation in observations]
        yield self._stand_in(), told
        yield self._stand_in(), [{"role": "user", "content": "\n".join(message["content"] for message in told)}]

    def _after_end(self, end: TurnEnd, reply: Message, rest: Sequence[Message], tools: Any) -> str:
        after = self._after_reply(reply, rest, tools, generation_prompt=True)
        # With nothing after it, a turn may end on the sampled token (GPT-OSS).
        for token in (end.rendered, end.sampled):
            if after.startswith(end.lead + token):
                return after[len(end.lead) + len(token) :]
        raise unusable("The chat template ends this turn in another way than others of its kind.")

    def _after_reply(self, reply: Message, rest: Sequence[Message], tools: Any, *, generation_prompt: bool) -> str:
        conversation = [{"role": "user", "content": "."}, reply, *rest]
        try:
            text = self.render(conversation, tools, generation_prompt=generation_prompt)
        except Exception as error:  # templates raise what they like
            roles = [message["role"] for message in conversation]
            raise unusable(f"The chat template cannot render messages of the roles {roles}: {error}.") from error
        _, said, after = text.rpartition(self._said)
        if not said:
            raise unusable("The chat template does not show what the assistant said.")
        return after

    def _find_end(self, reply: Message, follow: Message) -> TurnEnd:
        alone = self._after_reply(reply, [], None, generation_prompt=False)
        live = self.encoder.live_tokens(alone)
        special = [token for token in live if token[2] in self.encoder.special_ids] or live
        if not special:
            raise ChatFormatError(
                "The chat template does not end an assistant turn with a token of its own (it writes "
                f"{alone!r} after it), so a rollout could not tell where a turn ends.",
                "Use a template that ends turns with the tokenizer's end-of-turn token, and add that token to the "
                "tokenizer as a special token.",
            )
        start, _, sampled = special[-1]
        lead = alone[:start]
        after = self._after_reply(reply, [follow], None, generation_prompt=True)
        following = self.encoder.live_tokens(after[len(lead) :])
        if not after.startswith(lead) or not following or following[0][0] != 0:
            raise unusable(
                f"The chat template ends an assistant turn with {sampled!r}, but not once a {follow['role']} message "
                "follows: it is not prefix preserving."
            )
        return TurnEnd(lead=lead, sampled=sampled, rendered=following[0][2])


def unusable(problem: str) -> ChatFormatError:
    """The error of a template that a training template can replace."""
    return ChatFormatError(
        problem,
        "Pass a training template as chat_template (TRL ships qwen3_training, qwen2_5_training and more).",
    )


def _common_prefix_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
