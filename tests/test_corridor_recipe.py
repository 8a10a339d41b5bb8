"""recipes/corridor: the game, its settings and its demonstrations."""

import asyncio
import random
import runpy
from pathlib import Path

import pytest
import yaml

from agent_r1_trl.cli.train import read_arguments
from agent_r1_trl.objects import import_object
from agent_r1_trl.rollout.summaries import HEADING
from tests.environments.helpers import finished

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "corridor"
CONFIGS = {algo: RECIPE / algo / "config_cpu.yaml" for algo in ("grpo", "ppo")}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The recipe names its files from here, and its script puts this folder on the path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPE.parent))


@pytest.fixture(scope="module")
def env_class():
    return import_object(f"{RECIPE / 'env.py'}:CorridorEnv", "env")


def open_door(env, name):
    return asyncio.run(env.step({"role": "assistant", "content": f"<answer>{name}</answer>"}))


def success(env):
    trajectory = finished("")
    reward, _ = env.outcome_reward(trajectory)
    assert trajectory.info["rooms"] == env.rooms
    return reward, trajectory.info["success"]


def test_the_lit_door_leads_on(env_class):
    env = env_class(max_actions=3)
    messages = env.reset({"level": "Ahead Right Left"})
    assert messages[-1]["content"] == "Room 1: Left dark Ahead lit Right dark"
    first = open_door(env, "Ahead")
    assert first.observations[0]["content"] == "Room 2: Left dark Ahead dark Right lit"
    assert first.reward == pytest.approx(1 / 3) and not first.done
    second, third = open_door(env, "right"), open_door(env, "Left")
    assert not second.done and third.done and third.reward == pytest.approx(1 / 3)
    assert success(env) == (1.0, 1.0)


def test_a_dark_door_ends_the_game_and_no_door_does_not(env_class):
    env = env_class()
    env.reset({"seed": 3})
    start = env.describe()
    assert not open_door(env, "Up").done and env.describe() == start
    passed = [open_door(env, env.lit_door) for _ in range(7)]
    assert not any(step.done for step in passed) and env.rooms == 7
    end = open_door(env, next(door for door in env.actions if door != env.lit_door))
    assert end.done and end.reward == 0 and success(env) == (0.0, 0.0)


def test_levels_differ_and_each_door_is_lit_in_a_third_of_the_rooms(env_class):
    levels = [env_class().new_level(seed) for seed in range(100)]
    assert levels == [env_class().new_level(seed) for seed in range(100)] and len(set(levels)) == 100
    doors = " ".join(levels).split()
    assert len(doors) == 3000 and all(0.3 < doors.count(door) / 3000 < 0.37 for door in env_class.actions)


@pytest.mark.parametrize("level", ["", "Left", "Left Up", "Left Ahead Right"])
def test_a_level_that_is_no_corridor_of_this_length_is_refused(env_class, level):
    with pytest.raises(ValueError, match="max_actions=2"):
        env_class(max_actions=2).reset({"level": level})


@pytest.mark.parametrize("algo", CONFIGS)
def test_the_settings_are_accepted(algo):
    script, args, model = read_arguments(["--config", str(CONFIGS[algo])])
    assert args.output_dir == f"outputs/corridor/{algo}" and model.model_name_or_path == "outputs/corridor/start"
    assert script.env_kwargs == yaml.safe_load(CONFIGS["grpo"].read_text(encoding="utf-8"))["env_kwargs"]


def script():
    return runpy.run_path(str(RECIPE / "make_cold_start.py"), run_name="corridor")


def walk(rng):
    """A walk of the player who always looks, and the script."""
    from tiny_model import play, read_env

    made = script()
    return play(read_env(CONFIGS["grpo"]), made["say"], rng), made


def test_the_demonstrator_opens_a_dark_door_now_and_then():
    rng = random.Random(0)
    whole, made = walk(rng)
    assert len(whole) == 1 + 2 * 30 and whole[-2]["content"].startswith("Room 30: ")
    spoiled = [made["spoiled"](whole, rng) for _ in range(40)]
    same = [game[i] == whole[i] for game in spoiled for i in range(2, len(whole), 2)]
    assert 0.86 < sum(same) / len(same) < 0.92
    assert all(game[i] == whole[i] for game in spoiled for i in (0, *range(1, len(whole), 2)))


def test_the_demonstrations_have_the_contexts_of_each_policy():
    rng = random.Random(0)
    whole, made = walk(rng)
    in_context, room_name = made["in_context"], made["room_name"]
    assert in_context(whole, "keep", rng) == whole
    for _ in range(20):
        window = in_context(whole, "window", rng)
        begin = whole.index(window[3]) - 1
        assert window == [*whole[:2], *whole[begin : begin + len(window) - 2]] and window[2] == whole[2]
    written = [in_context(whole, "summarise", rng) for _ in range(40)]
    asked = [game for game in written if game[-2]["content"] == "Where are you?"]
    gone_on = [game for game in written if HEADING in game[1]["content"]]
    assert len(asked) > 5 and all(game[-1]["content"] == room_name(game[-3]) for game in asked)
    assert len(gone_on) > 5
    for game in gone_on:
        assert game[1]["content"] == f"{whole[1]['content']}\n\n{HEADING}{room_name(game[3])}" and game[2] == whole[2]
    assert room_name({"content": "Room 12: Left dark Ahead lit Right dark"}) == "Room 12"


def test_the_game_is_longer_than_the_context_and_a_cut_context_is_not():
    """The recipe's claim, with the tokenizer that its script makes."""
    from tiny_model import encode, make_tokenizer

    rng = random.Random(0)
    whole, made = walk(rng)
    context = 512
    tokenizer = make_tokenizer([f"{item['role']}\n{item['content']}" for item in whole], 400, context)
    assert len(encode(tokenizer, whole)[0]) > 1.2 * context
    recipe = yaml.safe_load(CONFIGS["grpo"].read_text(encoding="utf-8"))
    pieces = [made["in_context"](whole, kind, rng) for kind in ("window", "summarise") for _ in range(20)]
    lengths = [len(encode(tokenizer, piece)[0]) for piece in pieces]
    assert 0.9 * recipe["context"]["tokens"] < max(lengths) < context
