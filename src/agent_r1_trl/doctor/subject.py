"""The model under examination: its tokenizer, and what is known about the weights without loading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.doctor.report import Report


@dataclass(kw_only=True)
class Subject:
    """What the checks look at."""

    tokenizer: Any
    num_embeddings: int | None = None
    """Rows of the embedding matrix."""
    max_length: int | None = None
    """Maximum number of positions."""
    eos_token_ids: list[int] | None = None
    """Those of the generation config; None if there is none."""


def load_subject(
    report: Report, given: Any, tokenizer: Any = None, *, trust_remote_code: bool = False
) -> Subject | None:
    """Read a path or Hub name, a tokenizer, or a model; None if nothing can be examined.

    Args:
        report: collects the findings.
        given: path, name, tokenizer, processor, or model.
        tokenizer: needed for a model whose config does not name its folder.
        trust_remote_code: run code that comes with the model.
    """
    if isinstance(given, str):
        return _load(report, given, tokenizer, trust_remote_code)
    if hasattr(given, "apply_chat_template"):
        return Subject(tokenizer=given, max_length=_tokenizer_length(given))
    config = getattr(given, "config", None)
    if config is None:
        report.error(
            "model",
            f"model={given!r:.100} is neither a name, nor a tokenizer, nor a model.",
            "Pass a path or Hub name, a tokenizer, or a transformers model.",
        )
        return None
    if tokenizer is None:
        loaded = _load(report, str(getattr(config, "_name_or_path", "")), None, trust_remote_code)
        if loaded is None:
            return None
        tokenizer = loaded.tokenizer
    subject = Subject(tokenizer=tokenizer, max_length=_tokenizer_length(tokenizer))
    _read_config(subject, config, getattr(given, "generation_config", None))
    subject.num_embeddings = given.get_input_embeddings().weight.shape[0]
    return subject


def check_tokenizer(report: Report, subject: Subject, chat: ChatFormat) -> None:
    """The vocabulary fits the embeddings, pad and eos fit the template's turns, text survives encoding."""
    last_id = max([len(chat.tokenizer) - 1, *chat.tokenizer.added_tokens_decoder])
    if subject.num_embeddings is not None and last_id >= subject.num_embeddings:
        report.error(
            "tokenizer",
            f"The tokenizer's last id is {last_id}, but the model has only {subject.num_embeddings} embeddings: the "
            "first prompt with such a token crashes.",
            "model.resize_token_embeddings(len(tokenizer)), or use the tokenizer that belongs to the model.",
        )
    turn_ends = chat.tokenizer.convert_ids_to_tokens(chat.turn_end_ids)
    _check_special_tokens(report, subject, chat, turn_ends)
    changed = [text for text in _PROBES if chat.encoder.to_text(chat.encoder.encode(text)) != text]
    if changed:
        report.warning(
            "tokenizer",
            f"Text is not the same after encoding and decoding, {changed[0]!r} for example: tool results lose what "
            "the vocabulary cannot spell.",
            "Use a tokenizer with byte fallback (byte-level BPE), or keep tool results within its alphabet.",
        )
    sizes = f" of {subject.num_embeddings} embeddings" if subject.num_embeddings else ""
    report.ok("tokenizer", f"{last_id + 1} ids{sizes}; turns end with {', '.join(turn_ends)}; text survives.")


def _check_special_tokens(report: Report, subject: Subject, chat: ChatFormat, turn_ends: list[str]) -> None:
    tokenizer, ends = chat.tokenizer, ", ".join(turn_ends)
    opening = set(_generation_prompt(chat)) - set(chat.turn_end_ids)
    for role in ("eos", "pad"):
        token_id = getattr(tokenizer, f"{role}_token_id")
        if token_id is not None and token_id in opening:
            report.error(
                "tokenizer",
                f"{role}_token={tokenizer.decode([token_id])!r} is a token with which the template opens turns.",
                f"Set tokenizer.{role}_token: the template ends turns with {ends}.",
            )
    if tokenizer.eos_token_id is None:
        report.error(
            "tokenizer",
            "The tokenizer has no eos_token: generation outside of rollouts would never stop.",
            f"tokenizer.eos_token = {turn_ends[0]!r}, the template's end of a turn.",
        )
    stops = {*(subject.eos_token_ids or ()), tokenizer.eos_token_id}
    if subject.eos_token_ids is not None and not stops & set(chat.turn_end_ids):
        report.warning(
            "tokenizer",
            f"The template ends turns with {ends}, at which neither the tokenizer's eos_token "
            f"({tokenizer.eos_token!r}) nor the model's generation config stops. Rollouts do; the published "
            "model would run on.",
            f"model.generation_config.eos_token_id = {[*subject.eos_token_ids, *chat.turn_end_ids]}",
        )
    plain = [name for name in turn_ends if name not in chat.encoder.special_ids]
    if plain:
        report.warning(
            "tokenizer",
            f"The end-of-turn token {', '.join(plain)} is not a special token: it stays in decoded answers.",
            f"tokenizer.add_special_tokens({{'additional_special_tokens': {plain}}})",
        )


_PROBES = ("plain words", '{"a": [1, 2.5, null]}', "tabs\tand\nlines\n\n", "Zürich — naïve", "東京", "🙂🚀")


def _generation_prompt(chat: ChatFormat) -> list[int]:
    asked = chat.encode_conversation([{"role": "user", "content": "."}])
    begun = chat.encode_conversation([{"role": "user", "content": "."}], generation_prompt=True)
    return begun[len(asked) :]


def _load(report: Report, name: str, tokenizer: Any, trust_remote_code: bool) -> Subject | None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # every loader raises its own
        report.error(
            "model",
            f"model={name!r}: its tokenizer cannot be loaded ({str(error).splitlines()[0]}).",
            "Set trust_remote_code=True if you trust the code that comes with it."
            if "trust_remote_code" in str(error)
            else "Pass a local folder with tokenizer.json, or a Hub name that exists and that you may read.",
        )
        return None
    subject = Subject(tokenizer=tokenizer, max_length=_tokenizer_length(tokenizer))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception:  # a folder with a tokenizer alone can be examined as well
        return subject
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except Exception:
        generation_config = None
    _read_config(subject, config, generation_config)
    return subject


def _read_config(subject: Subject, config: Any, generation_config: Any) -> None:
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    subject.num_embeddings = getattr(text_config, "vocab_size", None)
    positions = getattr(text_config, "max_position_embeddings", None)
    subject.max_length = min(filter(None, (positions, subject.max_length)), default=None)
    eos = getattr(generation_config, "eos_token_id", None)
    if generation_config is not None:
        subject.eos_token_ids = list(eos) if isinstance(eos, (list, tuple)) else [eos] if eos is not None else []


def _tokenizer_length(tokenizer: Any) -> int | None:
    length = getattr(getattr(tokenizer, "tokenizer", tokenizer), "model_max_length", None)
    return length if isinstance(length, int) and length < 10**9 else None
