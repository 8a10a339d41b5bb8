"""The doctor's trial: shares of valid calls and of success, and groups whose rewards differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.features.doctor.command_trial import report_start, spaced
from agent_r1_trl.features.doctor.report import Report
from agent_r1_trl.testing import AddEnv, call, roll_out, say

RIGHT, WRONG = [call("add", a=2, b=3), say("even")], [call("add", a=2, b=3), say("odd")]
BROKEN = [call("add", a="two"), call("add", b=3), say("odd")]


def start_of(groups):
    """The findings of a start in which each trajectory says one of the scripts: check -> (level, message, fix)."""
    scripts = [script for group in groups for script in group]
    rows = [{"prompt": "What is 2 + 3?"}] * len(scripts)
    trajectories = roll_out(AddEnv, lambda request: scripts[request.trajectory_seed][request.turn], rows)
    for item in trajectories:
        item.info["success"] = float(item.outcome_reward > 0)
    report = Report()
    report_start(report, trajectories, group_size=len(groups[0]), temperature=1.0)
    return {finding.check: (finding.level, finding.message, finding.fix) for finding in report.findings}


def test_a_start_to_work_with_is_said_in_shares():
    found = start_of([[RIGHT, WRONG], [WRONG, WRONG], [RIGHT, BROKEN]])
    assert {level for level, _, _ in found.values()} == {"ok"}
    assert "71% of 7 calls are valid, 1.2 a trajectory" in found["calls"][1]
    assert "33% of 6 trajectories at temperature 1 are solved" in found["success"][1]
    assert "2 of 3 groups have differing rewards: GRPO has something to work with" in found["groups"][1]


def test_a_model_that_never_succeeds_is_to_be_warmed_up():
    found = start_of([[BROKEN, BROKEN], [BROKEN, BROKEN]])
    assert "33%" not in found["calls"][1] and "0% of 8 calls are valid" in found["calls"][1]
    assert "0% of 4 trajectories" in found["success"][1] and "0 of 2 groups" in found["groups"][1]
    for check in ("calls", "success", "groups"):
        level, _, fix = found[check]
        assert level == "warning" and "demonstrations (docs/warm-up.md)" in fix, check


def test_rows_that_are_all_solved_are_to_be_harder():
    found = start_of([[RIGHT, RIGHT], [RIGHT, RIGHT]])
    assert found["success"][0] == "ok" and found["groups"][0] == "warning"
    assert "Take harder rows" in found["groups"][2]


def test_answers_without_a_call_are_said():
    assert "No call in 2 trajectories" in start_of([[[say("odd")], [say("even")]]])["calls"][1]


def test_as_many_rows_are_taken_as_asked_for():
    assert spaced(150, 24) == [0, 6, 12, 18, 25, 31, 37, 43, 50, 56, 62, 68, 75, 81, 87, 93, 100, 106, 112, 118, 125,
                               131, 137, 143]  # fmt: skip
    assert spaced(3, 3) == spaced(3, 16) == [0, 1, 2]


@pytest.mark.slow
def test_the_command_samples_rows_of_the_recipe_with_its_rewards(recipe, capsys):
    Path("policy.py").write_text(
        "from agent_r1_trl.testing import ScriptedPolicy, chat_of, say\n"
        "policy = ScriptedPolicy(lambda request: say('a' * (1 + request.index % 2)), chat_of('qwen2_5'))\n"
    )
    path = recipe(generator="policy.py:policy", reward_funcs=["task.py:word_count_reward"])
    assert main(["doctor", "--config", path, "--num_prompts", "2"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    # Two of four rows; one word of text and a bonus of 1 for an odd length.
    assert "of 4 trajectories at temperature 1 are solved; their mean reward is 1.5" in words
    assert "2 of 2 groups have differing rewards" in words, words[-900:]
    assert not Path("out").exists()


def test_rows_without_a_recipe_or_a_data_set_are_refused(recipe, refusal, model_folder):
    assert "--num_prompts" in refusal("doctor", "--model", str(model_folder), "--num_prompts", "2")
    path = recipe(dataset_name=None)
    assert "names no data set" in refusal("doctor", "--config", path, "--num_prompts", "2")
