"""Words of a text, for rewards that count and compare them.

Letter case, accents, width, spacing and invisible characters make no difference, so that none of them makes an old
word new or a short text long. Everything here takes time in proportion to the length of the text.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from agent_r1_trl.rewards.format import FILLERS

# A number with its separators; letters and digits, in pieces, so that an endless word counts as many; an ornament.
_WORD = re.compile(r"\d{1,32}(?:[.,]\d{1,32})+|[^\W_]{1,32}|[^\w\s]{4,32}")
# Scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, kana, han.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")

_COMMON_WORDS = """
the and for but nor not yet with without from into onto upon over under about after before between through during
this that these those there here what which who whom whose when where why how all any both each few more most other
some such than then too very can could will would shall should may might must has have had having does did doing done
are was were been being its his her hers him she they them their theirs you your yours our ours also just only own
same once again further because while until against out off down per via one
let lets okay well hmm wait alright sure maybe perhaps think thinking thought thoughts know need needs want wants now
first second third next last finally therefore thus hence however since step steps answer question user reason
reasoning consider considering carefully look looking see going get got make made use used using say says said tell
tells told give given find found result results information based according tool tools call calls called response
text content name value error none null true false
"""
_COMMON = frozenset(_COMMON_WORDS.split())
"""Function words, and what any reasoning may say whatever it is about."""


@functools.lru_cache(1 << 16)
def _plain(letter: str) -> str:
    """The form to compare a character in. One at a time: long runs of marks would take more than linear time."""
    category = unicodedata.category(letter)
    if letter in FILLERS or category in ("Cc", "Zs", "Zl", "Zp"):
        return " "
    if category == "Cf" or category.startswith("M"):
        return ""
    parts = unicodedata.normalize("NFKD", letter).casefold()
    return "".join(part for part in parts if not unicodedata.category(part).startswith("M"))


def words_of(text: str) -> list[str]:
    """The words and numbers of a text in order, in the form in which they are compared.

    A script without spaces gives pairs of neighbouring characters.

    >>> words_of("Caf\u00e9 No.\u200b 5 has 1,200 SEATS")
    ['cafe', 'no', '5', 'has', '1,200', 'seats']
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    return _WORD.findall(_UNSPACED.sub(_pairs, "".join(map(_plain, text))))


def content_words(words: Iterable[str]) -> list[str]:
    """Words with content: numbers, and words that are neither short nor of the kind that any text has.

    >>> content_words(words_of("So the answer is that 7 penguins live on it"))
    ['7', 'penguins', 'live']
    """
    return [
        word
        for word in words
        if word not in _COMMON
        and word[0].isalnum()  # no ornament
        and (len(word) > 2 or not word.isascii() or any(letter.isdigit() for letter in word))
    ]


def n_grams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """All runs of `n` neighbouring words; none if there are fewer words.

    >>> list(n_grams(["a", "b", "c"], 2))
    [('a', 'b'), ('b', 'c')]
    """
    return zip(*(words[start:] for start in range(n)), strict=False)


def _pairs(match: re.Match[str]) -> str:
    run = match[0]
    return f" {' '.join(map(''.join, itertools.pairwise(run))) or run} "
