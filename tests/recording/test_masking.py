"""Secrets are not recorded: neither as text nor as ids that can be decoded."""

import json

import pytest

from agent_r1_trl import safe_text
from agent_r1_trl.recording import TrajectoryStore, read_trajectories
from tests.recording.examples import two_turns

KEY = "sk-live-0123456789"


@pytest.fixture(autouse=True)
def fresh_rules(monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", KEY)
    safe_text.set_rules()
    yield
    safe_text._rules = safe_text.SecretRules()


def recorded(folder, trajectory):
    path = TrajectoryStore(folder).write(0, [trajectory])
    (back,) = read_trajectories(path)
    return back, path.read_bytes()


def test_a_secret_that_a_tool_returned_is_masked_with_the_ids_after_the_call(tmp_path):
    trajectory = two_turns()
    trajectory.turns[0].observations[0]["content"] = trajectory.turns[0].tool_results[0].content = f"401: {KEY}"
    back, data = recorded(tmp_path, trajectory)
    assert back.turns[0].observations[0]["content"] == "401: [secret: SEARCH_API_KEY]"
    assert back.turns[0].tool_results[0].content == "401: [secret: SEARCH_API_KEY]"
    assert back.completion_ids == [11, 12, 0, 0, 0, 0, 17, 18] and back.prompt_ids == [5, 6, 7]
    assert back.action_mask == trajectory.action_mask and back.logprobs == trajectory.logprobs
    assert KEY.encode() not in data
    assert KEY in trajectory.turns[0].observations[0]["content"], "what is trained on does not change"


def test_a_secret_that_the_model_wrote_is_masked_with_the_ids_of_its_turn(tmp_path):
    trajectory = two_turns()
    trajectory.turns[1].message["content"] = f"The key is {KEY}."
    back, data = recorded(tmp_path, trajectory)
    assert back.turns[1].message["content"] == "The key is [secret: SEARCH_API_KEY]."
    assert back.completion_ids == [11, 12, 13, 14, 15, 16, 0, 0] and KEY.encode() not in data
    assert json.loads(data)["is_masked"] is True


def test_an_argument_with_a_secret_name_is_masked_wherever_it_comes_back(tmp_path):
    trajectory = two_turns()
    trajectory.turns[0].tool_results[0].call.arguments = {"user": "ann", "password": "hunter2-hunter2"}
    trajectory.turns[1].message["content"] = "I used hunter2-hunter2"
    back, data = recorded(tmp_path, trajectory)
    assert back.turns[0].tool_results[0].call.arguments == {"user": "ann", "password": "[secret: password]"}
    assert back.turns[1].message["content"] == "I used [secret: password]"
    assert b"hunter2" not in data and back.completion_ids == [0, 0, 13, 14, 15, 16, 0, 0]


def test_info_and_error_are_masked_too(tmp_path):
    back, data = recorded(tmp_path, two_turns(info={"url": f"https://x?key={KEY}"}, error=KEY))
    assert back.info == {"url": "https://x?key=[secret: SEARCH_API_KEY]"}
    assert back.error == "[secret: SEARCH_API_KEY]" and KEY.encode() not in data


def test_a_record_without_secrets_is_what_it_was(tmp_path):
    trajectory = two_turns()
    back, data = recorded(tmp_path, trajectory)
    assert back == trajectory and b"is_masked" not in data
