"""recipes/error_messages: a judge in place of a gold answer, and how far it agrees with people."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1_trl.cli import main
from agent_r1_trl.recording import read_records
from agent_r1_trl.testing import judge_server
from agent_r1_trl.testing.judge import parts_of, texts_of
from tests.hosted import error

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "error_messages"
SETTINGS = yaml.safe_load((RECIPE / "grpo" / "config.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def agreement():
    return runpy.run_path(str(RECIPE / "agreement.py"), run_name="agreement")


def judge_options(url, **changes):
    return {"JudgeReward": SETTINGS["reward_options"]["JudgeReward"] | {"url": url, "model": "gpt"} | changes}


def test_tau_is_kendalls_with_ties_and_says_nothing_without_an_order(agreement):
    tau = agreement["kendall_tau"]
    assert tau([1, 2, 3], [10, 20, 30]) == 1.0 and tau([3, 2, 1], [10, 20, 30]) == -1.0
    assert tau([1, 3, 2, 4], [1, 2, 3, 4]) == pytest.approx((5 - 1) / 6)
    assert tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert math.isnan(tau([1, 1], [1, 2]))


def test_the_script_compares_the_judge_with_the_grades_and_with_itself(agreement, tmp_path, monkeypatch, capsys):
    lines = (RECIPE / "data" / "graded.jsonl").read_text(encoding="utf-8").splitlines()
    grades = {row["text"]: row["grade"] for row in map(json.loads, lines)}
    with judge_server() as (url, seen):

        def answer(body, number):
            scores = [grades[text] if body["seed"] == 1 else 5 - grades[text] for text in texts_of(body)]
            return 200, {"choices": [{"message": {"content": json.dumps({"reason": "", "scores": scores})}}]}

        seen.respond = answer
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({"reward_options": judge_options(url, cache=str(tmp_path / "x" / "c"))}))
        monkeypatch.setattr(sys, "argv", ["agreement.py", "--config", str(config)])
        agreement["main"]()
        assert len(seen.bodies) == 2 * 6 and not any("grade" in parts_of(body) for body in seen.bodies)
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert found == {"tau": "1.000", "flips": "1.000", "groups": "6", "without_order": "0", "failed": "0"}


def train(url):
    """The exit code of one small step of the recipe."""
    small = SETTINGS | {
        "model_name_or_path": str(ROOT / "recipes/quickstart/model"),
        "dataset_name": str(RECIPE / "data" / "train.jsonl"), "reward_options": judge_options(url, cache="judge"),
        "use_vllm": False, "use_cpu": True, "bf16": False, "max_steps": 1, "max_completion_length": 24,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4,
        "gradient_checkpointing": False, "output_dir": "out", "save_strategy": "no",
    }  # fmt: skip
    small = {name: value for name, value in small.items() if not name.startswith("vllm_")}
    Path("config.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    return main(["train", "--config", "config.yaml"])


def test_the_recipe_ends_at_once_if_its_judge_takes_no_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with judge_server(faults=[error(401, "wrong key")] * 9) as (url, _):
        assert train(url) == 3
    assert "All 8 trajectories were lost: 8 x not_scored: judge: HTTP 401: " in capsys.readouterr().err


def test_the_recipe_trains_on_what_its_judge_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with judge_server(lambda text: min(10, text.count("e"))) as (url, seen):
        assert train(url) == 0
    assert 1 <= len(seen.bodies) <= 2, "a request for each of two messages"
    log = json.loads(Path("out/trainer_state.json").read_text(encoding="utf-8"))["log_history"][0]
    assert log["judge/calls"] == len(seen.bodies) and log["judge/cost"] > 0 and log["rollout/unscored_share"] == 0
    records = [record.trajectory for record in read_records("out")]
    assert len(records) == 8
    earned = {min(10, text.count("e")) / 10 for body in seen.bodies for text in texts_of(body)}
    assert {round(item.total_reward, 6) for item in records} == earned  # they were float32
    assert all(item.total_reward == item.reward_parts["judge"] for item in records)
