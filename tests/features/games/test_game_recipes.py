"""The recipes of the games: settings, demonstrators, and a report over seeds."""

import itertools
import json
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1_trl import check_env
from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.cli.train import read_arguments

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "recipes"
GAMES = ("bandit", "frozen_lake", "countdown", "sokoban")
CONFIGS = sorted(path for game in GAMES for path in (RECIPES / game).glob("*/config_*.yaml"))
CPU = [path for path in CONFIGS if path.stem == "config_cpu"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Recipes name their files from here, and their scripts put this folder on the path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPES))


def read(config):
    return yaml.safe_load(config.read_text(encoding="utf-8"))


def script_of(game):
    return runpy.run_path(str(RECIPES / game / "make_cold_start.py"), run_name=game)


def name_of(config):
    return "/".join(config.relative_to(RECIPES).with_suffix("").parts)


def test_every_game_has_a_recipe_for_each_algorithm_and_machine():
    kinds = [f"{algo}/config_{machine}" for algo in ("grpo", "ppo") for machine in ("cpu", "default")]
    assert {name_of(path) for path in CONFIGS} == {f"{game}/{kind}" for game in GAMES for kind in kinds}


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_the_environment_of_a_recipe_has_no_findings(config):
    pytest.importorskip("reasoning_gym")  # its import takes longer than a reset may, if the machine is busy
    recipe = read(config)
    assert recipe["env"] == config.parts[-3] and config.parts[-2] == recipe.get("trainer", "grpo")
    lines = Path(recipe["eval_dataset_name"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["seed"] for row in rows}) == 200
    assert check_env(resolve_env(recipe["env"], recipe["env_kwargs"]), [*rows[:2], {"prompt": ""}]) == []


@pytest.mark.parametrize("config", CPU, ids=name_of)
def test_the_settings_of_a_cpu_recipe_are_accepted(config):
    script, args, model = read_arguments(["--config", str(config)])
    game, algo = config.parts[-3:-1]
    assert model.model_name_or_path == f"outputs/{game}/start" and args.output_dir == f"outputs/{game}/{algo}"
    assert script.dataset_name is None and args.max_steps > 0
    assert read(RECIPES / game / "grpo" / "config_cpu.yaml")["env_kwargs"] == script.env_kwargs  # what the model knows


@pytest.mark.parametrize("game", GAMES)
def test_a_demonstrator_plays_games_that_a_few_tokens_hold_and_wins_some(game):
    from tiny_model import play, read_env

    recipe = read(RECIPES / game / "grpo" / "config_cpu.yaml")
    make_env, made, rng = read_env(RECIPES / game / "grpo" / "config_cpu.yaml"), [], random.Random(0)
    say = script_of(game)["say"]
    games = [play(lambda: made.append(make_env()) or made[-1], say, rng) for _ in range(60)]
    assert all(turns[0]["role"] == "system" and turns[-1]["role"] == "assistant" for turns in games)
    assert max(len(turns) // 2 for turns in games) <= recipe["max_turns"]
    won = [env.pulled[-1:] == [env.better] if game == "bandit" else env.is_won for env in made]
    assert 0.05 < sum(won) / len(won) < 0.95


def test_sums_of_three_numbers_have_their_values():
    found = script_of("countdown")["sums"]([2, 7, 4])
    assert {text: eval(text) for text in found} == found  # digits, + and -
    assert found["7 - 4 + 2"] == 5 and found["4 + 2 - 7"] == -1 and len(found) == 8


def test_the_report_makes_each_thing_once_and_shows_success_before_and_after(tmp_path, monkeypatch, capsys):
    report = runpy.run_path(str(RECIPES / "compare_runs.py"), run_name="report")
    commands = []

    def run(command, **settings):
        commands.append(command[1:])
        flags = dict(itertools.pairwise(command))
        folder = Path(flags.get("--output_dir") or flags["--out"])
        folder.mkdir(parents=True, exist_ok=True)
        if "eval" in command:
            success = 0.25 if "before" in folder.name else 0.5 + 0.25 * ("seed1" in str(folder))
            (folder / "evaluation.json").write_text(json.dumps({"success": success}))
        elif command[2] == "--out":
            (folder / "tokenizer_config.json").write_text("{}")
        else:
            history = [{"env/success": value} for value in (0.25, 0.5)]
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))

    monkeypatch.setattr(subprocess, "run", run)
    flags = ["games", "--only", "bandit", "--seeds", "0", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *flags])
    report["main"]()
    assert "| bandit grpo | 0.250 | 0.500, 0.750 | 0.625 | 0.375 | 0 |" in capsys.readouterr().out
    assert len(commands) == 1 + 2 * (1 + 2 * 2)  # one cold start; for each algorithm before, and two seeds
    for command in commands[1:]:
        flags = command[command.index("--config") :]
        assert len(flags) % 2 == 0 and all(flag.startswith("--") for flag in flags[::2])
    report["main"]()
    assert len(commands) == 11
