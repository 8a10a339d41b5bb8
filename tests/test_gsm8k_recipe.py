"""recipes/gsm8k_python: the environment and its data."""

import asyncio
import json
from pathlib import Path

import pytest

from agent_r1_trl.objects import import_object
from tests.environments.helpers import finished

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "gsm8k_python"


@pytest.fixture(scope="module")
def env_class():
    return import_object(f"{RECIPE / 'env.py'}:PythonMathEnv", "env")


def rows(name):
    return [json.loads(line) for line in (RECIPE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_answers_in_the_data_are_right_and_no_question_is_in_both_files():
    train, test = rows("train"), rows("test")
    for row in train + test:
        expression = row["question"].removeprefix("State the final answer to the following arithmetic problem: ")
        assert str(eval(expression.removesuffix(" ="))) == row["answer"]
    assert not {row["question"] for row in train} & {row["question"] for row in test}


def test_an_episode_computes_in_its_sandbox_and_is_scored_by_the_number(env_class):
    env = env_class()
    env.reset({"question": "What is 21 * 2?", "answer": "Multiply. 21 * 2 = <<21*2=42>>42\n#### 42"})
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "21 * 2"}}}
    step = asyncio.run(env.step({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert step.observations[0]["content"] == "42"
    for text, score in (("<answer>$42.0</answer>", 1.0), ("<answer>41</answer>", 0.0), ("42", 0.0)):
        assert env.outcome_reward(finished(text))[0] == score
    env.tools[0].close()


def test_a_row_without_a_number_is_refused(env_class):
    with pytest.raises(ValueError, match="answer='none'"):
        env_class().reset({"question": "?", "answer": "none"})
