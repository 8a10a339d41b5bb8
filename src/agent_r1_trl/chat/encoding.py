"""Text to ids and back, with data kept apart from the tokens that steer a conversation.

A tokenizer turns every spelling of a special token into that token, wherever the spelling comes from. Here a copy of
the tokenizer's back end knows those tokens under private names. Rendered text is encoded with the copy after two
replacements: a live spelling (written by the template) becomes the private name, a hidden one (written in data)
becomes plain characters. Everything else about the tokenisation is the tokenizer's own, including merges across the
border between template and data.

Not covered: chat templates (`rendering.py`, `templates.py`), reading calls (`parsing.py`).
"""

from __future__ import annotations

import bisect
import itertools
import json
import operator
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.safe_text import map_texts, whole
from agent_r1_trl.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters: no tokenizer's normaliser or template filter changes them, nor the digits between them.
_OPEN, _MIDDLE, _CLOSE = "\U000f0000", "\U000f0002", "\U000f0001"

LONG_TEXT = 50_000
"""Characters from which on tokenising takes so long (50 ms and more) that it belongs into a thread."""


@dataclass
class EncodedText:
    """A rendered text that was encoded in pieces, before it changed."""

    cuts: list[tuple[int, int]] = field(default_factory=list)
    """How many characters and ids stand before each piece."""
    pieces: dict[str, list[int]] = field(default_factory=dict)
    """Text -> ids, of earlier texts too."""


