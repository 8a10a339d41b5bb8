"""Small byte-level BPE tokenizers with the real families' special tokens and TRL's own chat templates.

    from agent_r1_trl.testing import FAMILIES, chat_of, make_tokenizer
    tokenizer = make_tokenizer("qwen3")

Nothing is downloaded. The first one takes well under a second; every call of `make_tokenizer` returns a fresh object,
free to be changed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_r1_trl.chat.format import ChatFormat

# (spelling, special?) as the published tokenizers have it.
_SPECIAL, _WORD = True, False
_QWEN2_5 = [
    ("<|endoftext|>", _SPECIAL),
    ("<|im_start|>", _SPECIAL),
    ("<|im_end|>", _SPECIAL),
    ("<|vision_start|>", _SPECIAL),
    ("<tool_call>", _WORD),
    ("</tool_call>", _WORD),
    ("<|fim_prefix|>", _WORD),
]
_QWEN3 = [
    *_QWEN2_5,
    ("<tool_response>", _WORD),
    ("</tool_response>", _WORD),
    ("<think>", _WORD),
    ("</think>", _WORD),
]
_LLAMA3 = [
    (spelling, _SPECIAL)
    for spelling in (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|finetune_right_pad_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    )
]
_GEMMA4 = [
    (spelling, _SPECIAL)
    for spelling in (
        "<pad>",
        "<eos>",
        "<bos>",
        "<|turn>",
        "<turn|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
        "<|think|>",
        "<|channel>",
        "<channel|>",
    )
]
_GPTOSS = [
    (spelling, _SPECIAL)
    for spelling in (
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    )
]

# family -> (added tokens, bos, eos, pad, file of TRL's chat template)
_SPECS = {
    "qwen3": (_QWEN3, None, "<|im_end|>", "<|endoftext|>", "qwen3"),
    "qwen2_5": (_QWEN2_5, None, "<|im_end|>", "<|endoftext|>", "qwen2_5"),
    "llama3": (_LLAMA3, "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>", "llama3_1"),
    "llama3_2": (_LLAMA3, "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>", "llama3_2"),
    "gemma4": (_GEMMA4, "<bos>", "<turn|>", "<pad>", "gemma4"),
    "gemma4_v5": (_GEMMA4, "<bos>", "<turn|>", "<pad>", "gemma4_v5"),
    "gptoss": (_GPTOSS, "<|startoftext|>", "<|return|>", "<|endoftext|>", "gptoss"),
}
FAMILIES = tuple(_SPECS)
"""Names for `make_tokenizer` and `chat_of`: forms of calls that differ in as many ways as we know."""

_CORPUS = """\
You are a helpful assistant. You may call one or more functions to assist with the user query.
Question: what is the capital of the country with the highest point? Answer: the capital of France is Paris.
{"type": "function", "function": {"name": "search", "description": "Search the corpus.", "parameters": {"type":
"object", "properties": {"query": {"type": "string", "description": "What to look for."}}, "required": ["query"]}}}
{"name": "search", "arguments": {"query": "capital of France"}} {"name": "calculator", "parameters": {"x": 1.5}}
user assistant system tool ipython model developer analysis commentary final functions.search to=assistant json
response:search{value: } call:search{query: } thought Environment: Today Date: Cutting Knowledge December 2023
<answer> Paris </answer> <search> query </search> <information> text </information> <b>bold</b> 1 2 3 + 4 = 7.


Grüße aus Zürich, naïve café, 東京は日本の首都です。 emoji 🙂🚀
"""


def read_template(name: str) -> str:
    """Source of one of TRL's chat templates, for example `qwen3_training`."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    # Splits as Qwen does: punctuation takes the newlines after it along, so merges cross message borders.
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer.to_str()


def make_tokenizer(family: str, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of a family (see `FAMILIES`), about 700 ordinary tokens plus the family's own.

    Args:
        family: one of `FAMILIES`.
        chat_template: source to carry instead of the family's original template.
    """
    added, bos, eos, pad, template = _SPECS[family]
    return build_tokenizer(added, bos, eos, pad, chat_template or read_template(template))


@functools.cache
def chat_of(family: str = "qwen3") -> ChatFormat:
    """The chat format of a family (see `FAMILIES`), the same object each time.

    Examples:
        >>> chat = chat_of("qwen2_5")
        >>> chat.encoder.to_text(chat.encode_reply({"role": "assistant", "content": "Oslo"}))
        'Oslo<|im_end|>'
    """
    return ChatFormat(make_tokenizer(family))


def build_tokenizer(
    added: Sequence[tuple[str, bool]], bos: str | None, eos: str, pad: str | None, chat_template: str | dict[str, str]
) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of the same ordinary tokens with these (spelling, special?) tokens after them."""
    backend = Tokenizer.from_str(_trained())
    # Ids after the vocabulary, in order, as the published tokenizers have them.
    for spelling, special in added:
        token = AddedToken(spelling, normalized=False, special=special)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer
