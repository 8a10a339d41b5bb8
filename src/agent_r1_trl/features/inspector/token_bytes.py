"""The bytes that each token id stands for, so that a page can show single tokens, and characters cut in two.

Three kinds of tokenizers: byte-level (GPT-2, Qwen, Llama 3), SentencePiece's pieces with `▁` for a blank and `<0xE4>`
for a byte (Llama 2, Gemma), and any other, whose `decode` is asked. For the first two the bytes of all tokens, joined,
are what `decode` returns for the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OF_PIECES = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """Id -> bytes, for one tokenizer.

    Args:
        tokenizer: of transformers, or the `Tokenizer` of tokenizers; None: an id is shown as its number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase = None) -> None:
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        is_fast = hasattr(self.tokenizer, "id_to_token")
        self._name: Any = self.tokenizer.id_to_token if is_fast else getattr(tokenizer, "convert_ids_to_tokens", None)
        self._options = {} if is_fast else {"clean_up_tokenization_spaces": False}
        added = (
            self.tokenizer.get_added_tokens_decoder() if is_fast else getattr(tokenizer, "added_tokens_decoder", {})
        )
        self.added = {token_id: str(getattr(token, "content", token)) for token_id, token in added.items()}
        self.strips_start = False
        """`decode` drops a blank at the beginning of a text, though it is part of the first token."""
        self._bytes = self._number if tokenizer is None else self._choose(_decoders(self.tokenizer))

    def __call__(self, token_id: int) -> bytes:
        """The bytes of an id; `[id]` for one that the tokenizer does not know."""
        return self._bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary, such as `<|im_end|>`, and is no blank."""
        if self.tokenizer is None:
            return True
        return bool(self.added.get(token_id, "").strip())

    def _choose(self, decoders: list[dict[str, Any]]) -> Callable[[int], bytes]:
        kinds = [decoder["type"] for decoder in decoders]
        if "ByteLevel" in kinds:
            table = _byte_level()

            def of_bytes(token: str) -> bytes:
                known = [table.get(character) for character in token]
                return token.encode("utf-8", "replace") if None in known else bytes(known)  # type: ignore[arg-type]

            return self._by_name(of_bytes)
        is_fused_late = "Strip" in kinds and "Fuse" not in kinds[: kinds.index("Strip")]
        if not kinds or not set(kinds) <= _OF_PIECES or is_fused_late:
            return self._asked
        replaced = [(str(item["pattern"].get("String")), item["content"]) for item in decoders if "pattern" in item]
        replaced += [(item["replacement"], " ") for item in decoders if item["type"] == "Metaspace"]
        strips = [item.get("start") or item.get("prepend_scheme", "never") != "never" for item in decoders]
        self.strips_start = any(strips)

        def of_pieces(token: str) -> bytes:
            if "ByteFallback" in kinds and (found := _BYTE.fullmatch(token)):
                return bytes.fromhex(found[1])
            for old, new in replaced:
                token = token.replace(old, new)
            return token.encode("utf-8", "replace")

        return self._by_name(of_pieces)

    def _by_name(self, convert: Callable[[str], bytes]) -> Callable[[int], bytes]:
        def of_id(token_id: int) -> bytes:
            token = self._name(token_id)
            return self._number(token_id) if token is None else convert(str(token))

        return of_id

    def _asked(self, token_id: int) -> bytes:
        """The text that `decode` appends to another token for this one: alone it would lose a blank before it."""
        anchor = next((i for i in range(300) if self._decode([i]).isascii() and self._decode([i]).isalpha()), None)
        alone = self._decode([token_id])
        if anchor is None:
            return alone.encode("utf-8", "replace")
        before, both = self._decode([anchor]), self._decode([anchor, token_id])
        return (both.removeprefix(before) if both.startswith(before) else alone).encode("utf-8", "replace")

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, **self._options))

    def _number(self, token_id: int) -> bytes:
        return f"[{token_id}]".encode()


def _decoders(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The steps of a fast tokenizer's decoder; none where there are no such."""
    decoder = getattr(tokenizer, "decoder", None) if hasattr(tokenizer, "id_to_token") else None
    state = json.loads(decoder.__getstate__()) if decoder is not None else None
    if state is None:
        return []
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _byte_level() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
