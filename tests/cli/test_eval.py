"""`agent-r1-trl eval`: a model, an environment and questions in; a table, numbers and trajectories out.

Covered: what is printed and written, which settings win, mistakes. Not covered: metrics (tests/test_evaluation.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_r1_trl.cli import main, train
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE
from agent_r1_trl.cli.eval import read_arguments
from agent_r1_trl.features.serve.command_arguments import read_conversation_arguments
from agent_r1_trl.recording import TrajectoryStore, read_records
from tests.recording.examples import two_turns


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def read_result(folder="scores") -> dict:
    return json.loads((Path(folder) / "evaluation.json").read_text(encoding="utf-8"))


def test_an_evaluation_leaves_a_table_numbers_and_trajectories(recipe, model_folder, capsys):
    assert main(["eval", "--config", recipe(), "--output_dir", "scores"]) == 0
    printed = capsys.readouterr().out
    assert f"{model_folder},2examples" in "".join(printed.split())  # the title of the table may break anywhere
    for words in ("metric", "95% interval", "reward", "turns", "truncated"):
        assert words in printed
    assert "agent-r1-trl view scores --terminal --split eval --step 0" in printed
    result = read_result()
    assert result["num_examples"] == 2
    assert 1 <= result["turns"] <= 2
    records = list(read_records("scores", split="eval"))
    assert len(records) == 2
    rewards = [record.trajectory.total_reward for record in records]
    assert result["reward"] == pytest.approx(sum(rewards) / 2)


def test_the_output_directory_of_the_recipe_is_honoured_and_without_one_nothing_is_written(recipe, capsys):
    assert main(["eval", "--config", recipe(output_dir=None)]) == 0
    assert not list(Path().rglob("evaluation.json")) and "evaluation.json" not in capsys.readouterr().out
    assert main(["eval", "--config", recipe(output_dir="out")]) == 0
    assert read_result("out")["num_examples"] == 2


def test_the_hint_shows_the_evaluation_just_made_also_among_those_of_training(recipe, capsys):
    path = recipe(output_dir="out")
    TrajectoryStore("out").write(40, [two_turns(example_id="of-training")], split="eval")
    assert main(["eval", "--config", path]) == 0
    (hint,) = re.findall(r"agent-r1-trl (view .*)", capsys.readouterr().out)
    assert main(hint.split()) == 0
    shown = capsys.readouterr().out
    assert "What is 0 + 0?" in shown and "of-training" not in shown


def test_no_recipe_is_needed(recipe, model_folder):
    recipe()
    flags = ["--model", model_folder, "--env", "task.py:AddEnv", "--dataset", "train.jsonl", "--output_dir", "scores"]
    assert main(["eval", *map(str, flags), "--max_turns", "1", "--max_tokens_per_turn", "3"]) == 0
    trajectories = [record.trajectory for record in read_records("scores", split="eval")]
    assert len(trajectories) == 4
    assert all(len(item.turns) == 1 and item.num_action_tokens <= 3 for item in trajectories)


def test_flags_win_over_the_recipe(recipe):
    flags = ["--num_examples", "1", "--num_generations", "3", "--temperature", "1", "--env_kwargs", "{bonus: 7}"]
    assert main(["eval", "--config", recipe(), *flags, "--output_dir", "scores"]) == 0
    trajectories = [record.trajectory for record in read_records("scores", split="eval")]
    assert len(trajectories) == 3
    assert {item.outcome_reward for item in trajectories} <= {0.0, 7.0}


MAPPINGS = {
    "a key": (["--env_kwargs", "{bonus: 7}"], {"bonus": 7, "note": "a"}),
    "another key": (["--env-kwargs={more: 1}"], {"bonus": 2, "note": "a", "more": 1}),
    "nothing": (["--env_kwargs", "{}"], {"bonus": 2, "note": "a"}),
    "the same environment": (["--env", "task.py:AddEnv", "--env_kwargs", "{bonus: 7}"], {"bonus": 7, "note": "a"}),
    "another environment": (["--env", "task.py:Other", "--env_kwargs", "{bonus: 7}"], {"bonus": 7}),
    "not given": ([], {"bonus": 2, "note": "a"}),
}


@pytest.mark.parametrize(("flags", "expected"), MAPPINGS.values(), ids=MAPPINGS.keys())
def test_keys_of_env_kwargs_on_the_command_line_are_put_over_those_of_the_recipe_in_every_command(
    recipe, flags, expected
):
    path = recipe(env_kwargs={"bonus": 2, "note": "a"})
    assert read_arguments(["--config", path, *flags]).env_kwargs == expected
    assert train.read_arguments(["--config", path, *flags])[0].env_kwargs == expected
    assert read_conversation_arguments("chat", ["--config", path, *flags]).env_kwargs == expected


def test_other_mappings_are_put_over_the_recipes_as_well(recipe):
    path = recipe(reward_options={"a": {"x": 1}}, chat_template_kwargs={"enable_thinking": False})
    arguments, *_ = train.read_arguments(["--config", path, "--reward_options", "{b: {y: 2}}"])
    assert arguments.reward_options == {"a": {"x": 1}, "b": {"y": 2}}
    arguments = read_arguments(["--config", path, "--chat_template_kwargs", "{style: short}"])
    assert arguments.chat_template_kwargs == {"enable_thinking": False, "style": "short"}


def test_a_seed_repeats_an_evaluation(recipe):
    path = recipe()
    for folder, seed in {"first": "5", "again": "5", "other": "6"}.items():
        flags = ["--temperature", "1", "--seed", seed, "--output_dir", folder, "--num_examples", "1"]
        assert main(["eval", "--config", path, *flags]) == 0
    tokens = {
        folder: [record.trajectory.completion_ids for record in read_records(folder, split="eval")]
        for folder in ("first", "again", "other")
    }
    assert tokens["first"] == tokens["again"] != tokens["other"]


def test_the_rows_to_train_on_serve_where_there_are_none_to_evaluate_on(recipe):
    assert main(["eval", "--config", recipe(eval_dataset_name=None), "--output_dir", "scores"]) == 0
    assert read_result()["num_examples"] == 4


def test_a_trained_agent_is_evaluated_and_viewed(finished_run, recipe, capsys):
    out = str(finished_run / "out")
    assert main(["eval", "--config", recipe(), "--model", out, "--output_dir", "scores"]) == 0
    capsys.readouterr()
    assert main(["view", "scores", "--split", "eval"]) == 0
    shown = capsys.readouterr().out
    assert "evaluation, step 0, index 0" in shown and "What is 0 + 0?" in shown


BROKEN_ENV = """

