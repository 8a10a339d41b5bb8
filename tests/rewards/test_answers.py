"""Strict SQuAD scores: worked by hand, and against a naive reading of the definition."""

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.rewards import check_golds, exact_match, f1_score, normalize_answer, sub_em
from tests.effort import examples


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles", "beatles"),
        ("  a  dog,  an ant & the   cat! ", "dog ant cat"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("!?", ""),
        ("Málaga", "málaga"),
    ],
)
def test_normalisation_drops_case_punctuation_articles_and_spaces(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "golds", "score"),
    [
        ("Paris", "paris.", 1.0),
        ("the Paris", ["London", "Paris"], 1.0),
        ("Paris, France", "Paris", 0.0),
        ("", "", 1.0),
        ("I do not know", "no", 0.0),
        ("the", "a", 1.0),
        ("1.000", "1000", 1.0),
    ],
)
def test_exact_match_is_equality_after_normalisation(prediction, golds, score):
    assert exact_match(prediction, golds) == score


@pytest.mark.parametrize(
    ("prediction", "golds", "score"),
    [
        ("the city of Paris", "Paris", 0.5),  # precision 1/3, recall 1
        ("Paris Paris", "Paris", 2 / 3),  # a repeated word counts once: precision 1/2
        ("", "", 1.0),
        ("yes it is", "yes", 0.0),
        ("Oslo", ["Bergen", "Oslo Norway"], 2 / 3),
    ],
)
def test_f1_counts_common_words(prediction, golds, score):
    assert f1_score(prediction, golds) == pytest.approx(score, abs=1e-12)


def test_sub_em_is_generous():
    assert sub_em("I do not know", "no") == 1.0
    assert sub_em("It is Paris.", ["Rome", "Paris"]) == 1.0
    assert sub_em("Rome", "Paris") == 0.0
    assert sub_em("anything", "the") == 0.0 and sub_em("", "") == 1.0


@pytest.mark.parametrize(
    ("prediction", "golds", "name"),
    [
        (None, "x", "prediction=None"),
        (5, "x", "prediction=5"),
        ("x", None, "golds=None"),
        ("x", [], r"golds=\[\]"),
        ("x", ["y", None], "golds="),
        ("x", True, "golds=True"),
        ("x", float("nan"), "golds=nan"),
    ],
)
def test_bad_input_is_named(prediction, golds, name):
    for score in (exact_match, f1_score, sub_em):
        with pytest.raises(ValueError, match=name):
            score(prediction, golds)


def naive_f1(prediction: str, gold: str) -> float:
    """The definition again, word by word."""

    def words(text):
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    predicted, wanted = words(prediction), words(gold)
    if predicted == wanted:
        return 1.0
    if " ".join(predicted) in ("yes", "no", "noanswer") or " ".join(wanted) in ("yes", "no", "noanswer"):
        return 0.0
    left = list(wanted)
    common = 0
    for word in predicted:
        if word in left:
            left.remove(word)
            common += 1
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


phrases = st.lists(st.sampled_from(["the", "a", "cat", "dog", "yes", "no", "Paris", "!", "of", "é"]), max_size=6).map(
    " ".join
)


@settings(max_examples=examples(300), deadline=None)
@given(phrases | st.text(max_size=20), st.lists(phrases | st.text(max_size=20), min_size=1, max_size=3))
def test_scores_agree_with_the_naive_reading_and_with_each_other(prediction, golds):
    exact, f1 = exact_match(prediction, golds), f1_score(prediction, golds)
    assert f1 == pytest.approx(max(naive_f1(prediction, gold) for gold in golds), abs=1e-12)
    assert 0.0 <= f1 <= 1.0 and exact in (0.0, 1.0)
    assert f1 == 1.0 or exact == 0.0
    assert sub_em(prediction, golds) >= exact
    assert f1_score(prediction, golds[::-1]) == f1


def test_numbers_are_written_out():
    assert check_golds(1889) == check_golds(1889.0) == ["1889"]
    assert check_golds([3.25, "three and a quarter", 10**400]) == ["3.25", "three and a quarter", str(10**400)]
    assert exact_match("1889", 1889.0) == 1.0 and exact_match("1889", [1888, 1890]) == 0.0
