"""`recipe.yaml` of a run: everything it ran with, and a run that starts from it again."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from agent_r1_trl.cli import main
from agent_r1_trl.cli.recipe import git_state, write_resolved_recipe
from agent_r1_trl.cli.train import _farewell, read_arguments
from agent_r1_trl.recording import read_records


def losses(folder):
    history = json.loads(Path(folder, "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_run_starts_again_from_the_recipe_that_it_left_with_the_environments_defaults(recipe):
    assert main(["train", "--config", recipe(eval_dataset_name=None), "--seed", "11"]) == 0
    kept = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert kept["seed"] == 11 and kept["env_kwargs"] == {"bonus": 1.0}
    assert main(["train", "--config", "out/recipe.yaml", "--output_dir", "again"]) == 0
    first, second = ([item.trajectory.completion_ids for item in read_records(name)] for name in ("out", "again"))
    assert first == second and losses("out") == losses("again")
    again = yaml.safe_load(Path("again/recipe.yaml").read_text())
    assert again | {"output_dir": "out"} == kept


def test_the_recipe_of_a_run_holds_facts_and_arguments_no_secrets_and_what_is_named_at_its_end_works(
    recipe, monkeypatch, capsys
):
    """`system_prompt` is an argument that the signature does not name."""
    monkeypatch.setenv("SERVICE_API_KEY", "sk-very-secret-1")
    given = {"bonus": 2, "system_prompt": ""}
    path = recipe(max_steps=1, env_kwargs=given, run_name="by sk-very-secret-1", hub_token="hf_abcdefghijkl")
    task = Path("task.py")
    task.write_text(task.read_text().replace("bonus: float = 1.0", "bonus=1.0, **settings").replace(
        "super().__init__()", "super().__init__(**settings)"
    ))  # fmt: skip
    assert main(["train", "--config", path]) == 0
    text = Path("out/recipe.yaml").read_text()
    assert "sk-very-secret-1" not in text and "hf_abcdefghijkl" not in text
    assert yaml.safe_load(text)["env_kwargs"] == given
    top = text.split("\n\n")[0]
    assert "# data: dataset_name 4 rows (id, prompt); eval_dataset_name 2 rows (id, prompt)" in top
    assert "trl 1." in top and "1 process(es), cpu" in top and "# git: " in top
    commands = re.findall(r"^  agent-r1-trl (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["view", "eval"]
    for command in commands:
        assert main(shlex.split(command)) == 0, command


@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
def test_every_setting_survives(recipe, trainer):
    schedule = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
    path = recipe(trainer=trainer, report_to=["tensorboard"], bf16=None, **schedule)
    made = read_arguments(["--config", path])
    settings = made[0].settings
    write_resolved_recipe(settings, [type(item) for item in made], None, {}, ".")
    assert yaml.safe_load(Path("recipe.yaml").read_text()).keys() >= {"max_turns", "adam_beta1", "lora_r", "beta"}
    made_again = read_arguments(["--config", "recipe.yaml"])
    again = made_again[0].settings
    assert {name: value for name, value in again.items() if name != "config"} == {
        name: value for name, value in settings.items() if name != "config"
    }
    assert [type(item) for item in made_again] == [type(item) for item in made]


def test_the_importance_ratio_of_a_run_survives(recipe):
    """Its default depends on `rollouts_ahead`; what the run had is written, and what a user chose stands."""
    for options, expected in (
        ({}, ("token_truncate", 2.0)),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, ("sequence_mask", 3.0)),
    ):
        path = recipe(use_vllm=True, rollouts_ahead=1, vllm_mode="server", **options)
        made = read_arguments(["--config", path])
        write_resolved_recipe(made[0].settings, [type(item) for item in made], None, {}, ".")
        kept = yaml.safe_load(Path("recipe.yaml").read_text())
        assert (kept["vllm_importance_sampling_mode"], kept["vllm_importance_sampling_clip_max"]) == expected
        args = read_arguments(["--config", "recipe.yaml"])[1]
        assert (args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max) == expected


def test_a_number_without_a_point_is_one_in_every_mapping(recipe):
    given = {"rate": 1e-5, "name": "1e-5", "list": [5e-1, -2e-3]}
    text = "{rate: 1e-5, name: '1e-5', list: [5e-1, -2e-3]}"
    written = (
        Path(recipe()).read_text() + f"env_kwargs: {text}\nsampling: {{filter_groups: top_p, filter_value: 9e-1}}\n"
    )
    Path("numbers.yaml").write_text(written)
    made = read_arguments(["--config", "numbers.yaml"])
    settings = made[0].settings
    assert settings["env_kwargs"] == given and settings["sampling"]["filter_value"] == 0.9
    write_resolved_recipe(settings, [type(item) for item in made], None, {}, ".")
    again = read_arguments(["--config", "recipe.yaml", "--sampling", "{filter_value: 8e-1}"])[0].settings
    assert again["env_kwargs"] == given and again["sampling"]["filter_value"] == 0.8


def test_the_state_of_the_code(tmp_path):
    assert git_state(str(tmp_path)) == "no repository"
    run = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c"]
    (tmp_path / "a.py").write_text("1")
    for arguments in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-qm", "A"]):
        subprocess.run([*run, *arguments], cwd=tmp_path, check=True)
    assert git_state(str(tmp_path)).isalnum()
    (tmp_path / "a.py").write_text("2")
    assert git_state(str(tmp_path)).endswith("-dirty")


def test_the_commands_that_a_run_names_are_those_of_a_folder_with_blanks(tmp_path):
    folder = str(tmp_path / "my agent")
    Path(folder).mkdir()
    lines = write_resolved_recipe({}, [], None, {}, folder).read_text().splitlines()
    lines += _farewell(
        SimpleNamespace(env="search_qa", dataset_name="d", eval_dataset_name=None),
        SimpleNamespace(record_trajectories="jsonl"),
        folder,
    ).splitlines()
    again, view, evaluate = (shlex.split(line.strip("# ")) for line in lines if line.strip("# ").startswith("agent-"))
    assert again[1:4] == ["train", "--config", f"{folder}/recipe.yaml"]
    assert view[1:] == ["view", folder, "--terminal"]
    assert evaluate[1:] == [
        "eval",
        "--config",
        f"{folder}/recipe.yaml",
        "--model",
        folder,
        "--output_dir",
        f"{folder}/evaluation",
    ]
