"""Which chat template a policy is trained with, and which grammar reads what it writes.

TRL's training templates and response templates come first; a template TRL does not know is recognised by what it
renders, or accepted as it is where it preserves prefixes and writes calls in a known form.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.calls import GRAMMAR_NAMES, READERS, find_grammar, named_grammar
from agent_r1_trl.chat.checks import control_tokens
from agent_r1_trl.chat.errors import GENERAL_FIX, ChatFormatError
from agent_r1_trl.chat.rendering import (
    PROBE_TOOL,
    ChatTemplate,
    calling,
    ends_turns,
    keeps_reasoning,
    preserves_prefixes,
    supports_tools,
)
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = {"tokenize", "add_generation_prompt", "chat_template", "tools", "return_dict", "continue_final_message"}

_NUM_CANDIDATES = 4
_VARIANTS: dict[tuple[str, str], str | None] = {}
"""Templates and special tokens -> training template: finding one takes longer than all else that a chat format is."""
_USER: Message = {"role": "user", "content": "u"}
_THINKING: Message = {"role": "assistant", "content": "a", "reasoning_content": "r"}
# Conversations that a revision must render as a template of TRL's to count as the same.
_PROBES: tuple[list[Message], ...] = (
    [{"role": "system", "content": "s"}, _USER],
    [_USER, calling()],
    [_USER, _THINKING, _USER, calling(), {"role": "tool", "name": "f", "content": "t"}, _THINKING],
)


def choose_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    requested: str | None,
    *,
    is_rendered_anew: bool,
    suggest: Callable[[PreTrainedTokenizerBase, str], str],
) -> tuple[str, bool]:
    """The training template's source, and whether it can render tool conversations.

    Args:
        tokenizer: read, never changed.
        requested: source of a template, name of one that TRL ships (`qwen3_training`), path of a `.jinja` file, or
            None for the tokenizer's own.
        is_rendered_anew: the conversation is rendered before every turn, so a template may change earlier turns.
        suggest: gives the fix where the tokenizer's own template cannot be used.

    Raises:
        ChatFormatError: if there is no template, or it renders earlier turns differently once later ones follow.
    """
    template = tokenizer.chat_template
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if requested is not None:
        template = _source(requested)
    elif isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        # A vocabulary alone does not tell Qwen2.5 from Qwen3, so no name can be recommended.
        raise ChatFormatError(f"tokenizer={name} has no chat template.", GENERAL_FIX)
    own = ChatTemplate(tokenizer, template)
    if not supports_tools(own):
        return template, False
    preserves = preserves_prefixes(own)
    if is_rendered_anew or (preserves and ends_turns(own) and keeps_reasoning(own)):
        return template, True
    training = _training_variant(_with_template(tokenizer, template))
    if preserves and (training is None or not _is_better(ChatTemplate(tokenizer, training), own)):
        return template, True
    if training is not None:
        return training, True
    # A thinking model's turn always has reasoning; how one without reasoning is rendered does not matter then.
    if preserves_prefixes(own, reasoning_content="thought"):
        return template, True
    raise ChatFormatError(
        f"chat_template of tokenizer={name} is not prefix preserving: it renders an assistant turn "
        "differently once a tool message follows, so the ids trained on would not be the ids of the conversation.",
        suggest(tokenizer, template) if requested is None else GENERAL_FIX,
    )


def choose_response_template(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, Any] | None:
    """The grammar of assistant turns under `template`; None if calls are written in no known form."""
    from trl import chat_template_utils as trl

    own = getattr(tokenizer, "response_template", None)
    of_trl = [value for name, value in vars(trl).items() if name.endswith("_template") and isinstance(value, dict)]
    if own is not None and own not in of_trl:
        return dict(own)
    return find_grammar(template)


def read_response_template(requested: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The grammar that `response_template` stands for: a dict, JSON, a JSON file, or the name of a family.

    Raises:
        ChatFormatError: if it is none of these.
    """
    if requested is None or requested == "":
        return None
    if isinstance(requested, str) and requested in GRAMMAR_NAMES:
        return named_grammar(requested)
    grammar: Any = requested
    try:
        if isinstance(requested, str):
            grammar = json.loads(requested if "{" in requested else Path(requested).read_text(encoding="utf-8"))
        fields = grammar["fields"]
        if (fields.get("tool_calls") or {}).get("content") not in READERS:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            load_response_template(grammar)
    except Exception as error:  # files, JSON and grammars fail in ways of their own
        raise ChatFormatError(
            f"response_template={str(requested)[:80]!r} is no grammar for reading turns ({error}).",
            f"Set it to the name of a family ({', '.join(GRAMMAR_NAMES)}), or to a transformers response_template as "
            "a dict or a JSON file.",
        ) from error
    return dict(grammar)


def text_grammar(template: str, turn_start: str, turn_end: str) -> dict[str, Any]:
    """A grammar without tool calls, for templates that cannot write them.

    `turn_start` is what the template writes before what the assistant says, `turn_end` the end-of-turn token.
    """
    fields: dict[str, Any] = {"content": {"close_pattern": re.escape(turn_end) + r"\s*", "content": "text"}}
    if "</think>" in template:
        fields["reasoning_content"] = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": turn_start or None, "fields": fields}


