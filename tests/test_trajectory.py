"""The record of one rollout: what it refuses, what it earned and where, and that writing it down loses nothing."""

import json
import math
import re
from dataclasses import fields

import numpy as np
import pytest
import torch

from agent_r1_trl import trajectory
from agent_r1_trl.trajectory import Author, Segment, StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn

P, T, E = Author.POLICY, Author.TEMPLATE, Author.ENVIRONMENT


def two_turns(**changes):
    """S0 S0 G0 O0 G0' S1 S1 O1: two turns of two tokens, ending in an observation."""
    result = ToolResult(call=ToolCall(name="add", arguments={"a": 2}, id="c1"), content="5", latency_s=0.25)
    failed = ToolResult(
        call=ToolCall(name="", arguments="{oops"), content="no JSON", error=ToolErrorKind.MALFORMED, is_truncated=True
    )
    turns = [
        Turn(
            start=0,
            end=2,
            message={"role": "assistant", "content": "let me add"},
            observations=[{"role": "tool", "name": "add", "content": "5"}],
            tool_results=[result],
            reward=0.5,
            reward_parts={"tool_call": 0.5},
            generate_s=0.1,
            env_s=0.3,
        ),
        Turn(
            start=5,
            end=7,
            message={"role": "assistant", "content": "{oops", "malformed_tool_call": "no JSON"},
            observations=[{"role": "user", "content": "no JSON"}],
            tool_results=[failed],
            reward=-0.1,
            is_truncated=True,
            is_invalid=True,
        ),
    ]
    values = {
        "prompt_messages": [{"role": "user", "content": "2 + 3?"}],
        "prompt_ids": [1, 2, 3],
        "completion_ids": [11, 12, 13, 14, 15, 16, 17, 18],
        "action_mask": [1, 1, 0, 0, 0, 1, 1, 0],
        "logprobs": [-0.5, -0.25, 0.0, 0.0, 0.0, -1.5, -2.0, 0.0],
        "turn_ids": [0, 0, -1, -1, -1, 1, 1, -1],
        "authors": [P, P, T, E, T, P, P, E],
        "turns": turns,
        "stop_reason": StopReason.MAX_TURNS,
        "outcome_reward": 1.0,
        "reward_parts": {"em": 1.0},
        "example_id": "q1",
        "generation": 3,
        "seed": 42,
        "info": {"gold": "5"},
        "duration_s": 1.5,
    }
    return Trajectory(**(values | changes))


def empty(stop_reason=StopReason.PROMPT_TOO_LONG, **changes):
    lists = dict.fromkeys(("prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "authors", "turns"))
    values = {"prompt_messages": [], **{name: [] for name in lists}, "stop_reason": stop_reason}
    return Trajectory(**(values | changes))


# -------------------------------------------------------------------- construction


def test_lists_of_another_length_are_refused_by_name():
    for name in ("action_mask", "logprobs", "turn_ids", "authors"):
        items = getattr(two_turns(), name)
        for changed in (items[:-1], [*items, items[-1]]):
            with pytest.raises(ValueError, match=rf"{name} has {len(changed)} "):
                two_turns(**{name: changed})


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("action_mask", 2, 1),
        ("action_mask", 0, 0),
        ("action_mask", 0, 2),
        ("action_mask", 0, -1),
        ("turn_ids", 3, 0),
        ("turn_ids", 1, -1),
        ("authors", 3, P),
        ("authors", 6, T),
    ],
)
def test_a_mask_an_author_and_a_turn_that_contradict_each_other_are_refused(name, position, value):
    items = list(getattr(two_turns(), name))
    items[position] = value
    with pytest.raises(ValueError, match=f"token {position} has action_mask="):
        two_turns(**{name: items})


def test_a_turn_outside_the_completion_is_refused():
    for start, end in ((-1, 2), (2, 1), (5, 9), (9, 9)):
        turn = Turn(start=start, end=end, message={"role": "assistant", "content": ""})
        with pytest.raises(ValueError, match=re.escape(f"turn 1 spans [{start}, {end}) of 8")):
            two_turns(turns=[two_turns().turns[0], turn])


def test_turns_that_disagree_with_the_turn_ids_are_refused():
    first, second = two_turns().turns
    for turns in ([second, first], [Turn(start=0, end=3, message={}), second]):
        with pytest.raises(ValueError, match=r"turn 0 .*turn_ids"):
            two_turns(turns=turns)


def test_turns_that_leave_action_tokens_out_are_refused():
    with pytest.raises(ValueError, match="turns do not cover"):
        two_turns(turns=two_turns().turns[:1])


def test_plain_strings_become_authors_and_stop_reasons():
    trajectory = two_turns(stop_reason="timeout", authors=[str(author) for author in two_turns().authors])
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.authors[3] is Author.ENVIRONMENT
    with pytest.raises(ValueError, match="bored"):
        two_turns(stop_reason="bored")


