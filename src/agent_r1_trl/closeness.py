"""Which known name a person meant by one that is not known: few typing mistakes in it, or in some of its words.

Names are compared word by word, because a name is rarely mistaken as a whole: `adamm` is `adamw`, the first word of
`adamw_torch`, with one wrong letter. As a string of characters it is nearer to `adalomo`.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

_LONGEST = 100
"""Characters of a name that are looked at."""
_WORDS = {"lr": "learning_rate"}
"""Word that people write for others -> these."""
_CUT_SHORT, _KEY, _PART = 1.2, 1.4, 1.5
"""Costs, in typing mistakes: a word is cut short; a key without its mapping begins so; a name has further words."""
_MOST_MORE = 3
"""Further words that a name may have."""


def closest(name: str, known: Iterable[str], *, is_sure: bool = False) -> str | None:
    """The known name that is meant, the first of several that are equally close; None if none is close.

    Args:
        name: the one that is not known.
        known: in the order of their importance.
        is_sure: take only a whole name with next to no typing mistake.

    >>> closest("adamm", ["adalomo", "adamw_torch", "adamw_8bit"])
    'adamw_torch'
    >>> closest("grad_accum", ["max_grad_norm", "gradient_accumulation_steps"])
    'gradient_accumulation_steps'
    """
    given = _words(name[:_LONGEST])
    listed = [*known]
    costs = {item: cost for item in listed if (cost := _cost(given, item, is_sure)) is not None}
    if costs:
        return min(costs, key=lambda item: costs[item])
    if is_sure:
        return None
    texts = {"_".join(_words(item)): item for item in reversed(listed)}
    near = difflib.get_close_matches("_".join(given), texts, n=1)
    return texts[near[0]] if near else None


def _words(name: str) -> list[str]:
    found = [word for word in re.split(r"[\W_]+", name.lower()) if word]
    return [part for word in found for part in _WORDS.get(word, word).split("_")]


def _cost(given: list[str], name: str, is_sure: bool) -> float | None:
    """How far a name is from the given words, in typing mistakes; None if it is not close."""
    words, num_of_group = _words(name), len(_words(name.rpartition(".")[0]))
    text, whole = "".join(given), "".join(words)
    if is_sure:
        mistakes = num_mistakes(text, whole)
        return mistakes if mistakes <= len(text) // 5 else None
    if len(given) == len(words):
        return _cost_of_words(given, words)
    if num_mistakes(text, whole) <= 1:  # learningrate
        return 1.0
    if len(text) < 4 or not 0 < len(words) - len(given) <= _MOST_MORE:
        return None
    costs = []
    for chosen in itertools.combinations(range(len(words)), len(given)):
        cost = _cost_of_words(given, [words[place] for place in chosen])
        if cost is not None:
            costs.append(cost + (_KEY if chosen[0] == num_of_group > 0 else _PART))
    return min(costs, default=None)


def _cost_of_words(given: list[str], words: Sequence[str]) -> float | None:
    """The sum over pairs of words; None if one of the pairs is not close."""
    total = 0.0
    for one, other in zip(given, words, strict=True):
        mistakes = num_mistakes(one.removesuffix("s"), other.removesuffix("s"))
        if mistakes <= _accepted(one):
            total += mistakes
        elif min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one)):
            total += _CUT_SHORT
        else:
            return None
    return total


def _accepted(word: str) -> int:
    """Typing mistakes that a word of this length may have."""
    return 0 if len(word) < 3 else 1 if len(word) < 6 else 2 if len(word) < 10 else 3


def num_mistakes(one: str, other: str) -> int:
    """Letters to insert, remove, replace, or exchange with their neighbour, to make one text the other.

    >>> num_mistakes("sdg", "sgd"), num_mistakes("adamm", "adamw"), num_mistakes("beta", "betas")
    (1, 1, 1)
    """
    before: list[int] = []
    row = [*range(len(other) + 1)]
    for i, letter in enumerate(one):
        earlier, before, row = before, row, [i + 1]
        for j, wanted in enumerate(other):
            best = min(before[j] + (letter != wanted), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == wanted:
                best = min(best, earlier[j - 1] + 1)
            row.append(best)
    return row[-1]
