"""What `datasets` makes of nested rows, and what reaches the environment."""

import json
import re

import pytest
from datasets import Dataset

from agent_r1_trl.testing import AddEnv, say
from agent_r1_trl.trainers.construction import trl_dataset
from tests.trainers.helpers import make_args

ROWS = [
    {"prompt": "a", "state": {"door": 1, "inner": {"x": 1}}, "steps": [{"left": 1}], "plain": None},
    {"prompt": "b", "state": {"window": 2}, "steps": [{"right": 2}, {"left": 3}], "plain": "p"},
]


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
