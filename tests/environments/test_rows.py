"""What `datasets` makes of nested rows: keys that a row never had are noticed, and the cure leaves none."""

import json
import re
import warnings

import pytest
from datasets import Dataset

from agent_r1_trl import check_env
from agent_r1_trl.environments import rows as rows_module
from agent_r1_trl.environments.rows import added_keys, warn_of_added_keys
from agent_r1_trl.trainers.construction import trl_dataset
from tests.toys import AddEnv, say
from tests.trainers.helpers import make_args, make_trainer

ROWS = [
    {"prompt": "a", "state": {"door": 1, "inner": {"x": 1}}, "steps": [{"left": 1}], "plain": None},
    {"prompt": "b", "state": {"window": 2}, "steps": [{"right": 2}, {"left": 3}], "plain": "p"},
]
ADDED = ["state.door", "state.inner", "state.window", "steps.left", "steps.right"]


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(rows_module, "_warned", set())


def test_keys_that_arrow_adds_are_named_and_the_cure_adds_none():
    assert sorted(added_keys(Dataset.from_list(ROWS))) == ADDED
    cured = Dataset.from_list(ROWS, on_mixed_types="use_json")
    assert added_keys(cured) == []
    assert cured[0]["state"] == {"door": 1, "inner": {"x": 1}} and cured[1]["steps"] == [{"right": 2}, {"left": 3}]


@pytest.mark.parametrize("data", [ROWS, None, iter(ROWS), Dataset.from_list([{"prompt": "a", "state": {"door": 1}}])])
def test_nothing_is_said_of_rows_that_are_as_they_were(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_added_keys(data, "examples")


def test_the_warning_comes_once():
    with pytest.warns(UserWarning, match=r"^examples: .*state\.door.*on_mixed_types='use_json'"):
        check_env(AddEnv, Dataset.from_list(ROWS), num_episodes=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(AddEnv, Dataset.from_list(ROWS), num_episodes=1)


def test_the_trainer_warns_of_both_data_sets(tmp_path):
    with pytest.warns(UserWarning) as caught:
        make_trainer(tmp_path, train_dataset=Dataset.from_list(ROWS * 4), eval_dataset={"x": Dataset.from_list(ROWS)})
    said = [str(item.message) for item in caught]
    assert any(text.startswith("train_dataset: ") for text in said)
    assert any(text.startswith("eval_dataset['x']: ") for text in said)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset", "eval_dataset['x']"])
def test_an_empty_data_set_is_refused_by_name(tmp_path, name):
    full, empty = Dataset.from_list(ROWS * 4), Dataset.from_dict({"prompt": []})
    train, evaluation = {
        "train_dataset": (empty, None),
        "eval_dataset": (full, empty),
        "eval_dataset['x']": (full, {"x": empty}),
    }[name]
    with pytest.raises(ValueError, match=f"^{re.escape(name)} has 0 rows"):
        trl_dataset(train, make_args(tmp_path), evaluation)


def test_the_keys_that_arrow_adds_to_messages_do_not_reach_the_prompt():
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}}
    messages = [{"role": "user", "content": "?"}, {**say(""), "content": None, "tool_calls": [call]}]
    data = Dataset.from_list([{"prompt": messages}])
    assert data[0]["prompt"][0]["tool_calls"] is None
    assert AddEnv().reset(data[0]) == messages
    assert added_keys(data) == []


def test_a_run_on_the_cured_data_set_gives_environments_the_rows_as_they_were(tmp_path):
    seen = []

    class Watching(AddEnv):
        def reset(self, example):
            seen.append((example["state"], example["steps"]))
            return super().reset(example)

    make_trainer(tmp_path, env=Watching, train_dataset=Dataset.from_list(ROWS * 4, on_mixed_types="use_json")).train()
    expected = [(row["state"], row["steps"]) for row in ROWS]
    assert len(seen) == 8 and all(pair in expected for pair in seen)
