"""Messages to token ids and back, by appending only.

One conversation's ids are `prompt + S0 + D0 + S1 + D1 + ...`: S are the sampled ids, D is what the template puts
between two sampled turns. D is found by rendering a stand-in turn with the real observations after it and keeping
the text after the stand-in's end-of-turn token, so it starts with the separator (Qwen's newline) and ends with the
generation prompt, forced `<think>` prefixes included. Nothing sampled is ever rendered.

Thinking: a stream that only grows keeps all reasoning that the policy sampled. Published templates of thinking models
drop earlier reasoning; TRL's training templates keep it, and those are used. With `strips_reasoning` the published
template is used, and every context is rendered anew (`reasoning.py`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.calls import GRAMMAR_NAMES, Grammar, refused_names
from agent_r1_trl.chat.checks import is_sound
from agent_r1_trl.chat.encoding import TextEncoder, split_by_author
from agent_r1_trl.chat.errors import GENERAL_FIX, ChatFormatError
from agent_r1_trl.chat.messages import readable
from agent_r1_trl.chat.parsing import TurnParser
from agent_r1_trl.chat.reasoning import History, check_drops, find_rule
from agent_r1_trl.chat.rendering import ChatTemplate, TemplateRenderer, with_short_ids
from agent_r1_trl.chat.templates import (
    check_template_kwargs,
    choose_chat_template,
    choose_response_template,
    read_response_template,
    suggested_template,
    text_grammar,
    without_tools,
)
from agent_r1_trl.patterns import PatternTimeoutError
from agent_r1_trl.trajectory import Author, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = dict[str, Any]

PREFIX_TOKENS = 64
"""More tokens than any template writes between a message and the next turn of the policy."""
# Prompts whose ids are kept; the groups of one rollout are sampled side by side.
_KEPT_PROMPTS = 256


class ChatFormat:
    """The chat format of one model: messages to token ids, sampled ids to messages.

    Args:
        tokenizer: a fast tokenizer (or a processor that holds one). It is not changed.
        chat_template: source, file or TRL name of a template to use in place of the tokenizer's.
        response_template: the grammar that reads calls, in place of the one that belongs to the template: a
            transformers `response_template` as a dict or a JSON file, or the name of a family (`hermes`, `mistral`).
        chat_template_kwargs: passed to the template in every rendering. The empty reasoning that many templates write
            for `enable_thinking=False` is template glue.
        strips_reasoning: take the template as it is, whatever it drops of earlier turns, for contexts that `history`
            renders.
        extra_stop_token_ids: more ids that end a turn, from the model's generation config.

    Raises:
        ChatFormatError: (a ValueError) if the template, the tokenizer or the options cannot give token-exact rollouts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        response_template: dict[str, Any] | str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        strips_reasoning: bool = False,
        extra_stop_token_ids: Iterable[int] = (),
    ) -> None:
        if getattr(tokenizer, "tokenizer", None) is not None:  # a processor: text only
            chat_template = chat_template or tokenizer.chat_template
            tokenizer = tokenizer.tokenizer
        self.tokenizer = tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ChatFormatError(  # Mistral's own, for example
                f"tokenizer={type(tokenizer).__name__} is not a fast tokenizer: token-exact rollouts need the "
                "`tokenizers` back end.",
                "Load it with PreTrainedTokenizerFast.from_pretrained(...), which reads the model's tokenizer.json.",
            )
        self.chat_template, self.supports_tools = choose_chat_template(
            tokenizer, chat_template, is_rendered_anew=strips_reasoning, suggest=suggestion
        )
        """Source of the template in use: save it with the model."""
        self.chat_template_kwargs = check_template_kwargs(self.chat_template, chat_template_kwargs)
        self.encoder = TextEncoder(tokenizer, self.chat_template)
        self.plain_template = None if chat_template else without_tools(tokenizer, self.chat_template)
        """Source of the template of conversations without tools, where the tokenizer has one of its own for them."""
        self.template = ChatTemplate(
            tokenizer, self.chat_template, self.chat_template_kwargs, plain=self.plain_template
        )
        try:
            self._renderer = TemplateRenderer(self.template, self.encoder, supports_tools=self.supports_tools)
        except ChatFormatError as error:
            if chat_template is not None or error.fix is not GENERAL_FIX:
                raise
            raise ChatFormatError(error.problem, suggestion(tokenizer, self.chat_template)) from error
        self.reasoning_rule = find_rule(self.template) if strips_reasoning else None
        """Which reasoning the template drops, with `strips_reasoning`."""
        if self.reasoning_rule is not None:
            check_drops(self.reasoning_rule, thinks=self.thinks, kwargs=self.chat_template_kwargs)
        self._ends = (self._renderer.text_end, self._renderer.call_end)
        stops = [self._id(end.sampled) for end in self._ends]
        eos = tokenizer.eos_token_id
        self.stop_token_ids: list[int] = sorted({*stops, *([eos] if eos is not None else []), *extra_stop_token_ids})
        """Ids after which a turn is over."""
        self.response_template = read_response_template(response_template)
        """The grammar that was asked for, or None."""
        self._parser = self._make_parser()
        # The members of a group have one prompt, which is rendered once.
        self._encode_json = functools.lru_cache(_KEPT_PROMPTS)(lambda text: self._encode_prompt(*json.loads(text)))
        self._prompt_ends = sorted(self._renderer.prompt_ends(), key=len, reverse=True)

    @property
    def template_to_save(self) -> str | dict[str, str]:
        """The chat_template that a tokenizer must carry for the conversations of this format."""
        if self.plain_template is None:
            return self.chat_template
        return {"default": self.plain_template, "tool_use": self.chat_template}

    def write_to(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give a tokenizer the template and the grammar of this format, so that they are saved with it."""
        tokenizer.chat_template = self.template_to_save
        if self.response_template is not None:
            tokenizer.response_template = self.response_template

    # ---------------------------------------------------------------- messages -> ids

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> list[int]:
        """Ids of the prompt messages up to and including the generation prompt, (P,).

        Those of `apply_chat_template`, but special tokens spelled in contents and schemas are text. Markers that are
        only words of the vocabulary (Qwen's `<think>` and `<tool_call>`) keep their ids, since prompts explain the
        format with them, and so does everything in assistant messages.

        Raises:
            ChatFormatError: if tools are given and the template cannot show them, if it refuses the messages, or if
                one of them has an unknown role or holds an image.
        """
        if tools and not self.supports_tools:
            names = [schema.get("function", schema).get("name") for schema in tools]
            raise ChatFormatError(
                f"tools={names}: the chat template cannot render tool conversations, so the model would never see "
                "them.",
                f"{suggestion(self.tokenizer, self.chat_template)} Or use a model whose template can, or describe the "
                "tools in the prompt and read the calls in your environment.",
            )
        names = [str(schema.get("function", schema).get("name")) for schema in tools or ()]
        if refused := refused_names(self.grammar, names):
            better = re.sub(r"\W", "_", refused[0])
            raise ChatFormatError(
                f"tools={refused}: models of this family write calls as Python, where a function cannot have such a "
                "name, so no call of these tools could be read.",
                f"Rename them, such as Tool(fn, name={better!r}), or MCPToolset(names={{...}}).",
            )
        try:
            text = json.dumps([list(messages), list(tools or ())])
        except (TypeError, ValueError, RecursionError):  # not all of it is JSON
            return self._encode_prompt(messages, tools)
        return list(self._encode_json(text))

    def _encode_prompt(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        safe = self.encoder.hide_prompt(readable(messages, self.chat_template, where="prompt"))
        schemas = self.encoder.hide(list(tools), special_only=True) if tools else None
        try:
            return self.encoder.encode(self._render_prompt(safe, schemas))
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise ChatFormatError(
                f"The chat template cannot render a prompt with the roles {roles}: {error}.",
                "Let the environment's reset return messages that the template takes (system first, then user).",
            ) from error

    def _render_prompt(self, messages: Sequence[Message], schemas: Sequence[Schema] | None) -> str:
        try:
            return self.template.render(messages, schemas, generation_prompt=True)
        except Exception:  # templates raise what they like; here for the ids of calls, perhaps
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self.template.render(with_short_ids(messages), schemas, generation_prompt=True)

    def encode_observations(
        self, message: Message, observations: Sequence[Message], tools: Sequence[Schema] | None = None
    ) -> tuple[list[int], list[Author]]:
        """The text behind the end-of-turn token of an assistant turn, up to and including the generation prompt.

        Args:
            message: the assistant message as parsed; only the names and ids of its calls are rendered.
            observations: messages of role `tool` or `user`. Control tokens spelled in them become text.
            tools: schemas, for templates that render tool messages by them.

        Returns:
            ids and authors (TEMPLATE or ENVIRONMENT), both (N,). A token that holds text of both counts as
            ENVIRONMENT.

        Raises:
            ChatFormatError: if an observation holds an image.
        """
        plain = readable(observations, self.chat_template, where="observations")
        safe: list[Message] = self.encoder.hide([{"content": "", **observation} for observation in plain])
        calls = self.encoder.hide(message.get("tool_calls") or [])
        staging = self._renderer.stage(calls, safe, tools)
        segments = split_by_author(staging.delta, staging.glue, staging.marks)
        # Encoded after the end-of-turn token: some tokenizers treat the start of a text specially.
        ids, is_environment = self.encoder.encode_segments([(staging.end.rendered, False), *segments])
        environment, template = Author.ENVIRONMENT, Author.TEMPLATE  # a look into an enum takes as long as the rest
        authors = [environment if flag else template for flag in is_environment]
        return ids[1:], authors[1:]

    def history(self, tools: Sequence[Schema] | None = None) -> History | None:
        """The renderer of whole conversations before every turn, with `strips_reasoning`; else None."""
        if self.reasoning_rule is None:
            return None
        return History(self.template, self.encoder, self.reasoning_rule, tools)

    def encode_turn_end(self, token_ids: Sequence[int], stopped: bool = False) -> list[int]:
        """Glue (mask 0) that closes an assistant turn which does not end as the template ends turns.

        A turn cut by a limit and one that stopped on a foreign token (`<|endoftext|>` under ChatML) get the
        template's end-of-turn token; a turn that ends with it already gets nothing. A turn that the model did not end
        (`stopped`) is closed as one without calls: even a call that looks complete may have gone on.
        """
        text_end, call_end = self._ends
        end = text_end
        if stopped and call_end.rendered != text_end.rendered and "tool_calls" in self.parse(token_ids):
            end = call_end
        if token_ids and token_ids[-1] in (self._id(end.sampled), self._id(end.rendered)):
            return []
        return [self._id(end.rendered)]

    def encode_reply(self, message: Message) -> list[int]:
        """The ids a policy would sample to say `message`, end-of-turn token included (demonstrations, scripts)."""
        before, said = self._renderer.reply(message)
        alone = self.encoder.encode(before)
        # Encoded after the prompt's last token: some tokenizers put a space before the start of a text.
        ids = self.encoder.encode(before + said)
        return ids[len(alone) :] if ids[: len(alone)] == alone else self.encoder.encode(said)

    def encode_demonstration(
        self, messages: Sequence[Message], tools: Sequence[Schema] | None = None
    ) -> dict[str, list[int]]:
        """A whole conversation in the ids of a rollout whose policy says its assistant messages, with its mask.

        Messages before the first assistant message are the prompt. An assistant message with `weight: 0` is context:
        it is not taught, and part of the prompt if no taught one is before it.

        Args:
            messages: the conversation, up to the last assistant message; later ones are dropped.
            tools: schemas.

        Returns:
            A row for TRL's `SFTTrainer`: `input_ids` and `assistant_masks`, both (N,). The mask is 1 for what a policy
            samples, end-of-turn tokens included.

        Raises:
            ChatFormatError: no assistant message is taught, the template cannot write a message, or
                `strips_reasoning`, with which no row holds the whole conversation.
        """
        if self.reasoning_rule is not None:
            raise ChatFormatError(
                "strips_reasoning: every turn has another context, so no row holds a whole conversation.",
                "Make the ChatFormat without it.",
            )
        places = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        taught = [index for index in places if messages[index].get("weight") != 0]
        if not taught:
            raise ChatFormatError(
                f"messages: no assistant message is taught (roles: {[message.get('role') for message in messages]}).",
                "Pass a conversation in which the assistant says something, with a weight other than 0.",
            )
        ids = self.encode_prompt(messages[: taught[0]], tools)
        mask = [0] * len(ids)
        said = [index for index in places if index >= taught[0]]
        for index, following in zip(said, [*said[1:], None], strict=True):
            message = messages[index]
            reply = self.encode_reply(message)
            parsed = self.parse(reply, ids, tools)
            ids += reply
            mask += [int(message.get("weight") != 0)] * len(reply)
            if following is None:
                break
            answers = _with_call_ids(messages[index + 1 : following], message, parsed)
            between, _ = self.encode_observations(parsed, answers, tools)
            between = [*self.encode_turn_end(reply, stopped=True), *between]
            ids += between
            mask += [0] * len(between)
        return {"input_ids": ids, "assistant_masks": mask}

    # ---------------------------------------------------------------- ids -> message

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Schema] | None = None,
        *,
        position: int | None = None,
    ) -> Message:
        """The assistant message that the sampled ids spell.

        Args:
            token_ids: the sampled turn, stop token included.
            prompt_ids: everything before it, or the last `PREFIX_TOKENS` of that; its end may hold a forced prefix.
            tools: schemas that give the arguments their types.
            position: number of tokens of the trajectory before the turn, a part of the ids that calls are given; None
                for all of `prompt_ids`.

        Returns:
            `role`, `content`; where they apply `reasoning_content`, `tool_calls` (arguments parsed, ids unique in
            the turn: the model's own, if it wrote some) and `malformed_tool_call`, the reason why a call that was
            attempted cannot be read.

        Raises:
            PatternTimeoutError: a pattern of the grammar took too long on the turn, which is not the model's fault.
        """
        ids = list(token_ids)
        ends = {self._id(end.sampled) for end in self._ends}
        foreign_stop = bool(ids) and ids[-1] in self.stop_token_ids and ids[-1] not in ends
        text = self.encoder.decode(ids[:-1] if foreign_stop else ids)
        if foreign_stop:
            text += self._ends[0].sampled
        try:
            prefix = self._written_by_template(prompt_ids)
            message = self._parser.parse(text, prefix=prefix, tools=list(tools) if tools else None)
        except PatternTimeoutError:
            raise
        except Exception as error:
            message = {"role": "assistant", "content": text, "malformed_tool_call": f"unreadable turn: {error}"}
        position = len(prompt_ids) if position is None else position
        written: set[str] = set()
        for index, call in enumerate(message.get("tool_calls", ())):
            if call.get("id", "") in ("", *written):  # 9 letters and digits: Mistral's templates take no other id
                call["id"] = f"c{position % 10**6:06d}{index % 100:02d}"
            written.add(call["id"])
        restored: Message = self.encoder.restore(message)
        return restored

    # ---------------------------------------------------------------- for checks

    def closed_reasoning(self, prompt_ids: Sequence[int]) -> str:
        """The whole reasoning, empty as a rule, with which the prompt begins the turn; "" if it writes none."""
        return self._parser.closed_reasoning(self._written_by_template(prompt_ids))

    @property
    def turn_end_ids(self) -> list[int]:
        """The end-of-turn tokens of the template, which a policy is expected to sample."""
        return sorted({self._id(end.sampled) for end in self._ends})

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Schema] | None = None, *, generation_prompt: bool = False
    ) -> list[int]:
        """Ids of a whole conversation that is rendered at once; a rollout's ids must spell the same text."""
        return self.encoder.encode(self.template.render(messages, tools, generation_prompt=generation_prompt))

    def canonical(self, token_ids: Sequence[int]) -> list[int]:
        """The ids with every end-of-turn token but the last as the template writes it once something follows."""
        written = {self._id(end.sampled): self._id(end.rendered) for end in self._ends}
        return [written.get(token_id, token_id) for token_id in token_ids[:-1]] + list(token_ids[-1:])

    @property
    def thinks(self) -> bool:
        """Whether the template knows reasoning."""
        return bool(re.search(r"reasoning_content|\.thinking\b|</(?:\w+:)?think>|\[/THINK\]", self.chat_template))

    # ---------------------------------------------------------------- budgets

    def count(self, text: str) -> int:
        """Number of tokens of plain text."""
        return len(self.encoder.encode(self.encoder.hide(text)))

    def truncate(self, text: str, max_tokens: int) -> str:
        """The beginning of plain text, at most `max_tokens` tokens long."""
        return self.encoder.truncate(text, max_tokens)

    def _make_parser(self) -> TurnParser:
        turn_end = self._ends[0].sampled
        grammar = self.response_template
        if grammar is None and self.supports_tools:
            grammar = choose_response_template(self.tokenizer, self.chat_template)
            if grammar is None:
                raise ChatFormatError(
                    "The chat template writes tool calls in a form that cannot be read back: no grammar is known for "
                    "it and it has no <tool_call> markers.",
                    "Set response_template to a grammar (see transformers' page on chat response parsing) or to the "
                    f"name of a family that writes calls in this way ({', '.join(GRAMMAR_NAMES)}).",
                )
        self.grammar: Grammar = grammar or text_grammar(self.chat_template, self._renderer.turn_start(), turn_end)
        """The reader of turns: the grammar that was asked for, that of the family, or one without calls."""
        parse_call = functools.partial(self.tokenizer.parse_response, schema=self.grammar, prefix="")
        return TurnParser(self.grammar, parse_call, turn_ends={end.sampled for end in self._ends}, thinks=self.thinks)

    def _written_by_template(self, prompt_ids: Sequence[int]) -> str:
        """The end of the prompt that the template wrote after the last message; no earlier turn is part of it."""
        text = self.encoder.decode(list(prompt_ids[-PREFIX_TOKENS:]))
        for end in self._prompt_ends:
            if text.endswith(end):
                return end
        # The template closes messages of this kind in another way: nothing before the last turn's end counts.
        return re.split("|".join(re.escape(end.rendered) for end in self._ends), text)[-1]

    def _id(self, spelling: str) -> int:
        return self.encoder.control_ids[spelling]


def _with_call_ids(observations: Sequence[Message], message: Message, parsed: Message) -> list[Message]:
    """Observations whose `tool_call_id`s are those that a rollout gives to the calls of the turn."""
    own = [call.get("id") for call in message.get("tool_calls") or ()]
    read = [call.get("id") for call in parsed.get("tool_calls") or ()]
    new_id = dict(zip(own, read, strict=False))
    renamed = []
    for observation in observations:
        old = observation.get("tool_call_id")
        renamed.append({**observation, "tool_call_id": new_id[old]} if old in new_id else dict(observation))
    return renamed


def suggestion(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """The fix where `template` cannot be used: another one's name, if the doctor would find no error in it."""
    name = suggested_template(
        tokenizer, template, is_sound=lambda name: is_sound(ChatFormat(tokenizer, chat_template=name))
    )
    if name is None:
        return GENERAL_FIX
    return f'Pass chat_template="{name}", a template of TRL\'s that works with this tokenizer.'