class TextEncoder:
    """Encodes rendered chat text and decodes sampled ids without confusing data with control tokens.

    Args:
        tokenizer: a fast Hugging Face tokenizer; it is read, never changed.
        template: source of the chat template. Added tokens spelled in it count as control tokens even when the
            tokenizer does not mark them special (`<tool_call>` and `<think>` of Qwen, say).

    Raises:
        ChatFormatError: the tokenizer's back end cannot be copied.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.tokenizer = tokenizer
        self.special_ids: dict[str, int] = {}
        """Spelling -> id of the tokens that the tokenizer marks special."""
        self._borders: set[str] = set()
        """Control tokens that leave the text beside them alone."""
        self.control_ids: dict[str, int] = {}
        """Spelling -> id of the special tokens and of the added tokens that the template uses."""
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
            spelling = token.content
            if not spelling.strip():
                continue
            is_special = token.special or spelling in tokenizer.all_special_tokens
            if is_special:
                self.special_ids[spelling] = token_id
            if is_special or spelling in template or re.fullmatch(r"<\|.*\|>", spelling):
                self.control_ids[spelling] = token_id
                if not (token.lstrip or token.rstrip or token.single_word):
                    self._borders.add(spelling)
        # Drawn at random so that no data can spell a private name.
        self._key = f"{_OPEN}{secrets.randbelow(10**12)}{_MIDDLE}"
        self._spellings = list(self.control_ids)
        self._longest = max(map(len, self._spellings), default=0)
        self._control_id_set = set(self.control_ids.values())
        self._control_re = _any_of(self._spellings)
        self._special_re = _any_of(list(self.special_ids))
        self._hidden_re = re.compile(re.escape(self._key) + rf"h(\d+){_CLOSE}")
        self._backend = self._copy_backend()

    # ---------------------------------------------------------------- hiding data

    def hide(self, data: object, *, special_only: bool = False) -> Any:
        """Replace the spellings of control tokens in every string of JSON-like data; `restore` undoes it.

        `special_only` leaves the added tokens alone that the tokenizer does not mark special.
        """
        pattern = self._special_re if special_only else self._control_re
        return map_texts(lambda text: pattern.sub(lambda match: self._hidden(match[0]), text), data)

    def hide_prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a prompt: special tokens are text in all but what an assistant said."""
        hidden = []
        for message in messages:
            if message.get("role") != "assistant":
                message = self.hide(message, special_only=True)
            hidden.append(message)
        return hidden

    def restore(self, data: object) -> Any:
        """Undo `hide` in every string of `data`."""

        def spelling(match: re.Match[str]) -> str:
            return self._spellings[int(match[1])]

        return map_texts(lambda text: self._hidden_re.sub(spelling, text), data)

    def valid_tokens(self, text: str, start: int = 0) -> list[tuple[int, int, str]]:
        """(start, end, spelling) of the control tokens in rendered text that are not hidden, from a character on."""
        matches = self._control_re.finditer(text, start)
        return [(match.start(), match.end(), match[0]) for match in matches]

    # ---------------------------------------------------------------- text -> ids

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: live spellings become tokens, hidden ones stay text."""
        return list(self._tokenize(self._privately(text)).ids)

    def encode_on(self, text: str, known: EncodedText, num_kept: int) -> tuple[int, list[int]]:
        """`encode`, for a text of which parts were encoded before.

        The text is cut before control tokens, across which no tokenizer merges.

        Args:
            text: rendered text.
            known: of an earlier text; becomes that of this one.
            num_kept: characters at the start that are those of the earlier text.

        Returns:
            how many ids at the start are those of the earlier text, and the ids after them.
        """
        while known.cuts:
            num_characters, _ = known.cuts[-1]
            if num_characters + self._longest <= num_kept:  # the token behind the cut was kept as well
                break
            known.cuts.pop()
        start, num_ids = known.cuts.pop() if known.cuts else (0, 0)
        cuts = [start]
        for at, _, token in self.valid_tokens(text, start):
            if token in self._borders and at > start:
                cuts.append(at)
        ids: list[int] = []
        for begin, end in itertools.pairwise([*cuts, len(text)]):
            piece = text[begin:end]
            if piece not in known.pieces:
                known.pieces[piece] = self.encode(piece)
            known.cuts.append((begin, num_ids + len(ids)))
            ids += known.pieces[piece]
        return num_ids, ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Ids of concatenated (rendered text, flag) pairs, and each token's flag, both (N,).

        A token that reaches into a flagged segment carries the flag.
        """
        spans = []
        text = ""
        for piece, flag in segments:
            start = len(text)
            text += self._privately(piece)
            if flag:
                spans.append((start, len(text)))
        encoding = self._tokenize(text)
        offsets = encoding.offsets  # start and end of each token
        flags = [False] * len(offsets)
        for start, end in spans:
            # from the first token that ends behind the start, to the last that begins before the end
            first = bisect.bisect_right(offsets, start, key=operator.itemgetter(1))
            stop = bisect.bisect_left(offsets, end, lo=first, key=operator.itemgetter(0))
            flags[first:stop] = [True] * (stop - first)
        return list(encoding.ids), flags

    def truncate(self, text: str, max_tokens: int) -> str:
        """A prefix of plain text, as long as possible, that encodes to at most `max_tokens` ids."""
        if max_tokens <= 0:
            return ""
        text = whole(text)
        # Plain text throughout: offsets then count characters of `text` itself.
        offsets = self._tokenize(text).offsets
        if len(offsets) <= max_tokens:
            return text
        keep = max_tokens
        while keep > 0:
            # The token after the cut may start inside a character whose first bytes were kept: drop that character.
            end_of_kept, start_of_next = offsets[keep - 1][1], offsets[keep][0]
            prefix = text[: min(end_of_kept, start_of_next)]
            # A shorter text may be cut into more tokens.
            num_tokens = len(self._backend.encode(prefix, add_special_tokens=False).ids)
            if num_tokens <= max_tokens:
                return prefix
            keep -= 1
        return ""

    # ---------------------------------------------------------------- ids -> text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, in which every live spelling stands for a sampled control token.

        A spelling that the policy composed out of ordinary tokens is hidden.
        """
        text = self.to_text(token_ids)
        num_sampled = sum(token_id in self._control_id_set for token_id in token_ids)
        if len(self._control_re.findall(text)) == num_sampled:
            return text
        pieces = []
        for is_control, run in itertools.groupby(token_ids, self._control_id_set.__contains__):
            ids = list(run)
            if is_control:
                pieces += [self.to_text([token_id]) for token_id in ids]
            else:
                pieces.append(self.hide(self.to_text(ids)))
        return "".join(pieces)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """The characters that ids spell, control tokens included, nothing hidden and nothing tidied up."""
        if not token_ids:
            return ""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    # ---------------------------------------------------------------- private names

    def mark(self, name: str) -> str:
        """A string that no data contains, to be found again in rendered text."""
        return f"{self._key}{name}{_CLOSE}"

    def _hidden(self, spelling: str) -> str:
        return self.mark(f"h{self._spellings.index(spelling)}")

    def _tokenize(self, text: str) -> Any:
        """The back end's encoding of a text, without special tokens around it."""
        if len(text) < LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=False)
        # Of the two only this one lets other threads run meanwhile.
        return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _privately(self, text: str) -> str:
        """Private names for live spellings, plain characters for hidden ones."""

        def private_name(match: re.Match[str]) -> str:
            return self.mark(str(self._spellings.index(match[0])))

        live = self._control_re.sub(private_name, text)
        return str(whole(self.restore(live)))

    def _copy_backend(self) -> Any:
        from tokenizers import Tokenizer

        names = {spelling: self.mark(str(index)) for index, spelling in enumerate(self._spellings)}
        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        spec.update(truncation=None, padding=None, post_processor=None)
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_vocabulary(spec["model"], names)
        try:
            backend = Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the Rust side raises bare Exceptions
            raise self._inconsistent(f"its back end cannot be copied with control tokens renamed ({error})") from error
        moved = []
        for spelling, token_id in self.control_ids.items():
            if backend.token_to_id(names[spelling]) != token_id:
                moved.append(spelling)
        if moved:
            raise self._inconsistent(f"the added tokens {moved[:5]} have ids that do not follow the vocabulary")
        return backend

    def _inconsistent(self, problem: str) -> ChatFormatError:
        return ChatFormatError(
            f"tokenizer={type(self.tokenizer).__name__}: {problem}, so that they cannot be kept apart from text.",
            "Save the tokenizer with save_pretrained, which gives added tokens ids after the vocabulary, and load it "
            "again.",
        )


