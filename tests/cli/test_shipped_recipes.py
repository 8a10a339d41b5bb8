"""Recipes by name, in a clone and in the wheel."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.recipe import (
    FOLDER,
    found_paths,
    read_recipe,
    shipped_recipes,
    without_package_paths,
    write_resolved_recipe,
)
from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.cli.train import load_data, read_arguments

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_has_a_name_and_every_name_a_recipe():
    files = {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("config*.yaml")}
    assert {str(path.relative_to(FOLDER)) for path in shipped_recipes().values()} == files
    assert shipped_recipes()["quickstart/grpo/cpu"] == FOLDER / "quickstart/grpo/config_cpu.yaml"
    assert shipped_recipes()["gsm8k_python/grpo"] == FOLDER / "gsm8k_python/grpo/config.yaml"


def test_the_list_names_them(capsys):
    assert main(["train", "--list-recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("quickstart/")] == [
        "quickstart/grpo/cpu", "quickstart/ppo/cpu",
    ]  # fmt: skip
    assert all(len(line.split()) > 3 for line in lines[: len(shipped_recipes())]), "a recipe says what it is"
    launches = [line.split()[0] for line in lines if "/accelerate_configs/" in line]
    assert {Path(path).name for path in launches} >= {"ddp.yaml", "zero2.yaml", "zero3.yaml"}
    assert all(Path(path).is_file() for path in launches), "accelerate launch reads them as they stand there"


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_files_that_a_named_recipe_points_to_come_with_the_package(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = found_paths(read_recipe(name))
    texts = [text for text in flat(values) if text.startswith(("recipes/", str(FOLDER)))]
    assert [text for text in texts if not Path(text.partition(":")[0]).exists()] == []


def test_a_model_that_is_to_be_made_first_is_named_with_its_script(tmp_path, monkeypatch, refusal):
    made = {path: path.read_text().split("\nmodel_name_or_path: outputs/") for path in shipped_recipes().values()}
    heads = [parts[0].splitlines()[-2:] for parts in made.values() if len(parts) == 2]
    scripts = [re.search(r"made by (recipes/\S+\.py)", " ".join(head)) for head in heads]
    assert len(scripts) > 5 and all(script and (ROOT / script[1]).is_file() for script in scripts)
    monkeypatch.chdir(tmp_path)
    message = refusal("eval", "--config", "function_calling/grpo/cpu")
    assert "outputs/function_calling/start" in message and "made by the script that it names above" in message
    message = refusal("chat", "outputs/my-agent")  # would be looked for on the Hub
    assert "model_name_or_path='outputs/my-agent': no such directory" in message and "script" not in message


def flat(value):
    if isinstance(value, dict | list):
        return [text for item in (value.values() if isinstance(value, dict) else value) for text in flat(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", ["multihop_qa/grpo/cpu", "corridor/grpo/cpu"])
def test_what_a_named_recipe_leaves_holds_no_place_of_this_machine_and_starts_elsewhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, *others = read_arguments(["--config", name])
    settings = arguments.settings
    env = resolve_env(arguments.env, arguments.env_kwargs)
    kinds = [type(item) for item in (arguments, *others)]
    write_resolved_recipe(settings, kinds, env, {}, ".")
    text = Path("recipe.yaml").read_text()
    assert str(FOLDER) not in text and "recipes/" in text
    arguments_again, *_ = read_arguments(["--config", "recipe.yaml"])
    again = arguments_again.settings
    assert {key: again[key] for key in settings if key not in ("config", "env_kwargs")} == {
        key: value for key, value in settings.items() if key not in ("config", "env_kwargs")
    }
    factory = resolve_env(arguments_again.env, arguments_again.env_kwargs)
    assert {**factory.keywords}.items() >= {**env.keywords}.items()
    assert arguments_again.dataset_name is None or len(load_data(arguments_again)[0])


def test_a_file_of_ones_own_at_the_place_of_a_shipped_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = "recipes/quickstart/data/test.jsonl"
    assert found_paths({"a": [shipped, 3]}) == {"a": [f"{FOLDER}/quickstart/data/test.jsonl", 3]}
    assert without_package_paths(found_paths(shipped)) == shipped
    assert found_paths("recipes/nowhere.jsonl") == "recipes/nowhere.jsonl"
    Path(shipped).parent.mkdir(parents=True)
    Path(shipped).touch()
    assert found_paths(shipped) == shipped


@pytest.mark.release
def test_the_wheel_holds_the_recipes_and_one_runs_by_name(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"  # setuptools writes build/ beside what it builds
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run([*build, str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    assert (installed / "agent_r1_trl/recipes/quickstart/model/model.safetensors").is_file()
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [
            sys.executable, "-m", "agent_r1_trl.cli.train", "--config", "quickstart/grpo/cpu", "--max_steps", "1",
            "--per_device_train_batch_size", "8", "--eval_strategy", "no", "--output_dir", "out",
        ],
        cwd=tmp_path / "elsewhere", env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "elsewhere/out/model.safetensors").is_file()
    assert str(installed) not in (tmp_path / "elsewhere/out/recipe.yaml").read_text()