class BrokenEnv(AddEnv):
    def __init__(self, bad=()):
        super().__init__()
        self.bad = bad

    def reset(self, example):
        if example["id"] in self.bad:
            raise OSError("the server is down")
        return super().reset(example)
"""


def break_rows(path, *ids):
    """Make the recipe's environment fail on these rows; returns the flags that say so."""
    task = Path(path).parent / "task.py"
    task.write_text(task.read_text() + BROKEN_ENV)
    return ["--env", "task.py:BrokenEnv", "--env_kwargs", json.dumps({"bad": ids})]


@pytest.mark.parametrize("row", ["test0", "test1"])
def test_one_bad_row_is_counted_and_the_others_are_scored(recipe, row):
    path = recipe()
    assert main(["eval", "--config", path, *break_rows(path, row), "--output_dir", "scores"]) == 0
    result = read_result()
    assert (result["num_examples"], result["infrastructure_failure_rate"]) == (2, 0.5)
    played = [r.trajectory for r in read_records("scores", split="eval") if r.trajectory.example_id != row]
    assert result["reward"] == played[0].total_reward


FLAKY_ENV = """

TRIES = []


class FlakyEnv(AddEnv):
    def reset(self, example):
        TRIES.append(example["id"])
        if example["id"] == "test1" and TRIES.count("test1") == 1:
            raise OSError("the server is down")
        return super().reset(example)
"""


@pytest.mark.parametrize(("flags", "share"), [([], 0.5), (["--retry_failed", "1"], 0.0)])
def test_a_row_that_failed_is_played_again_where_that_is_asked(recipe, flags, share):
    path = recipe()
    task = Path(path).parent / "task.py"
    task.write_text(task.read_text() + FLAKY_ENV)
    assert main(["eval", "--config", path, "--env", "task.py:FlakyEnv", "--output_dir", "scores", *flags]) == 0
    assert read_result()["infrastructure_failure_rate"] == share


def test_where_nothing_can_be_played_every_cause_is_said(recipe, refusal, monkeypatch):
    path = recipe()
    flags = ["--config", path, *break_rows(path, "test0", "test1"), "--num_generations", "3"]
    assert "cannot start on the first rows" in refusal("eval", *flags)
    monkeypatch.setattr("agent_r1_trl.cli.eval.check_first_row", lambda *args: None)
    message = refusal("eval", *flags, code=EXIT_INFRASTRUCTURE)
    assert "All 6 trajectories failed: 6 x environment_error: BrokenEnv.reset raised OSError: the server is" in message
    assert "example 'test0'" in message
