"""Rewards for reasoning: what earns them, what does not, and that observations never do."""

import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.rewards import (
    RewardFunction,
    grounded_thinking,
    overlong_penalty,
    thinking_format,
    thinking_format_penalty,
)
from agent_r1_trl.rewards.words import words_of
from tests.effort import examples
from tests.rewards.helpers import rolled_out, searches, thinks, turn

FACT = "Oslo is the capital of Norway and has 700,000 inhabitants."
PAGE = (
    "The Viking ship museum burned in 1957, reopened under architect Sverre Fehn, moved its collection of oars, "
    "sledges and textiles to Bygdøy, charges 120 kroner admission, closes on Mondays, and welcomed 412,000 visitors "
    "last summer from Sweden, Finland, Denmark, Iceland, Estonia and Latvia."
)


def say(text):
    return {"role": "assistant", "content": text}


# -------------------------------------------------------------------- the form of reasoning


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (thinks("Two facts agree here."), 1.0),
        (thinks("Two facts agree here.") | searches("oslo") | {"content": "<think>Look it up.</think>"}, 1.0),
        (searches("oslo", reasoning="I should look it up."), 1.0),
        (say("<answer>yes</answer>") | {"reasoning_content": "Two facts agree here."}, 1.0),
        (say("<answer>yes</answer>") | {"thinking": "Two facts agree here."}, 1.0),
        (say([{"type": "text", "text": "<think>Two facts agree.</think><answer>yes</answer>"}]), 1.0),
        # no reasoning, or an empty one
        (say("<answer>yes</answer>"), 0.0),
        (searches("oslo"), 0.0),
        (thinks(""), 0.0),
        (thinks(" \n\u200b\u3164\ufeff "), 0.0),
        (thinks("..... !!!"), 0.0),
        (thinks("think think think think"), 0.0),
        (thinks("T\u200bhink thin\u00adk TH\u0130NK ｔｈｉｎｋ"), 0.0),
        # nested, doubled, unordered, open
        (thinks("<think>Two facts agree.</think>"), 0.0),
        (thinks("Two facts <think>really agree here."), 0.0),
        (say("<think>One of these.</think><think>Two of these.</think><answer>yes</answer>"), 0.0),
        (say("<answer>yes</answer><think>Two facts agree here.</think>"), 0.0),
        (say("</think>Two facts agree here.<think><answer>yes</answer>"), 0.0),
        (say("<think>Two facts agree here. <answer>yes</answer>"), 0.0),
        (say("Two facts agree here.</think><answer>yes</answer>"), 0.0),
        (say("First.<think>Two facts agree here.</think><answer>yes</answer>"), 0.0),
        (thinks("Two facts agree here.") | {"reasoning_content": "Two facts agree here."}, 0.0),
        (searches("oslo", reasoning="Look <think>it up now."), 0.0),
        # the answer
        (thinks("Two facts agree here.", "yes"), 0.0),
        (thinks("Two facts agree here.", "<answer></answer>"), 0.0),
        (thinks("Two facts agree here.", "<answer>yes</answer><answer>no</answer>"), 0.0),
        (thinks("Two facts agree here.", malformed_tool_call="the call is not valid JSON"), 0.0),
        (thinks("Two facts agree here.", cut_off="max_tokens_per_turn"), 0.0),
    ],
)
def test_a_turn_thinks_once_and_says_something_before_it_acts(message, value):
    assert thinking_format([rolled_out(message)]) == [value]
    assert thinking_format_penalty([rolled_out(message)]) == [[0.0 if value else -0.1]]


def test_the_form_is_a_share_of_turns_so_that_further_turns_earn_no_more():
    good, bad = searches(reasoning="I should look it up."), searches()
    assert thinking_format(
        [rolled_out(good), rolled_out(good, good, good), rolled_out(good, bad, bad, bad), rolled_out()]
    ) == [
        1.0,
        1.0,
        0.25,
        0.0,
    ]
    assert thinking_format_penalty([rolled_out(good, bad, good)]) == [[0.0, -0.1, 0.0]]


def test_tags_in_prompts_tool_results_and_arguments_are_no_reasoning():
    tagged = "<think>Two facts agree here.</think><answer>yes</answer>"
    trajectory = rolled_out(turn(searches(tagged), tagged), say("yes"), prompt=tagged)
    assert thinking_format([trajectory]) == [0.0]
    assert thinking_format(completions=[[say("yes"), {"role": "tool", "content": tagged}]]) == [0.0]