def split_by_author(delta: str, glue: str, marks: Sequence[str]) -> list[tuple[str, bool]]:
    """Cut rendered observations into (text, is environment text) pairs.

    `glue` is the same rendering with `marks`, one per observation, in place of the contents.
    """
    if not marks:
        return [(delta, False)]
    pieces = []
    for mark in marks:
        before, found, glue = glue.partition(mark)
        if not found:
            return [(delta, True)]
        pieces.append(before)
    head, *between = pieces
    tail = glue  # behind the last mark
    has_both_ends = delta.startswith(head) and delta.endswith(tail)
    if not has_both_ends or len(head) + len(tail) > len(delta):
        return [(delta, True)]
    segments = [(head, False)]
    rest = delta[len(head) : len(delta) - len(tail)]
    for piece in between:
        heard, found, rest = rest.partition(piece)
        if not found:
            return [(delta, True)]
        segments += [(heard, True), (piece, False)]
    return [*segments, (rest, True), (tail, False)]


def _any_of(spellings: list[str]) -> re.Pattern[str]:
    """A pattern that finds any of the spellings, of several at one place the longest; nothing for an empty list."""
    if not spellings:
        return re.compile(r"(?!)")
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _rename_vocabulary(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename control tokens inside a tokenizer.json model section, so that ordinary text cannot reach their ids."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...]
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    elif isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if isinstance(model.get("merges"), list):
        kept = []
        for merge in model["merges"]:
            left, right = merge if isinstance(merge, list) else merge.split(" ")
            if not names.keys() & {left, right, left + right}:
                kept.append([left, right])
        model["merges"] = kept
