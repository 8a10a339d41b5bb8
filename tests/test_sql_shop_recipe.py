"""recipes/sql_shop: the shop, its questions, and the function that demonstrates them."""

import json
import random
import sys
from pathlib import Path

import pytest

from agent_r1_trl import check_env
from agent_r1_trl.objects import import_object
from agent_r1_trl.testing import call, roll_out, say

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sql_shop"


def rows(name):
    return [json.loads(line) for line in (RECIPE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def shop():
    return import_object(f"{RECIPE / 'env.py'}:ShopEnv", "env")


@pytest.fixture
def demonstrate(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    yield import_object(f"{RECIPE / 'demonstrate.py'}:demonstrate", "function")
    sys.modules.pop("env", None)


@pytest.mark.parametrize("name", ["demonstrations", "train", "test"])
def test_every_question_is_answered_by_its_careful_demonstration(shop, demonstrate, name):
    listed = rows(name)
    turns = [demonstrate(row, random.Random(0), 0.0) for row in listed]
    done = roll_out(shop, lambda request: turns[request.trajectory_seed][request.turn], listed)
    assert [item.outcome_reward for item in done] == [1.0] * len(listed)
    assert {row["kind"] for row in listed} == {"price", "city", "ordered", "price of order", "stock of order"}
    assert {len(item.tool_results) for item in done} == {1, 2}


def test_a_hasty_demonstration_of_two_calls_earns_nothing(shop, demonstrate):
    listed = [row for row in rows("train") if row["kind"].endswith("of order")][:8]
    turns = [demonstrate(row, random.Random(0), 1.0) for row in listed]
    done = roll_out(shop, lambda request: turns[request.trajectory_seed][request.turn], listed)
    assert [(item.outcome_reward, len(item.tool_results)) for item in done] == [(0.0, 1)] * 8


def test_held_out_questions_name_no_one_and_nothing_of_the_others():
    seen = {row["name"] for name in ("demonstrations", "train") for row in rows(name)}
    assert not seen & {row["name"] for row in rows("test")}
    questions = [row["question"] for name in ("demonstrations", "train", "test") for row in rows(name)]
    assert len(set(questions)) == len(questions) == 700


def test_the_data_are_those_of_the_script(tmp_path, monkeypatch):
    script = RECIPE / "make_data.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path)])
    import_object(f"{script}:main", "script")()
    for path in sorted((RECIPE / "data").iterdir()):
        assert (tmp_path / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path.name


def test_what_is_not_there_is_said_and_the_linter_has_nothing_to_say(shop):
    (trajectory,) = roll_out(shop, [call("product", name="x'; DROP TABLE products;"), say("?")], rows("test")[:1])
    assert trajectory.tool_results[0].content == "Nothing found." and trajectory.outcome_reward == 0.0
    assert [finding for finding in check_env(shop, rows("test")[:3]) if finding.level != "ok"] == []