def check_template_kwargs(template: str, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments for every rendering.

    Raises:
        ChatFormatError: if one belongs to the rollout, or is to turn off a thinking that has no switch.
    """
    kwargs = dict(kwargs or {})
    if taken := _RESERVED & kwargs.keys():
        raise ChatFormatError(f"chat_template_kwargs has {sorted(taken)}: the rollout sets these.", "Remove them.")
    if kwargs.get("enable_thinking") is False and "enable_thinking" not in template:
        raise ChatFormatError(
            "chat_template_kwargs: enable_thinking=False has no effect, as the chat template has no such switch.",
            "Remove it; this model's thinking, if it has any, cannot be turned off by its template.",
        )
    return kwargs


# ---------------------------------------------------------------- TRL's templates


def _folder() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"


def _shipped() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_folder().glob("*.jinja"))}


def _source(requested: str) -> str:
    if "{" in requested:
        return requested
    path = Path(requested)
    for candidate in (path, _folder() / f"{requested.removesuffix('.jinja')}.jinja"):
        if candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    raise ChatFormatError(
        f"chat_template={requested!r} is neither a template's source, nor a file, nor a template that TRL ships.",
        f"Pass one of these; TRL ships {', '.join(_shipped())}.",
    )


def _training_variant(carrier: PreTrainedTokenizerBase) -> str | None:
    key = carrier.chat_template, str(carrier.special_tokens_map)  # what renderings depend on
    if key not in _VARIANTS:
        _VARIANTS[key] = _find_training_variant(carrier)
    return _VARIANTS[key]


def _find_training_variant(carrier: PreTrainedTokenizerBase) -> str | None:
    from trl import chat_template_utils as trl

    for candidate in (carrier, _with_template(carrier, _same_rendering(carrier))):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if training := trl.get_training_chat_template(candidate):
                return str(training)
    return None


def _same_rendering(carrier: PreTrainedTokenizerBase) -> str | None:
    """A template of TRL's that renders the probe conversations as the carrier's does (publishers revise theirs)."""
    mine = _renderings(carrier)
    if not any(mine):
        return None
    lines = set(carrier.chat_template.splitlines())
    originals = [source for name, source in _shipped().items() if not name.endswith("_training")]
    # A revision shares most lines with what it revises; compiling all templates would take seconds.
    closest = sorted(originals, key=lambda source: -len(lines & set(source.splitlines())))[:_NUM_CANDIDATES]
    for source in closest:
        if _renderings(_with_template(carrier, source), like=mine) == mine:
            return source
    return None


def _renderings(carrier: PreTrainedTokenizerBase, like: list[str | None] | None = None) -> list[str | None]:
    """The rendered probes, None where the template refuses one; stops at the first that is not as in `like`."""
    found: list[str | None] = []
    for probe in _PROBES:
        for length in range(1, len(probe) + 1):
            for tools, prompted in ((None, False), ([PROBE_TOOL], True)):
                try:
                    text = carrier.apply_chat_template(
                        probe[:length], tools=tools, tokenize=False, add_generation_prompt=prompted
                    )
                except Exception:  # templates raise what they like
                    text = None
                found.append(text)
                if like is not None and like[len(found) - 1] != text:
                    return found
    return found


def _is_better(training: ChatTemplate, template: ChatTemplate) -> bool:
    return ends_turns(training) and (keeps_reasoning(training) or not ends_turns(template))


def without_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The tokenizer's template for conversations without tools, if it has two and `template` is the other one."""
    named = tokenizer.chat_template
    if not isinstance(named, dict) or named.get("tool_use") != template:
        return None
    return named.get("default")


def _with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Any:
    carrier = copy.copy(tokenizer)
    carrier.chat_template = template
    return carrier


def suggested_template(
    tokenizer: PreTrainedTokenizerBase, template: str, *, is_sound: Callable[[str], bool]
) -> str | None:
    """The name of a template of TRL's to use in place of `template`; None if none is known to work.

    Something speaks for its family: lines in common with `template` (or ChatML, which many families write), and the
    tokenizer's own tokens for calls, if it has such. `is_sound` tries a template, by name, with the tokenizer.
    """
    lines = set(template.splitlines())
    shipped = _shipped()
    known = set(tokenizer.get_vocab())
    for_tools = {token for token in known if "tool" in token and control_tokens(token)}
    related = {}
    for name, source in shipped.items():
        if f"{name}_training" in shipped or not (not for_tools or for_tools & control_tokens(source)):
            continue
        num_lines = len(lines & set(source.splitlines()))
        is_chatml = name == "qwen2_5_training"
        if num_lines or is_chatml:
            related[name] = (num_lines, is_chatml, len(control_tokens(source) & known))
    likely = ["qwen3_training"] if "<think>" in template else []
    candidates = [*likely, *sorted(related, key=related.__getitem__, reverse=True)[:_NUM_CANDIDATES]]
    for name in candidates:
        try:
            if is_sound(name):
                return name
        except Exception:  # a template that does not fit the tokenizer fails in any way
            continue
    return None
