"""Scores of a short answer against gold answers, as SQuAD defines them.

With several gold answers, the best score counts. Texts are normalised first: lower case, without ASCII punctuation and
the articles a, an and the, white space collapsed (Rajpurkar et al. 2016, arXiv 1606.05250). The scores raise
`ValueError` for a prediction that is not a string, and for golds that `check_golds` refuses.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

Golds = str | float | Iterable[str | float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space.

    >>> normalize_answer("The  Eiffel-Tower!")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Golds) -> float:
    """1.0 if the normalised prediction equals a normalised gold answer, else 0.0.

    >>> exact_match("the Paris", ["Paris", "Paris, France"])
    1.0
    """
    return _best(prediction, golds, lambda answer, gold: float(answer == gold))


def f1_score(prediction: str, golds: Golds) -> float:
    """Harmonic mean of precision and recall over words, in [0, 1].

    The answers yes, no and noanswer score only if they match exactly; an empty answer matches only an empty one.

    >>> f1_score("the city of Paris", "Paris")
    0.5
    """
    return _best(prediction, golds, _f1)


def sub_em(prediction: str, golds: Golds) -> float:
    """1.0 if a normalised gold answer occurs anywhere inside the normalised prediction, else 0.0.

    This is generous ("I do not know" contains "no"): use it to compare with papers that report it, not for training.
    """
    return _best(prediction, golds, lambda answer, gold: float(gold in answer if gold else answer == gold))


def check_golds(golds: object) -> list[str]:
    """The gold answers as a list of texts.

    Numbers are written out, whole ones without a fraction: a CSV column of whole numbers in which some are missing is
    read as 1889.0, ...

    Raises:
        ValueError: they are neither a string, a number nor a non-empty list of such.
    """
    given = list(golds) if isinstance(golds, (list, tuple, set, frozenset)) else [golds]
    if not given or not all(map(_is_answer, given)):
        raise ValueError(f"golds={golds!r:.200}: must be a string, a number, or a non-empty list of such.")
    return [str(int(gold) if isinstance(gold, float) and gold.is_integer() else gold) for gold in given]


def _is_answer(gold: object) -> bool:
    is_finite = isinstance(gold, float) and math.isfinite(gold)
    return is_finite or (isinstance(gold, str | int) and not isinstance(gold, bool))


def _best(prediction: object, golds: object, score: Callable[[str, str], float]) -> float:
    if not isinstance(prediction, str):
        raise ValueError(f"prediction={prediction!r:.200}: must be a string; pass '' if there is no answer.")
    answer = normalize_answer(prediction)
    return max(score(answer, normalize_answer(gold)) for gold in check_golds(golds))


def _f1(answer: str, gold: str) -> float:
    if answer == gold:
        return 1.0
    if answer in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS:
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    num_common = sum((Counter(answer_words) & Counter(gold_words)).values())
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(answer_words), num_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)