def test_a_template_that_opens_the_reasoning_is_named_by_an_option_and_not_guessed():
    closed = say("Two facts agree here.</think><answer>yes</answer>")
    assert thinking_format([rolled_out(closed)]) == [0.0]
    assert thinking_format.with_options(opened_by_template=True)([rolled_out(closed)]) == [1.0]


def test_tags_can_be_chosen_and_the_answer_need_not_have_any():
    message = say("<plan>Two facts agree here.</plan>yes")
    assert thinking_format.with_options(tag="plan", answer_tag=None)([rolled_out(message)]) == [1.0]
    assert thinking_format.with_options(tag="plan")([rolled_out(message)]) == [0.0]


# -------------------------------------------------------------------- what reasoning says


def test_reasoning_that_takes_up_three_new_words_earns_the_whole():
    # New in the observation: oslo, norway, 700,000, inhabitants. Target 3; "so", "the" and "capital" say nothing new.
    search = turn(searches("capital"), FACT)
    for reasoning, value in {
        "Oslo belongs to Norway with 700,000 people, matching my guess": 1.0,
        "Oslo in Norway seems right, matching my guess": 2 / 3,
        "OSLO, seems right, matching my guess": 1 / 3,
        "the capital seems right, matching my guess": 0.0,
        "": 0.0,
    }.items():
        assert grounded_thinking([rolled_out(search, thinks(reasoning))]) == [[None, pytest.approx(value)]], reasoning


def test_what_is_known_from_the_prompt_from_the_own_words_or_from_before_is_not_new():
    good = thinks("Oslo, Norway and 700,000 seem plausible after checking")
    assert grounded_thinking([rolled_out(turn(searches("capital"), FACT), good, prompt=FACT)]) == [[None, None]]
    assert grounded_thinking([rolled_out(turn(searches(FACT), FACT), good)]) == [[None, None]]
    twice = rolled_out(
        turn(searches("capital"), FACT), turn(searches("again", reasoning=good["content"][7:70]), FACT), good
    )
    assert grounded_thinking([twice])[0][2] is None


@pytest.mark.parametrize(
    "reasoning",
    [
        FACT,
        PAGE,
        PAGE.upper().replace(" ", "\u200b \n"),
        PAGE.replace(" ", " the "),
        "So the answer is: " + PAGE,
        "Plausible interesting remarkable wonderful conclusion. " + PAGE,
        "I should think carefully, step by step, and then give my answer.",
    ],
)
def test_a_pasted_observation_and_filler_words_earn_nothing(reasoning):
    observed = FACT if reasoning == FACT else PAGE
    assert grounded_thinking([rolled_out(turn(searches("museum"), observed), thinks(reasoning))]) == [[None, 0.0]]


def test_a_list_of_likely_words_is_read_up_to_a_limit():
    names = " ".join(f"guess{number}" for number in range(300)) + " Oslo Norway 700,000"
    trajectory = rolled_out(turn(searches("capital"), FACT), thinks(names))
    assert grounded_thinking([trajectory]) == [[None, 0.0]]
    assert grounded_thinking.with_options(max_words=400)([trajectory]) == [[None, 1.0]]


def test_what_a_trajectory_earns_by_grounded_thinking_is_capped():
    turns = []
    for number in range(4):
        reasoning = f"city{number - 1} river{number - 1} lake{number - 1} matter for my conclusion regarding geography"
        turns.append(turn(searches(f"query{number}", reasoning=reasoning), f"city{number} river{number} lake{number}"))
    assert grounded_thinking([rolled_out(*turns)]) == [[None, 1.0, 0.0, 0.0]]
    assert grounded_thinking.with_options(max_total=2.5)([rolled_out(*turns)]) == [[None, 1.0, 1.0, 0.5]]


def test_scripts_without_spaces_are_compared_by_pairs_of_characters():
    assert words_of("東京都 Tower") == ["東京", "京都", "tower"]
    search = turn(searches("首都"), "奥斯陆是挪威的首都")
    said = {"奥斯陆属于挪威,因此我选择它": True, "我不知道,只好随便猜一个": False}
    for reasoning, is_grounded in said.items():
        (scores,) = grounded_thinking([rolled_out(search, thinks(reasoning))])
        assert (scores[1] > 0) is is_grounded


def test_only_sampled_tokens_make_a_trajectory_overlong():
    penalty = overlong_penalty.with_options(max_tokens=20, buffer=10)
    for num_tokens, value in {1: 0.0, 10: 0.0, 15: -0.5, 20: -1.0, 30: -1.0}.items():
        trajectory = rolled_out(turn(say("x"), "seen", num_tokens=num_tokens), num_observation_tokens=100)
        assert penalty([trajectory]) == [value]


# -------------------------------------------------------------------- what all of them have in common

