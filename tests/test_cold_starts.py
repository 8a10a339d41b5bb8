"""Recipes whose model a script makes: from the script, in a process of its own, to a trained policy and the doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1_trl import check_env
from agent_r1_trl.cli import main
from agent_r1_trl.cli.resolve import resolve_env
from tests import without_vllm
from tests.effort import short

ROOT = Path(__file__).resolve().parents[1]
STARTS = {
    "bandit/make_cold_start.py": ("grpo", "ppo"),
    "frozen_lake/make_cold_start.py": ("ppo",),
    "countdown/make_cold_start.py": ("grpo",),
    "sokoban/make_cold_start.py": ("grpo",),
    "corridor/make_cold_start.py": ("grpo", "ppo"),
    "gsm8k_python/make_model.py": ("grpo",),
    "function_calling/make_model.py": ("grpo",),
}
"""Script -> algorithms that are tried."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the recipes' paths start here


@pytest.mark.parametrize("script", STARTS)
def test_the_linter_of_environments_has_nothing_to_say(script):
    if script.startswith("countdown"):  # its import takes longer than a reset may, if the machine is busy
        pytest.importorskip("reasoning_gym")
    recipe = yaml.safe_load(Path(f"recipes/{script}").parent.joinpath("grpo/config_cpu.yaml").read_text())
    rows = [json.loads(line) for line in Path(recipe["eval_dataset_name"]).read_text().splitlines()[:3]]
    # In the corridor of the recipe any turn but the name of a door loses the game, as the linter says of its tries.
    allowed = {"warning"} if script.startswith("corridor") else set()
    findings = check_env(resolve_env(recipe["env"], recipe.get("env_kwargs")), rows)
    assert [finding for finding in findings if finding.level not in {"ok"} | allowed] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", short(STARTS, "bandit/make_cold_start.py"))
def test_a_recipe_trains_from_the_model_that_its_script_makes(script, tmp_path):
    start = str(tmp_path / "start")
    command = [sys.executable, f"recipes/{script}", "--steps", "2", "--batch-size", "2", "--out", start]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", without_vllm.FOLDER])})
    for algo in STARTS[script]:
        config = f"recipes/{script.partition('/')[0]}/{algo}/config_cpu.yaml"
        assert yaml.safe_load(Path(config).read_text())["model_name_or_path"].startswith("outputs/")
        changed = {
            "model_name_or_path": start, "output_dir": f"{tmp_path}/{algo}", "max_steps": "1",
            "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "generation_batch_rows": "4",
            "max_tokens_per_turn": "4", "num_generations": "2" if algo == "grpo" else "1",
        }  # fmt: skip
        options = [part for name, value in changed.items() for part in (f"--{name}", value)]
        assert main(["train", "--config", config, *options]) == 0
        history = json.loads((tmp_path / algo / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        assert [0 <= row["env/success"] <= 1 for row in history if "env/success" in row] in ([True], [])
    if script.startswith("bandit"):
        assert main(["doctor", "--config", config, "--model_name_or_path", start]) == 0
