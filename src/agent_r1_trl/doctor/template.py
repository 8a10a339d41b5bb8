"""Does the chat template keep what a rollout relies on?

Conversations are rendered twice, as a whole and piece by piece as in a rollout; both must give the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.checks import (
    Schema,
    broken_prefix,
    differences,
    hidden_parts,
    misread_content,
    split_tokens,
)
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.templates import suggestion
from agent_r1_trl.doctor.report import Report, describe_error

PROBE_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "options": {"type": "object", "description": "More about it."},
            },
            "required": ["query"],
        },
    },
}
"""Shown to the template if the user names no tools."""


def open_chat(report: Report, tokenizer: Any, **options: Any) -> ChatFormat | None:
    """The chat format; None, and an error in the report, if the tokenizer or its template cannot be used."""
    try:
        chat = ChatFormat(tokenizer, **options)
    except ChatFormatError as error:
        report.error("chat template", error.problem, error.cure)
        return None
    except Exception as error:  # a template or tokenizer may fail in any way
        report.error(
            "chat template",
            f"The tokenizer cannot be used ({describe_error(error)}).",
            "Load it with AutoTokenizer.from_pretrained and try apply_chat_template on one message.",
        )
        return None
    own = getattr(tokenizer, "chat_template", None)
    if options.get("chat_template") is None and isinstance(own, str) and own != chat.chat_template:
        report.ok("chat template", "TRL's training template replaces the tokenizer's own.")
    return chat


def check_template(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    """The template preserves prefixes over whole conversations, renders prompts faithfully and shows the tools.

    Args:
        report: collects the findings.
        chat: the format under examination.
        tools: schemas that the run will show; None if it uses none.
    """
    if tools and not chat.supports_tools:
        try:
            chat.encode_prompt([{"role": "user", "content": "."}], tools)
        except ChatFormatError as error:
            report.error("chat template", error.problem, error.cure)
        return
    try:
        _check_prompt(report, chat)
        _check_control_tokens(report, chat, tools)
        _check_appending(report, chat, tools)
        _check_content(report, chat)
        if tools:
            _check_tools_are_shown(report, chat, tools)
    except Exception as error:
        report.error(
            "chat template",
            f"The template fails on an ordinary conversation ({describe_error(error)}).",
            suggestion(chat.tokenizer, chat.chat_template),
        )
    if chat.is_turn_end_trained() is False:
        report.warning(
            "chat template",
            "Its assistant masks leave out the end-of-turn token: a cold start (SFT) with it never learns to stop.",
            "Move {% endgeneration %} behind the end-of-turn token.",
        )
    tokens = ", ".join(chat.tokenizer.convert_ids_to_tokens(chat.stop_token_ids))
    shows = "renders tool conversations" if chat.supports_tools else "has no tool calls (none are used)"
    report.ok("chat template", f"Prefix preserving, {shows}; a turn stops at {tokens}.")


def _check_prompt(report: Report, chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": '\nTwo words: "naïve" 東京 \n'}]
    usual = chat.tokenizer.apply_chat_template(
        messages,
        chat_template=chat.plain_template or chat.chat_template,
        tools=chat.no_tools,
        add_generation_prompt=True,
        return_dict=False,
        **chat.chat_template_kwargs,
    )
    if list(usual) != chat.encode_prompt(messages):
        report.error(
            "chat template",
            "A prompt's ids differ from those of tokenizer.apply_chat_template: the tokenizer does more in Python "
            "than its tokenizer.json says.",
            "Save the tokenizer with save_pretrained and load that folder with AutoTokenizer.",
        )


def _check_control_tokens(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    if split := split_tokens(chat, tools):
        report.error(
            "chat template",
            f"It writes {', '.join(split)}, no token of the tokenizer but several: the model never saw them as one, "
            "and a tool result that spells them could open a turn.",
            "Use the chat template that belongs to the tokenizer, or the tokenizer that belongs to the template.",
        )


def _check_content(report: Report, chat: ChatFormat) -> None:
    content = misread_content(chat)
    if content is not None:
        report.error(
            "parser",
            f"A reply that says 'said.' is read as {content!r}: rewards and environments would see that.",
            "Set response_template to the grammar of this template (docs/model-families.md), or pass another "
            "chat_template.",
        )


def _check_appending(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    """Prompt + reply + observation + reply + ... must be what the template renders for the whole conversation."""
    found = differences(chat, tools)
    if broken := broken_prefix(found):
        cure = suggestion(chat.tokenizer, chat.chat_template)
        report.error("chat template", f"Not prefix preserving: {broken}.", cure)
        return
    if chat.thought_rule is not None:
        report.ok("chat template", "Thoughts are dropped before each turn where the template drops them.")
        return
    # With a forced opener only turns with a thought can agree; the last difference is theirs.
    difference, place = found[[*found][-1]]
    if difference and len(found) > 1:
        keep = [name for name in ("preserve_thinking", "clear_thinking") if name in chat.chat_template]
        switch = f"chat_template_kwargs={{'{keep[0]}': {keep[0].startswith('preserve')}}} or " if keep else ""
        report.warning(
            "chat template",
            f"The template changes thoughts once something follows: {difference}. Rollouts keep what was sampled, so "
            "the policy is trained on conversations that a server with this template does not show it.",
            f"Pass {switch}a chat_template that keeps thoughts, and serve the model with it. Or set thinking='strip': "
            "the policy is then trained on what the server shows.",
        )
    elif place == "empty thought":
        report.warning(
            "chat template",
            f"The template leaves the empty thought of its generation prompt out of earlier turns: {difference}. A "
            "rollout keeps it, a server with this template does not show it.",
            "Set thinking='strip': the policy is then trained on what the server shows. Or pass a chat_template that "
            "writes it in every turn, and serve the model with it.",
        )
    elif difference:
        report.warning(
            "chat template",
            f"The template writes earlier messages in another way in a longer conversation: {difference}. A rollout "
            "keeps the ids that it has, a server with this template renders them anew.",
            "Pass a chat_template that leaves earlier messages alone, and serve the model with it.",
        )


def _check_tools_are_shown(report: Report, chat: ChatFormat, tools: Sequence[Schema]) -> None:
    for name, missing in hidden_parts(chat, tools).items():
        report.error(
            "chat template",
            f"The prompt does not show {', '.join(missing)} of the tool {name!r}: the model cannot know how to call "
            "it.",
            "Use a template that renders the whole schema ({{ tool | tojson }}).",
        )
