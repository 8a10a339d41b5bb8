"""`--journal.replay` of `train` and `eval`: recorded rollouts again, without sampler, tools and environment."""

import json
from pathlib import Path

from agent_r1_trl.cli import main
from agent_r1_trl.recording import read_records

BROKEN_TASK = """
from agent_r1_trl import ToolEnv


class AddEnv(ToolEnv):
    def reset(self, example):
        raise RuntimeError("no environment is used")


def length_reward(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]
"""


def ids_of(folder, split):
    return [(item.trajectory.completion_ids, item.trajectory.logprobs) for item in read_records(folder, split=split)]


def test_a_training_is_replayed_with_another_reward_function_and_without_its_environment(recipe, refusal):
    path = recipe(env="task.py:AddEnv")
    assert main(["train", "--config", path]) == 0
    Path("broken.py").write_text(BROKEN_TASK)
    replay = ["--config", path, "--env", "broken.py:AddEnv", "--journal.replay", "out", "--output_dir", "again"]
    assert main(["train", *replay, "--reward_funcs", "broken.py:length_reward", "--max_steps", "5"]) == 0
    assert ids_of("again", "train") == ids_of("out", "train") != []
    history = [
        json.loads(Path(folder, "trainer_state.json").read_text())["log_history"] for folder in ("out", "again")
    ]
    assert history[0][0]["reward"] != history[1][0]["reward"]
    assert json.loads(Path("again/trainer_state.json").read_text())["global_step"] == 2
    assert "replay" in refusal("train", *replay[:-1], "third", "--seed", "4")
    assert "replay" in refusal("train", *replay[:-1], "out")


def test_an_evaluation_is_replayed_without_its_model(recipe, refusal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = recipe()
    assert main(["eval", "--config", path, "--output_dir", "scores"]) == 0
    capsys.readouterr()
    Path("broken.py").write_text(BROKEN_TASK)
    replay = ["--config", path, "--env", "broken.py:AddEnv", "--model", "", "--journal.replay", "scores"]
    assert main(["eval", *replay, "--output_dir", "again"]) == 0
    assert ids_of("again", "eval") == ids_of("scores", "eval") != []
    before, after = (json.loads(Path(folder, "evaluation.json").read_text()) for folder in ("scores", "again"))
    assert {name for name in before if before[name] != after.get(name)} <= {"settings", "duration_s"}
    assert "seed" in refusal("eval", *replay, "--seed", "9")
    assert "--model" in refusal("eval", "--config", path, "--model", "")


OTHER_LIMITS = {
    "max_turns": 7, "max_completion_length": 77, "max_tokens_per_turn": 3, "max_observation_tokens": 7,
    "max_invalid_calls": 0, "context": "strip_thinking",
}  # fmt: skip


def test_an_evaluation_within_other_limits_is_refused_and_those_that_decide_nothing_are_not_compared(recipe, refusal):
    path = recipe()
    assert main(["eval", "--config", path, "--output_dir", "scores"]) == 0
    replay = ["eval", "--config", path, "--journal.replay", "scores", "--output_dir", "again"]
    for name, value in OTHER_LIMITS.items():
        message = refusal(*replay, f"--{name}", str(value))
        limit = "context.policy" if name == "context" else name
        assert f"{limit}=" in message and f"has {limit}={value!r}" in message and f"Set {limit} to " in message
    assert main([*replay, "--max_concurrency", "1", "--rollout_timeout", "7"]) == 0


def test_an_evaluation_leaves_no_journal_where_none_is_wanted(recipe):
    assert main(["eval", "--config", recipe(), "--output_dir", "scores", "--journal", "false"]) == 0
    assert not Path("scores/journal").exists()
