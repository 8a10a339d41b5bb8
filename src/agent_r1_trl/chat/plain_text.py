"""Prompts that are plain text, which the policy continues without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from agent_r1_trl.chat.encoding import TextEncoder
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import ChatFormat, Schema
from agent_r1_trl.trajectory import Author, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainText(ChatFormat):
    """A prompt is the tokens of its text, and an answer is the text of its tokens; there are no calls.

    Args:
        tokenizer: any with a fast back end; it needs no chat template.
        extra_stop_token_ids: more ids that end an answer than the tokenizer's end of sequence.

    Raises:
        ChatFormatError: the tokenizer's back end cannot be copied.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, extra_stop_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ""
        self.plain_template = None
        self.chat_template_kwargs = {}
        self.supports_tools = False
        self.reasoning_rule = None
        self.response_template = None
        self.encoder = TextEncoder(tokenizer, "")
        stop_token_ids = set(extra_stop_token_ids)
        if tokenizer.eos_token_id is not None:
            stop_token_ids.add(tokenizer.eos_token_id)
        self.stop_token_ids = sorted(stop_token_ids)

    def write_to(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Nothing: the tokenizer is saved as it is."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> list[int]:
        """Ids of the one message's text, (P,), with the special tokens that the tokenizer adds.

        Raises:
            ChatFormatError: there are several messages, or tools.
        """
        if len(messages) != 1 or tools:
            raise ChatFormatError(
                f"A prompt of {len(messages)} messages{' with tools' if tools else ''} among prompts of plain text.",
                "Make all prompts of a run text, or all of them lists of messages.",
            )
        ids: list[int] = self.tokenizer(messages[0]["content"])["input_ids"]
        return ids

    def encode_observations(
        self, message: Message, observations: Sequence[Message], tools: Sequence[Schema] | None = None
    ) -> tuple[list[int], list[Author]]:
        """Nothing: an answer ends the trajectory."""
        return [], []

    def encode_turn_end(self, token_ids: Sequence[int], stopped: bool = False) -> list[int]:
        """Nothing: no template closes a turn."""
        return []

    def encode_reply(self, message: Message) -> list[int]:
        """The ids of an answer, and the end of the sequence."""
        eos = self.tokenizer.eos_token_id
        ids: list[int] = self.tokenizer(str(message["content"]), add_special_tokens=False)["input_ids"]
        return ids if eos is None else [*ids, eos]

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Schema] | None = None,
        *,
        position: int | None = None,
    ) -> Message:
        """The answer, as the text of its ids without special tokens, like TRL's."""
        return {"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)}

    @property
    def turn_end_ids(self) -> list[int]:
        """The ids that end an answer."""
        return self.stop_token_ids

    def closed_reasoning(self, prompt_ids: Sequence[int]) -> str:
        """None is written by a template."""
        return ""

    @property
    def thinks(self) -> bool:
        """Whether a template knows reasoning."""
        return False
