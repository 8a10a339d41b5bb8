"""`agent-r1-trl train`: recipe and flags in, a model and its trajectories out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.train import read_arguments
from agent_r1_trl.display.lines import headline_of
from agent_r1_trl.recording import read_records

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_leaves_model_tokenizer_state_and_trajectories(finished_run):
    out = finished_run / "out"
    for name in ("model.safetensors", "tokenizer.json", "trainer_state.json", "training_args.bin"):
        assert (out / name).is_file(), name
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert all("reward" in entry for entry in state["log_history"][:2])
    assert len(list(read_records(out))) == 8


@pytest.mark.parametrize("flags", [["--eval_dataset_name", "null"], ["--eval_dataset_name=null"]])
def test_null_unsets_a_setting_of_the_recipe(recipe, flags):
    flags = [*flags, "--run_name", "null", "--seed", "5"]
    settings = read_arguments(["--config", recipe(), *flags])[0].settings
    assert (settings["eval_dataset_name"], settings["run_name"], settings["seed"]) == (None, None, 5)


def test_without_an_environment_completions_are_scored_as_in_trl(recipe):
    path = recipe(
        env=None, reward_funcs=["task.py:word_count_reward"], max_steps=1, max_turns=None, max_tokens_per_turn=None,
        max_observation_tokens=None, eval_dataset_name=None,
    )  # fmt: skip
    assert main(["train", "--config", path]) == 0
    assert "reward" in json.loads(Path("out/trainer_state.json").read_text())["log_history"][0]


def test_rewards_for_reasoning_are_named_in_a_recipe_with_their_options(recipe):
    path = recipe(
        reward_funcs=["agent_r1_trl.rewards.overlong_penalty", "task.py:word_count_reward"],
        turn_reward_funcs=["agent_r1_trl.rewards.thinking_format_penalty"],
        reward_options={"overlong_penalty": {"max_tokens": 2, "buffer": 1}, "thinking_format_penalty": {"penalty": 3}},
        max_steps=1, max_turns=1, eval_dataset_name=None,
    )  # fmt: skip
    assert main(["train", "--config", path]) == 0
    for record in read_records("out"):
        (turn,) = record.trajectory.turns
        assert turn.reward_parts["thinking_format_penalty"] == -3.0
        assert record.trajectory.reward_parts["overlong_penalty"] == (0.0 if turn.end == 1 else -1.0)


@pytest.mark.slow
def test_accelerate_launch_trains_one_step_from_a_recipe(recipe):
    path = recipe(max_steps=1, eval_dataset_name=None)
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["accelerate.commands.launch", "--cpu", *flags, "-m", "agent_r1_trl.cli.train", "--config", path]
    finished = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Done. The model is in out" in finished.stdout
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 1
    assert len(list(read_records("out"))) == 4


AT_EXIT = """
import atexit
import os
from pathlib import Path

import torch.distributed as dist

was_there = Path(f"rank-{os.environ['RANK']}")
atexit.register(lambda: was_there.write_text(str(dist.is_initialized())))
"""


@pytest.mark.release
def test_two_ranks_leave_no_process_group_behind(recipe):
    path = recipe(max_steps=1, eval_dataset_name=None)
    task = Path("task.py")
    task.write_text(AT_EXIT + task.read_text())
    command = ["torch.distributed.run", "--nproc_per_node", "2", "-m", "agent_r1_trl.cli.train", "--config", path]
    finished = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [Path(f"rank-{rank}").read_text() for rank in range(2)] == ["False", "False"]


def test_the_line_of_a_step_says_success_the_pass_rate_and_what_was_filtered():
    logs = {"filter/kept_share": 0.5, "env/success": 0.25, "reward": 0.5, "sampling/pass_rate": 0.125, "loss": 1.0}
    assert headline_of(logs) == "reward 0.5  pass rate 0.125  success 0.25  kept 0.5"
