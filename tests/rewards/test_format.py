"""Where the answer stands in a text, and whether the text around it is well formed.

The tables show the rules; the oracle at the end, which reads letter by letter, holds them for every text and option.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r1_trl.rewards import extract_answer, format_reward, strip_reasoning
from tests.effort import examples
from tests.rewards.naive_format import naive_answer, naive_format, naive_visible


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is <answer> Paris </answer>.", "Paris"),
        ("<answer>a</answer> no: <answer>b</answer>", "b"),
        ("<answer></answer>", ""),
        ("<answer>a</answer> b</answer>", "a"),
        ("<answer><answer>b</answer></answer>", "b"),
        ("<think><answer>a</answer></think>", None),
        ("<think>x <answer>a</answer></think><answer>b</answer>", "b"),
        ("<answer>a</answer><think>or is it</think>", "a"),
        ("<think>never closed <answer>a</answer>", None),
        ("opened in the prompt <answer>a</answer></think>b", None),
    ],
)
def test_the_last_complete_answer_outside_the_reasoning_counts(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>x</answer>", 1.0),
        ("<think>a</think><answer>x</answer>", 1.0),
        ("a</think><answer>x</answer>\n", 1.0),
        ("<answer>x</answer> and more", 0.0),
        ("<answer> </answer>", 0.0),
        ("<think>a<answer>x</answer>", 0.0),
        ("", 0.0),
        ("</think><answer>x</answer><think>", 0.0),
        ("<think><think>a</think><answer>x</answer>", 0.0),
        ("<answer>x</answer><think>a</think>", 0.0),
        ("<think><answer>a</answer></think><answer>x</answer>", 1.0),
        ("<Think>a<answer>x</answer>", 1.0),  # tags are spelled exactly: this one is ordinary text
        ("<answer>x</ANSWER>", 0.0),
        ("<answer>\u200b\ufeff\u2060</answer>", 0.0),
        ("<answer>\u3164\u2800\ufe0f</answer>", 0.0),
        ("<answer>\N{WOMAN}\u200d\N{MICROSCOPE}</answer>", 1.0),
        ("<answer>x</answer>\u200b", 0.0),
    ],
)
def test_a_well_formed_text_has_exactly_one_answer_at_its_end(text, reward):
    assert format_reward(text) == reward


@pytest.mark.parametrize("tag", ["<answer>", "", "final answer", "/answer", None, 5])
def test_a_tag_that_could_never_be_found_is_refused(tag):
    functions = [extract_answer, strip_reasoning] + ([] if tag is None else [format_reward])
    for function in functions:
        with pytest.raises(ValueError, match=rf"tag={tag!r}: .*'answer'"):
            function("<answer>x</answer>", tag=tag)


def test_the_answer_cannot_have_the_tag_of_the_reasoning():
    for function in (extract_answer, format_reward):
        with pytest.raises(ValueError, match=r"tag='think': .*never an answer"):
            function("<think>x</think>", tag="think")


def test_what_is_not_a_text_is_refused():
    for function in (extract_answer, format_reward, strip_reasoning):
        with pytest.raises(ValueError, match="text=None"):
            function(None)


pieces = st.sampled_from(
    [
        *("<answer>", "</answer>", "<think>", "</think>", "<ANSWER>", "<final>", "</final>", "<answ", "er>", "</"),
        *("<", ">", "x", " ", "y z", "\n", "\u200b", "\u3164"),
    ]
)
texts = st.lists(pieces, max_size=10).map("".join)


@settings(max_examples=examples(500), deadline=None)
@given(texts, st.sampled_from(["answer", "final", None]), st.booleans())
@example("</think><answer>x</answer><think>", "answer", False)
@example("<think>\u200b</think><answer>x</answer>", "answer", True)
@example("<answ<think>er>x</answer></think>er>y</answer>", "answer", False)
@example("<answer>x</answ<think>a</think>er>", "answer", False)
@example("<answer>x<think>a</think></answer>", "answer", False)
@example("<think>a<answer>x</think></answer>", "answer", False)
@example("</think>Oslo<think>", None, False)
@example("\u200b", None, False)
def test_all_three_agree_with_a_reader_that_goes_letter_by_letter(text, tag, require_reasoning):
    assert strip_reasoning(text) == naive_visible(text)
    assert format_reward(text, tag=tag, require_reasoning=require_reasoning) == naive_format(
        text, tag, require_reasoning
    )
    if tag is not None:
        assert extract_answer(text, tag) == naive_answer(text, tag)
