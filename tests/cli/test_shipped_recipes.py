"""Recipes by name, in a clone and in the wheel."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.recipe import read_recipe
from agent_r1_trl.cli.shipped_recipes import FOLDER, find_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_has_a_name_and_every_name_a_recipe():
    files = {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("config*.yaml")}
    assert {str(path.relative_to(FOLDER)) for path in shipped_recipes().values()} == files
    assert find_recipe("quickstart/grpo/cpu") == FOLDER / "quickstart/grpo/config_cpu.yaml"
    assert find_recipe("gsm8k_python/grpo") == FOLDER / "gsm8k_python/grpo/config.yaml"
    assert find_recipe("recipes/quickstart/grpo/config_cpu.yaml") is None


def test_the_list_names_them(capsys):
    assert main(["train", "--list-recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("quickstart/")] == [
        "quickstart/grpo/cpu", "quickstart/ppo/cpu",
    ]  # fmt: skip
    assert all(len(line.split()) > 3 for line in lines[: len(shipped_recipes())]), "a recipe says what it is"


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_files_that_a_named_recipe_points_to_come_with_the_package(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = read_recipe(name)
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


def flat(value):
    if isinstance(value, dict | list):
        return [text for item in (value.values() if isinstance(value, dict) else value) for text in flat(item)]
    return [value] if isinstance(value, str) else []


def test_a_wrong_name_is_refused_with_the_nearest(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    message = refusal("train", "--config", "quickstart/grpo/cpuu")
    assert "Did you mean 'quickstart/grpo/cpu'?" in message and "--list-recipes" in message


@pytest.mark.slow
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