def test_a_trajectory_without_tokens_or_turns_is_one():
    trajectory = empty()
    assert trajectory.token_rewards() == []
    assert trajectory.num_action_tokens == 0
    assert trajectory.messages == []
    assert trajectory.final_text == ""


# -------------------------------------------------------------------- stop reasons


def test_each_stop_reason_is_the_policys_a_limits_or_nobodys():
    truncated = {reason for reason in StopReason if reason.is_truncated}
    failed = {reason for reason in StopReason if reason.is_infrastructure_failure}
    assert truncated == {StopReason.MAX_TURNS, StopReason.MAX_COMPLETION_LENGTH, StopReason.TIMEOUT}
    assert failed == {
        StopReason(f"{kind}") for kind in ("environment_error", "generation_error", "tool_failure", "prompt_too_long")
    }
    assert set(StopReason) - truncated - failed == {StopReason.DONE, StopReason.INVALID_CALLS}


# -------------------------------------------------------------------- rewards


def test_rewards_sit_on_the_last_action_token_of_their_turn_and_the_outcome_on_the_last_of_all():
    trajectory = two_turns()
    assert trajectory.token_rewards() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, -0.1 + 1.0, 0.0]
    assert trajectory.process_reward == pytest.approx(0.4)
    assert trajectory.total_reward == pytest.approx(1.4)


def turns_of(*spans_and_rewards):
    return [Turn(start=start, end=end, message={}, reward=reward) for start, end, reward in spans_and_rewards]


@pytest.mark.parametrize(
    ("mask", "turns", "expected"),
    [
        # A turn in which nothing was sampled pays the nearest action token before it,
        ([1, 1, 0, 0], turns_of((0, 2, 0.5), (4, 4, 0.25)), [0.0, 0.5 + 0.25 + 8.0, 0.0, 0.0]),
        # else the first one after it.
        ([0, 0, 1, 1], turns_of((0, 0, 0.5), (2, 4, 0.25)), [0.0, 0.0, 0.5, 0.25 + 8.0]),
        # Never a token in between, nor one of another turn that is further away.
        ([1, 0, 0, 1], turns_of((0, 1, 1.0), (2, 2, 2.0), (3, 4, 4.0)), [3.0, 0.0, 0.0, 12.0]),
        # Nothing sampled at all: no token may carry a reward.
        ([0, 0], turns_of((0, 0, 0.5)), [0.0, 0.0]),
    ],
)
def test_the_reward_of_an_empty_turn_moves_to_a_token_that_was_sampled(mask, turns, expected):
    turn_ids = [-1] * len(mask)
    for index, turn in enumerate(turns):
        turn_ids[turn.start : turn.end] = [index] * (turn.end - turn.start)
    trajectory = Trajectory(
        prompt_messages=[],
        prompt_ids=[1],
        completion_ids=list(range(len(mask))),
        action_mask=mask,
        logprobs=[0.0] * len(mask),
        turn_ids=turn_ids,
        authors=[P if m else E for m in mask],
        turns=turns,
        stop_reason="done",
        outcome_reward=8.0,
    )
    assert trajectory.token_rewards() == expected
    if any(mask):
        assert math.fsum(expected) == trajectory.total_reward


# -------------------------------------------------------------------- messages


def test_messages_are_the_prompt_the_turns_and_what_was_answered():
    trajectory = two_turns()
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert trajectory.completion_messages == trajectory.messages[1:]
    assert [result.is_error for result in trajectory.tool_results] == [False, True]
    assert trajectory.final_text == "{oops"
    trajectory.turns[-1].message["content"] = None
    assert trajectory.final_text == ""


def test_answered_messages_end_with_the_last_turn_and_are_never_empty():
    trajectory = two_turns()
    assert trajectory.answered_messages == trajectory.completion_messages[:-1]
    trajectory.turns[-1].observations = []
    assert trajectory.answered_messages == trajectory.completion_messages
    trajectory.turns = []
    assert trajectory.answered_messages == [{"role": "assistant", "content": ""}]


def test_a_log_line_stays_short():
    trajectory = two_turns()
    trajectory.prompt_ids = list(range(100_000))
    assert repr(trajectory) == (
        "Trajectory(example_id='q1', generation=3, 2 turns, 8 tokens, stop_reason='max_turns', total_reward=1.4)"
    )


# -------------------------------------------------------------------- JSON


def test_a_round_trip_through_json_loses_nothing():
    for reason in StopReason:
        trajectory = two_turns(stop_reason=reason, error="gone" if reason.is_infrastructure_failure else None)
        trajectory.advantages = [0.1, 0.2, 0.0, 0.0, 0.0, 1e-300, -1 / 3, 0.0]
        text = trajectory.to_json()
        assert "\n" not in text
        back = Trajectory.from_json(text)
        assert back == trajectory
        assert back.to_json() == text
        assert isinstance(back.turns[1].tool_results[0].error, ToolErrorKind)
        assert isinstance(back.stop_reason, StopReason)
        assert all(isinstance(author, Author) for author in back.authors)


