"""An evaluation that was killed goes on without sampling anything twice; evaluation during training agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE
from agent_r1_trl.recording import read_records

KILLED_ENV = """

from pathlib import Path

from agent_r1_trl.generation import GenerationError  # ends the rollout; of other errors, the trajectory


class KilledEnv(AddEnv):
    def reset(self, example):
        with Path("resets").open("a") as file:
            file.write(example["id"] + chr(10))
        return super().reset(example)

    def outcome_reward(self, trajectory):
        if Path("kill").exists() and self.example["id"] == "more1":
            raise GenerationError("as if killed")
        return super().outcome_reward(trajectory)
"""


@pytest.fixture
def killed(recipe):
    """The arguments of an evaluation of two data sets that died in the last trajectory; `resets` is then empty."""
    path = recipe(env="task.py:KilledEnv", output_dir="scores")
    task = Path("task.py")
    task.write_text(task.read_text() + KILLED_ENV)
    rows = [{"id": f"more{i}", "prompt": f"What is {i}?"} for i in range(2)]
    Path("more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["eval", "--config", path, "--datasets", "test.jsonl", "more.jsonl", "--max_concurrency", "1"]
    Path("kill").touch()
    assert main(flags) == EXIT_INFRASTRUCTURE
    Path("kill").unlink()
    Path("resets").write_text("")
    return flags


def resets() -> list[str]:
    """Rows whose episode began; the first row of each data set begins once more, when it is checked."""
    return sorted(Path("resets").read_text().split())


def test_only_what_had_not_ended_is_sampled_again_and_a_later_start_begins_anew(killed):
    assert main(killed) == 0
    assert resets() == ["more0", "more1", "test0"]
    rows = json.loads(Path("scores/evaluation.json").read_text())["rows"]
    assert [row["num_examples"] for row in rows] == [2, 2] and not Path("scores/unfinished").exists()
    assert main([*killed, "--output_dir", "whole"]) == 0
    whole = json.loads(Path("whole/evaluation.json").read_text())["rows"]
    assert [row["reward"] for row in rows] == [row["reward"] for row in whole]
    Path("resets").write_text("")
    assert main(killed) == 0
    assert resets() == ["more0", "more0", "more1", "test0", "test0", "test1"]


def test_other_settings_are_refused_by_name_until_it_begins_anew(killed, refusal):
    assert "max_turns': 2" in refusal(*killed, "--max_turns", "1")
    assert "seed was 3 and is now 4" in refusal(*killed, "--seed", "4")
    assert main([*killed, "--seed", "4", "--no_resume"]) == 0
    assert resets().count("test1") == 1


def test_a_model_that_was_written_anew_is_another_one(killed, refusal, model_folder, tmp_path):
    import shutil

    shutil.copytree(model_folder, tmp_path / "copy")
    assert "model was" in refusal(*killed, "--model", "copy")


@pytest.mark.parametrize(
    ("temperature", "num_attempts", "words"),
    [
        pytest.param(0.0, 1, "(greedy, 1 attempt per example", marks=pytest.mark.matrix),
        (1.0, 2, "(sampled at temperature 1, top_p 0.9, 2 attempts per"),
    ],
)
def test_evaluation_in_training_rolls_out_the_same_trajectories(recipe, capsys, temperature, num_attempts, words):
    path = recipe(
        learning_rate=0.0, max_steps=1, eval_strategy="steps", eval_steps=1, top_p=0.9, save_strategy="no",
        eval_temperature=temperature, num_generations_eval=num_attempts, per_device_eval_batch_size=2,
    )  # fmt: skip
    assert main(["train", "--config", path]) == 0
    assert words in capsys.readouterr().out
    assert main(["eval", "--config", path, "--output_dir", "scores"]) == 0
    assert words.strip("(") in capsys.readouterr().out
    during, after = (
        [(item.trajectory.example_id, item.trajectory.completion_ids) for item in read_records(folder, split="eval")]
        for folder in ("out", "scores")
    )
    assert during == after and len(after) == 2 * num_attempts
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    logged = next(log for log in history if "eval_reward" in log)
    result = json.loads(Path("scores/evaluation.json").read_text())
    assert (result["reward"], result["turns"]) == pytest.approx((logged["eval_reward"], logged["eval_rollout/turns"]))
