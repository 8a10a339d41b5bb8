"""recipes/function_calling: the environment and its tasks."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from agent_r1_trl.objects import import_object
from tests.environments.helpers import finished

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "function_calling"


@pytest.fixture(scope="module")
def env_class():
    return import_object(f"{RECIPE / 'env.py'}:HomeEnv", "env")


@pytest.fixture(scope="module")
def draw_task():
    return import_object(f"{RECIPE / 'tasks.py'}:draw_task", "env")


def rows(name):
    return [json.loads(line) for line in (RECIPE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def turn(*calls):
    calls = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def outcome(env_class, row, turns):
    """Reward of the calls, turn by turn, and what the last turn was answered."""
    env, step = env_class(), None
    env.reset(row)
    for calls in turns:
        step = asyncio.run(env.step(turn(*calls)))
    trajectory = finished("Done.")
    reward = env.outcome_reward(trajectory)[0]
    assert trajectory.info["success"] == reward
    return reward, step


def test_every_task_is_won_by_its_solution_and_by_no_part_of_it(env_class, draw_task):
    rng = random.Random(3)
    kinds = set()
    for _ in range(60):
        row, turns = draw_task(rng)
        kinds.add(row["kind"])
        assert outcome(env_class, row, turns)[0] == 1.0
        changes = [call for calls in turns for call in calls if call[0] != "read_room"]
        values = {json.dumps(row["state"]), json.dumps(row["goal"])}
        if changes and len(values) == 2 and row["kind"] == "direct":
            assert outcome(env_class, row, [changes[:-1]])[0] == 0.0
    assert kinds == {"direct", "look first"}


def test_what_was_not_asked_for_loses_the_episode(env_class):
    row = next(row for row in rows("test") if row["kind"] == "direct")
    goal = row["goal"]
    calls = [("set_light", {"room": room, "on": devices["light"]}) for room, devices in goal.items()]
    calls += [("set_heating", {"room": room, "degrees": devices["heating"]}) for room, devices in goal.items()]
    assert outcome(env_class, row, [calls])[0] == 1.0
    room = next(iter(goal))
    assert outcome(env_class, row, [calls, [("set_light", {"room": room, "on": not goal[room]["light"]})]])[0] == 0.0


def test_calls_of_one_turn_are_answered_in_order_and_wrong_arguments_change_nothing(env_class):
    row = rows("test")[0]
    calls = [
        ("read_room", {"room": "hall"}),
        ("set_heating", {"room": "hall", "degrees": 99}),
        ("read_room", {"room": "moon"}),
    ]
    reward, step = outcome(env_class, row | {"goal": row["state"]}, [calls])
    first, *wrong = [item["content"] for item in step.observations]
    assert (
        first
        == f"hall: light {'on' if row['state']['hall']['light'] else 'off'}, heating {row['state']['hall']['heating']}"
    )
    assert all("rror" in text for text in wrong) and reward == 1.0


def test_two_episodes_share_no_house(env_class):
    row = rows("test")[0]
    before = json.dumps(row)
    first, second = env_class(), env_class()
    for env in (first, second):
        env.reset(row)
    asyncio.run(first.step(turn(("set_heating", {"room": "hall", "degrees": 5}))))
    assert second.state == row["state"] and json.dumps(row) == before


def test_no_task_is_in_both_files():
    train, test = ({json.dumps({**row, "id": ""}) for row in rows(name)} for name in ("train", "test"))
    assert len(train) == 1000 and len(test) == 200 and not train & test