ALL = [grounded_thinking, overlong_penalty, thinking_format, thinking_format_penalty]
READ_NO_OBSERVATION = [item for item in ALL if item is not grounded_thinking]
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "oslo ",
    "we look it up ",
    "\u200b",
    "7 ",
    "\n",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)
messages = st.builds(thinks, texts, texts) | st.builds(say, texts) | st.builds(searches, texts, reasoning=texts)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(messages, texts, texts), min_size=1, max_size=4), texts)
def test_what_observations_and_prompts_say_changes_no_form_or_length(turns, prompt):
    one = rolled_out(*(turn(message, seen, num_tokens=9) for message, seen, _ in turns), num_observation_tokens=3)
    other = rolled_out(
        *(turn(message, more, num_tokens=9) for message, _, more in turns), prompt=prompt, num_observation_tokens=50
    )
    for function in READ_NO_OBSERVATION:
        assert function([one]) == function([other]), function


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(messages, texts), min_size=1, max_size=4))
def test_observations_alone_are_never_taken_for_reasoning(turns):
    silent = rolled_out(*(turn({**message, "content": "", "reasoning_content": ""}, seen) for message, seen in turns))
    assert not any(score for score in grounded_thinking([silent])[0])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(messages, texts), max_size=4))
def test_every_value_is_in_its_range(turns):
    trajectory = rolled_out(*(turn(message, seen, num_tokens=200) for message, seen in turns))
    for function in ALL:
        (value,) = function([trajectory])
        values = [item for item in value if item is not None] if isinstance(value, list) else [value]
        assert not isinstance(value, list) or len(value) == len(turns)
        low, high = (-1, 0) if "penalty" in function.__name__ else (0, 1)
        assert all(low <= item <= high for item in values), function


MEGABYTE = 1_000_000


@pytest.mark.parametrize("function", ALL, ids=lambda item: item.__name__)
@pytest.mark.parametrize(
    "text",
    [
        "<think>" * (MEGABYTE // 7),
        "<think>" + "ab cde " * (MEGABYTE // 7) + "</think><answer>x</answer>",
        "<think>" + "1." * (MEGABYTE // 2),
        "<think>" + " " * MEGABYTE + "</think>",
        "<think>" + "\u0315\u0300" * (MEGABYTE // 4) + "</think>",
        "<think>" + "京" * (MEGABYTE // 3) + "</think><answer>x</answer>",
    ],
    ids=["openers", "words", "numbers", "spaces", "marks", "han"],
)
def test_time_grows_no_faster_than_the_text(function, text):
    """A megabyte takes up to 0.5 s on an idle core; half of one, on a busy core, stands for it."""
    quarter = text[: len(text) // 4]
    trajectory = rolled_out(turn(searches("x"), quarter), say(quarter))
    start = time.process_time()
    function([trajectory])
    assert time.process_time() - start < 0.5


def test_columns_of_the_data_set_never_change_an_option():
    message = thinks("Two facts agree here.")
    assert thinking_format(trajectory=[rolled_out(message)], answer_tag=["final"], min_words=[99], prompts=[1]) == [
        1.0
    ]


def test_completions_of_trl_are_read_where_no_trajectory_is_given():
    conversation = [searches("oslo", reasoning="I should look it up."), {"role": "tool", "content": FACT}, say("Oslo")]
    assert thinking_format(completions=[conversation], prompts=["?"]) == [0.5]
    for function in (grounded_thinking, overlong_penalty):
        with pytest.raises(ValueError, match=rf"{function.__name__} .*trajectory="):
            function(completions=[conversation])


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (thinking_format, {"min_wrds": 2}, "min_words"),
        (thinking_format, {"tag": "<think>"}, "tag"),
        (thinking_format, {"answer_tag": "think"}, "tag"),
        (thinking_format, {"min_words": 0}, "min_words"),
        (thinking_format_penalty, {"penalty": -1}, "penalty"),
        (grounded_thinking, {"target": 0}, "target"),
        (grounded_thinking, {"max_total": float("nan")}, "max_total"),
        (overlong_penalty, {"buffer": 600}, "buffer"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name_when_it_is_set(function, options, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        function.with_options(**options)


def test_a_reward_with_options_keeps_its_name_and_can_be_pickled():
    changed = thinking_format.with_options(min_words=2).with_options(answer_tag=None)
    copy = pickle.loads(pickle.dumps(changed))
    assert isinstance(copy, RewardFunction)
    assert (copy.__name__, copy.options) == ("thinking_format", {"min_words": 2, "answer_tag": None})
    assert copy([rolled_out(thinks("one two three"))]) == [1.0]