def test_every_field_of_a_trajectory_and_of_its_turns_survives_json():
    """A new field fails until the example here has another value of it than its default."""
    trajectory = two_turns(
        truncation_penalty=-0.5, seat_rewards={"a": 1.0}, is_scored=False, is_group_too_small=True, is_replaced=True,
        error="gone", failed_tries=["timeout"], tags={"kind": "sum"}, rendered={"text": "start"}, open_context=[1, 2],
        segments=[Segment(start=5, row=1, prompt_ids=[1, 2])], advantages=[0.5] * 8,
    )  # fmt: skip
    turn = trajectory.turns[1]
    turn.rendered, turn.seat, turn.next_context = {"text": "end"}, "a", [{"role": "user", "content": "Go on."}]
    turn.summary_request, turn.versions = {"role": "user", "content": "Sum up."}, [(3, 1), (4, 1)]
    plain_turn = Turn(start=0, end=0, message={})
    unset = [item.name for item in fields(Trajectory) if getattr(trajectory, item.name) == getattr(empty(), item.name)]
    unset += [
        item.name
        for item in fields(Turn)
        if all(getattr(turn, item.name) == getattr(plain_turn, item.name) for turn in trajectory.turns)
    ]
    assert unset == ["kept_ids"], "give each another value; only `kept_ids` is not recorded"
    assert Trajectory.from_dict(json.loads(trajectory.to_json())) == trajectory


def test_odd_numbers_and_texts_survive_json():
    text = 'é 東京 🙂 \u2028 \x00 \x1b[31m "\\ </s> <|im_end|> \ud800 \n'
    trajectory = two_turns(error=text, info={"text": text, "nested": [{"deep": [None, True, 1.5]}]})
    trajectory.turns[0].message["content"] = text
    trajectory.turns[0].tool_results[0].content = text
    trajectory.logprobs[0] = -math.inf
    back = Trajectory.from_json(trajectory.to_json())
    assert back == trajectory
    trajectory.logprobs[1] = math.nan
    assert math.isnan(Trajectory.from_json(trajectory.to_json()).logprobs[1])


def test_a_dictionary_is_plain_and_shares_nothing_with_the_trajectory():
    trajectory = two_turns()
    record = trajectory.to_dict()
    assert record == json.loads(json.dumps(record))
    before = trajectory.to_json()
    record["completion_ids"].append(0)
    record["prompt_messages"][0]["content"] = "changed"
    record["turns"][0]["message"]["content"] = "changed"
    record["turns"][0]["tool_results"][0]["call"]["arguments"]["a"] = "changed"
    record["info"]["gold"] = record["reward_parts"]["em"] = "changed"
    assert trajectory.to_json() == before


def test_what_a_recorder_added_is_ignored_and_what_is_missing_takes_its_default():
    record = two_turns().to_dict() | {"step": 7, "rank": 0}
    del record["advantages"], record["seed"]
    back = Trajectory.from_dict(record)
    assert back.seed == 0
    assert back.completion_ids == two_turns().completion_ids


# -------------------------------------------------------------------- display


@pytest.fixture
def nothing_said(monkeypatch):
    """No test before has had a warning that is given once."""
    trajectory._warn_of_number.cache_clear()
    monkeypatch.setattr(trajectory, "_SAID_OF", set())


def test_numbers_of_numpy_and_torch_are_numbers_and_one_that_is_not_finite_is_said_once(caplog, nothing_said):
    info = {
        "int": np.int64(2), "float": np.float32(2.5), "bool": np.bool_(True), "array": np.array(3),
        "tensor": torch.tensor(4), "text": np.str_("5"), "several": torch.tensor([6]), "lost": math.nan,
        "far off": np.float32("inf"), 7: 8,
    }  # fmt: skip
    item = empty(info=info)
    expected = {"int": 2, "float": 2.5, "bool": 1, "array": 3, "tensor": 4, "7": 8}
    assert item.numbers == item.numbers == expected
    assert sorted(record.args[0] for record in caplog.records) == ["far off", "lost"]


def test_a_success_that_is_no_number_is_said_once_and_none_means_no_verdict(caplog, nothing_said):
    for value in ("yes", "yes", [1.0], None, True):
        item = empty(info={"success": value, "note": "text is fine elsewhere"})
        assert item.numbers == ({"success": 1.0} if value is True else {})
    (said,) = (record.getMessage() for record in caplog.records)
    assert "trajectory.info['success'] is 'yes', which is no number" in said
