"""Where the answer stands in a text, and whether the text around it is well formed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.rewards import extract_answer, format_reward, strip_reasoning


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is <answer> Paris </answer>.", "Paris"),
        ("<answer>a</answer> no: <answer>b</answer>", "b"),
        ("<answer></answer>", ""),
        ("<answer>Paris", None),
        ("Paris</answer>", None),
        ("Paris", None),
        ("", None),
        ("<answer>a</answer> b</answer>", "a"),
        ("<answer><answer>b</answer></answer>", "b"),
        ("</answer><answer>", None),
        ("<think><answer>a</answer></think>", None),
        ("<think>x <answer>a</answer></think><answer>b</answer>", "b"),
        ("<answer>a</answer><think>or is it</think>", "a"),
        ("<think>never closed <answer>a</answer>", None),
        ("opened in the prompt <answer>a</answer></think>b", None),
        ("<answer>two\nlines</answer>", "two\nlines"),
    ],
)
def test_the_last_complete_answer_outside_the_reasoning_counts(text, answer):
    assert extract_answer(text) == answer


def test_the_tag_can_be_chosen():
    assert extract_answer("<final>x</final>", tag="final") == "x"


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think>b", "b"),
        ("a<think>b</think>c", "ac"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("plain", "plain"),
        ("a</think>b</think>c", "c"),
    ],
)
def test_reasoning_is_taken_out_also_where_its_opener_was_in_the_prompt(text, visible):
    assert strip_reasoning(text) == visible


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>x</answer>", 1.0),
        ("So: <answer>x</answer>", 1.0),
        ("<think>a</think><answer>x</answer>", 1.0),
        ("a</think><answer>x</answer>\n", 1.0),
        ("<answer>x</answer> and more", 0.0),
        ("<answer>x</answer><answer>y</answer>", 0.0),
        ("<answer> </answer>", 0.0),
        ("<answer>x", 0.0),
        ("x", 0.0),
        ("<think>a<answer>x</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>x</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_well_formed_text_has_exactly_one_answer_at_its_end(text, reward):
    assert format_reward(text) == reward


def test_without_a_tag_any_visible_text_is_well_formed():
    assert format_reward("Oslo", tag=None) == 1.0
    assert format_reward("  ", tag=None) == 0.0
    assert format_reward("<think>Oslo</think>", tag=None) == 0.0


def test_reasoning_can_be_required():
    assert format_reward("<answer>x</answer>", require_reasoning=True) == 0.0
    assert format_reward("<think>a</think><answer>x</answer>", require_reasoning=True) == 1.0


def test_what_is_not_a_text_is_refused():
    for function in (extract_answer, format_reward, strip_reasoning):
        with pytest.raises(ValueError, match="text=None"):
            function(None)


pieces = st.sampled_from(["<answer>", "</answer>", "<think>", "</think>", "x", " ", "y z", "<answ"])


@settings(max_examples=500, deadline=None)
@given(st.lists(pieces, max_size=8).map("".join))
def test_a_rewarded_form_always_has_an_answer_and_answers_hold_no_tags(text):
    answer = extract_answer(text)
    assert answer is None or ("</answer>" not in answer and "think>" not in answer)
    if format_reward(text):
        assert answer and text.rstrip().endswith("</answer>")
