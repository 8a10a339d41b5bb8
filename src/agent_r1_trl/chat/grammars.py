"""How model families write tool calls and reasoning, each under a name.

A grammar has the form of a transformers `response_template`. In those of our own `content` names a reader of
`calls.py` in `tool_calls`, and `hints` the markers of an attempted call. The others are TRL's. The table in
docs/model-families.md lists what belongs to which model.
"""

from __future__ import annotations

import copy
from typing import Any

Grammar = dict[str, Any]


def _grammar(
    reader: str, opening: str, closing: str, *hints: str, reasoning: tuple[str, str] = ("<think>", "</think>")
) -> Grammar:
    calls = {"open_pattern": opening, "close_pattern": closing, "repeats": True, "content": reader}
    fields = {
        "reasoning_content": {"open": reasoning[0], "close": reasoning[1], "content": "text"},
        "tool_calls": calls | {"hints": list(hints)},
        "content": {"content": "text"},
    }
    return {"defaults": {"role": "assistant"}, "fields": fields}


_TAG, _TAG_END = r"<tool_call>\s*", r"</tool_call>\s*"
GRAMMARS: dict[str, Grammar] = {
    "hermes": _grammar("json_call", _TAG, _TAG_END, "<tool_call>", "</tool_call>"),
    "qwen3_coder": _grammar("function_calls", _TAG, _TAG_END, "<tool_call>", "</tool_call>", "<function="),
    "glm": _grammar("pair_calls", _TAG, _TAG_END, "<tool_call>", "</tool_call>", "<arg_key>"),
    "mistral": _grammar(
        "mistral_calls", r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\]|\[/THINK\])|\Z", "[TOOL_CALLS]",
        reasoning=("[THINK]", "[/THINK]"),
    ),
    "deepseek": _grammar(
        "deepseek_calls", r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
        r"<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?", "<｜tool▁call", "<｜tool▁sep｜>",
    ),
    "seed": _grammar(
        "function_calls", r"<seed:tool_call>", r"</seed:tool_call>\s*", "seed:tool_call>", "<function=",
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    "nemotron_nano": _grammar("json_calls", r"<TOOLCALL>", r"</TOOLCALL>\s*", "TOOLCALL>"),
    "lfm2": _grammar("python_calls", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>\s*", "<|tool_call_"),
}  # fmt: skip
"""Name -> grammar; the names are accepted as `response_template`."""
_OF_TRL = {"llama3": "llama3_template", "gpt_oss": "gptoss_template", "gemma4": "gemma4_template"}
GRAMMAR_NAMES = (*GRAMMARS, *_OF_TRL)
"""What `response_template` takes as a name."""

# Text that a template of the family contains, none of it from a prompt, which publishers reword; the first row that
# fits decides.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("seed", ("<seed:tool_call>",)),
    ("nemotron_nano", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("glm", ("<arg_key>", "<tool_call>")),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("hermes", ("<tool_call>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("gpt_oss", ("<|channel|>", "<|call|>")),
    ("llama3", ("<|start_header_id|>", '"parameters": ')),
)


def named_grammar(name: str) -> Grammar:
    """A copy of the grammar with one of `GRAMMAR_NAMES`."""
    if name in GRAMMARS:
        return copy.deepcopy(GRAMMARS[name])
    # Imported here: an environment server must not wait for torch.
    from trl import chat_template_utils as trl

    return copy.deepcopy(getattr(trl, _OF_TRL[name]))


def find_grammar(template: str) -> Grammar | None:
    """The grammar of a template, known by the markers in its source; None if there is none."""
    for name, marks in _MARKS:
        if all(mark in template for mark in marks):
            return named_grammar(name)
    return None
