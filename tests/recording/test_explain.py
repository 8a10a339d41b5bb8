"""Why an advantage is what it is: sums by hand, and what cannot be explained."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from agent_r1_trl.advantages.estimators import ESTIMATORS, Credit, Estimator
from agent_r1_trl.recording import Record
from agent_r1_trl.recording.explain import describe, explain, explain_group
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import two_turns

RETURNS = [1.0, 0.0, 0.0, 3.0]
STEP = {
    "step": 1, "first_group": 0, "process_weight": 1.0, "outcome_weight": 1.0, "has_parts": False,
    "source_scales": {}, "kl_in_reward": 0.0, "advantage_mask": True, "truncated_trajectories": "keep",
    "whitening": None,
}  # fmt: skip


def rolled_out(advantages, estimator="grpo", scale="group", returns=RETURNS):
    """Records of a group with these returns; the first turn of two tokens has earned -0.1, the second nothing."""
    return [
        Record(
            trajectory=two_turns(
                outcome_reward=value + 0.1,
                advantages=[number * mask for mask in (1, 1, 0, 0, 0, 0, 1, 1)],
                stop_reason=StopReason.DONE,
                generation=index,
            ),
            step=1, split="train", rank=0, index=index, path=Path("x"), estimator=estimator, scale=scale, group=7,
        )
        for index, (value, number) in enumerate(zip(returns, advantages, strict=True))
    ]  # fmt: skip


def step(**facts):
    return {"rollouts": [STEP | {"whitening": {"mean": 99.0, "std": 99.0}}, STEP | facts, STEP | {"first_group": 8}]}


CENTRED = [0.0, -1.0, -1.0, 2.0]
NORMALISED = [x / (2**0.5 + 1e-4) for x in CENTRED]


def near(number):
    return pytest.approx(number, abs=1e-6)


def test_the_sum_of_a_group_is_that_of_the_paper():
    records = rolled_out(NORMALISED)
    for index, advantage in enumerate(NORMALISED):
        found = explain(records[index], records, step(scale="group"))
        assert found.lines == [
            ("turn rewards", near(-0.1)),
            ("+ outcome", near(RETURNS[index] + 0.1)),
            ("= R", near(RETURNS[index])),
            ("- mean of its group of 4", near(1.0)),
            ("/ (std of its group + 0.0001)", near(2**0.5 + 1e-4)),
            ("= advantage", near(advantage)),
        ]
        assert found.advantages == near([advantage * mask for mask in records[index].trajectory.action_mask])
        assert found.max_gap < 1e-6 and found.at(0) == [] == found.at(2)
    assert explain_group(records, step(scale="group"))[index] == found


def test_the_sums_of_each_token_are_those_of_gae():
    advantages = [0.695075, 0.868160, 0.0, 0.0, 0.0, 0.0, 0.428, 0.4]
    (record,) = rolled_out([0.0], "gae", None, [0.9])
    record.trajectory.turns[0].reward, record.trajectory.advantages = 0.5, advantages
    record.columns = {"value": np.array([0.2, 0.3, 0.4, 0.6], dtype=np.float32)}
    found = explain(record, [record], step(gamma=0.9, lam=0.8))
    assert found.lines == [] and found.max_gap < 1e-6
    assert found.at(1) == [
        ("reward of the token", near(0.5)),
        ("+ 0.9 * value of the next token", near(0.36)),
        ("- value", near(0.3)),
        ("+ 0.9 * 0.8 * raw advantage of the next token", near(0.72 * 0.428)),
        ("= advantage", near(0.86816)),
    ]
    whitened = step(gamma=0.9, lam=0.8, whitening={"mean": 0.5, "std": 2.0})
    found = explain(record, [record], whitened)
    assert found.at(1)[-4:] == [
        ("= raw advantage", near(0.86816)),
        ("- mean of all tokens of the step", 0.5),
        ("/ std of all tokens of the step", 2.0),
        ("= advantage", near(0.18408)),
    ]
    assert found.max_gap == near(0.86816 - 0.18408), "they were recorded as they are without whitening"
    record.columns = {}
    assert explain(record, [record], whitened) is None, "without the critic's values"


def test_a_difference_from_the_record_is_measured_and_said():
    records = rolled_out(NORMALISED)
    records[3].trajectory.advantages[6] += 0.25
    assert explain(records[3], records, step(scale="group")).max_gap == near(0.25)
    assert "the largest difference is 0.25" in describe(records[3], records, step(scale="group"))
    assert "difference" not in describe(records[2], records, step(scale="group"))


def test_a_trajectory_outside_loss_or_baseline_is_told_why_it_has_nothing():
    records = rolled_out([1.0, -1.0, 0.0, 0.0], "dr_grpo", None, [2.0, 0.0, 5.0, 1.0])
    records[2].trajectory.stop_reason = StopReason.TOOL_FAILURE
    records[3].trajectory.stop_reason = StopReason.MAX_TURNS
    facts = step(truncated_trajectories="mask")
    found = explain_group(records, facts)
    assert [item.max_gap for item in found] == near([0.0] * 4), "the mean is 1, of three"
    assert found[2].lines == [("advantage, as tool_failure is not the policy's doing", 0.0)]
    assert found[3].lines == [("advantage, as limits ended it", 0.0)]
    assert explain(records[3], records, step()).lines[-1] == ("= advantage", near(0.0)), "it is the mean"


def test_what_is_not_known_is_not_explained():
    records = rolled_out(NORMALISED)
    facts = step(scale="group")
    assert explain(records[0], records, None) is None and explain(records[0], records, {}) is None
    others = rolled_out(NORMALISED, "my_package.my_estimator")
    assert explain(others[0], others, facts) is None
    assert describe(others[0], others, facts).endswith("\nrecorded advantage; no explanation")
    without = Estimator(name="my_package.my_estimator", compute=lambda inputs: Credit(advantages=inputs.returns))
    assert explain(others[0], others, facts, without) is None
    own = dataclasses.replace(without, explain=lambda inputs, row: [("R", inputs.returns[row])])
    assert explain(others[3], others, facts, own).lines == [("R", near(3.0)), ("= advantage", near(3.0))]
    for changed in ({"split": "eval"}, {"group": None}):
        records = [dataclasses.replace(record, **changed) for record in rolled_out(NORMALISED)]
        assert explain(records[0], records, facts) is None, changed
    records = rolled_out(NORMALISED)
    records[0].trajectory.advantages = None
    assert explain(records[0], records, facts) is None and describe(records[0], records, facts) == ""


def test_the_terminal_names_the_returns_of_the_group_and_shows_the_sum():
    records = [*rolled_out(NORMALISED), dataclasses.replace(rolled_out(NORMALISED)[0], group=8)]
    records[1].trajectory.stop_reason = StopReason.TOOL_FAILURE
    first, *lines = describe(records[0], records, step(scale="group")).splitlines()
    assert first == "group of 4: +1.000 (this), none (tool_failure), +0.000, +3.000; grpo, scale_rewards group"
    assert lines[2:4] == ["  =          1  R", "  -      1.333  mean of its group of 3"]
    assert describe(records[4], records, None).startswith("return +1.000; grpo")
    records[0].trajectory.is_replaced, records[0].trajectory.advantages = True, None
    assert describe(records[0], records, None).endswith("so not trained on")


def test_estimators_of_the_package_have_an_explanation_but_two():
    assert [row.name for row in ESTIMATORS.values() if row.explain is None] == ["bilevel_gae", "step_gae"]
