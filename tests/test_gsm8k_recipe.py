"""recipes/gsm8k_python: the environment, its data, and the CPU configuration from the model to a trained policy."""

import asyncio
import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1_trl import check_env
from agent_r1_trl.cli import main
from agent_r1_trl.objects import import_object
from tests.environments.helpers import finished

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "gsm8k_python"
CONFIG = RECIPE / "grpo" / "config_cpu.yaml"


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


def test_the_linter_of_environments_has_nothing_to_say(env_class):
    findings = check_env(env_class, rows("test")[:3])
    assert [finding for finding in findings if finding.level != "ok"] == []


@pytest.mark.slow
def test_the_cpu_configuration_trains_from_the_model_that_the_script_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPE))
    arguments = ["--steps", "2", "--batch-size", "2", "--out", f"{tmp_path}/start"]
    monkeypatch.setattr(sys, "argv", ["make_model.py", *arguments])
    runpy.run_path(str(RECIPE / "make_model.py"), run_name="__main__")
    recipe = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert recipe["model_name_or_path"] == "outputs/gsm8k_python/start"
    changed = {
        "model_name_or_path": f"{tmp_path}/start", "output_dir": f"{tmp_path}/run", "max_steps": "1",
        "per_device_train_batch_size": "4", "generation_batch_rows": "4", "num_generations": "2",
        "max_completion_length": "48", "max_tokens_per_turn": "16",
    }  # fmt: skip
    options = [part for name, value in changed.items() for part in (f"--{name}", value)]
    assert main(["train", "--config", str(CONFIG), *options]) == 0
    assert list((tmp_path / "run" / "trajectories").iterdir())
