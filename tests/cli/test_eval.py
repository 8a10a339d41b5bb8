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
from agent_r1_trl.evaluation.table import EvaluationTable
from agent_r1_trl.features.serve.command_agent import read_conversation_arguments
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
    assert (result["num_examples"], result["dataset"], result["method"]) == (2, "test", "model")
    assert "rows" not in result and Path("scores/evaluation.md").exists()
    assert 1 <= result["turns"] <= 2
    records = list(read_records("scores", split="eval"))
    assert len(records) == 2
    rewards = [record.trajectory.total_reward for record in records]
    assert result["reward"] == pytest.approx(sum(rewards) / 2)


def test_the_hint_shows_the_evaluation_just_made_also_among_those_of_training(recipe, capsys):
    path = recipe(output_dir="out")
    TrajectoryStore("out").write(40, [two_turns(example_id="of-training")], split="eval")
    assert main(["eval", "--config", path]) == 0
    (hint,) = re.findall(r"agent-r1-trl (view .*)", capsys.readouterr().out)
    assert main(hint.split()) == 0
    shown = capsys.readouterr().out
    assert "What is 0 + 0?" in shown and "of-training" not in shown


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


def test_without_an_output_directory_the_rows_to_train_on_are_rolled_out_and_nothing_is_written(recipe, capsys):
    assert main(["eval", "--config", recipe(output_dir=None, eval_dataset_name=None)]) == 0
    printed = capsys.readouterr().out
    assert "4examples" in "".join(printed.split()) and "evaluation.json" not in printed
    assert not list(Path().rglob("evaluation.json"))


def test_where_nothing_can_be_rolled_out_every_cause_is_said(recipe, refusal, monkeypatch):
    path = recipe(env="task.py:Down")
    with Path("task.py").open("a") as task:
        task.write("\n\nclass Down(AddEnv):\n    def reset(self, example):\n        raise OSError('it is down')\n")
    flags = ["eval", "--config", path, "--num_generations", "3"]
    assert "cannot start on the first rows" in refusal(*flags)
    monkeypatch.setattr("agent_r1_trl.cli.eval.check_first_row", lambda *args: None)
    message = refusal(*flags, code=EXIT_INFRASTRUCTURE)
    assert "All 6 trajectories were lost: 6 x environment_error: Down.reset raised OSError: it is down" in message
    assert "example 'test0'" in message


def test_a_full_disk_is_not_blamed_on_the_model(recipe, refusal, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agent_r1_trl.cli.eval._evaluate_row", full)
    message = refusal("eval", "--config", recipe(), "--output_dir", "scores", code=EXIT_INFRASTRUCTURE)
    assert "output_dir='scores': the evaluation stopped (OSError: [Errno 28] No space left" in message
    assert "cannot be loaded" not in message


def test_a_disk_that_is_full_at_the_end_is_one_line_after_the_table(recipe, capsys, monkeypatch):
    def write(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EvaluationTable, "write", write)
    assert main(["eval", "--config", recipe(), "--output_dir", "scores"]) == EXIT_INFRASTRUCTURE
    told = capsys.readouterr()
    assert "lost_rate" in told.out and "output_dir='scores': the evaluation stopped (OSError: [Errno 28]" in told.err


def test_the_results_are_where_they_are_said_to_be_although_the_environment_went_elsewhere(recipe):
    path = Path(recipe())
    Path("elsewhere").mkdir()
    away = (
        "\n\nimport os\n\n\nclass Away(AddEnv):\n    def outcome_reward(self, trajectory):\n        os.chdir(HERE)\n"
    )
    away = (
        away.replace("HERE", repr(str(Path("elsewhere").resolve())))
        + "        return super().outcome_reward(trajectory)\n"
    )
    Path("task.py").write_text(Path("task.py").read_text() + away)
    assert main(["eval", "--config", str(path), "--env", "task.py:Away", "--output_dir", "scores"]) == 0
    assert Path.cwd() == path.parent and read_result()["num_examples"] == 2
    assert not Path("scores/unfinished").exists() and not any(Path("elsewhere").iterdir())
