"""Why an advantage is what it is, in words."""

from pathlib import Path

from agent_r1_trl.recording import Record
from agent_r1_trl.recording.reasons import explain_advantage, groups_of
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import two_turns

RETURNS = [1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 2.0, 2.0]


def rolled_out(advantages, returns=RETURNS, estimator="grpo", scale="group"):
    """Records of groups of four with these returns and one advantage each."""
    return [
        Record(
            trajectory=two_turns(
                outcome_reward=value + 0.1,  # the turn has earned -0.1
                advantages=[number * mask for mask in (1, 1, 0, 0, 0, 0, 1, 1)],
                example_id=f"q/{index // 4}",
                generation=index % 4,
            ),
            step=1, split="train", rank=0, index=index, path=Path("x"), estimator=estimator, scale=scale,
        )
        for index, (value, number) in enumerate(zip(returns, advantages, strict=True))
    ]  # fmt: skip


def explain(records, index):
    return explain_advantage(records[index], groups_of(records)[index])


def test_the_returns_of_the_group_and_the_estimator_are_named():
    records = rolled_out([1.5, -0.5, -0.5, -0.5] * 2)
    assert explain(records, 0) == "group of 4: +1.000 (this), +0.000, +0.000, +0.000; grpo, scale_rewards group"
    assert explain(rolled_out([0.3], [1.0], None, None), 0) == "return +1.000; estimator not recorded"
    records[1].trajectory.stop_reason, records[0].trajectory.is_replaced = StopReason.TOOL_FAILURE, True
    records[1].trajectory.is_replaced = True
    assert explain(records, 0).startswith("group of 2: +1.000 (this), none (tool_failure); ")
    assert explain(records, 0).endswith("so not trained on")


def test_an_example_that_was_drawn_twice_has_two_groups():
    records = rolled_out([0.0] * 8, [1.0] * 4 + [2.0] * 4)
    for record in records:
        record.trajectory.example_id = "same"
    assert [[item.total_reward for item in group] for group in groups_of(records)] == [[1.0] * 4] * 4 + [[2.0] * 4] * 4


def test_evaluations_and_untrained_trajectories_are_not_explained():
    records = rolled_out([0.0] * 4, [1.0] * 4)
    records[0].split, records[1].trajectory.advantages = "eval", None
    assert explain(records, 0) == explain(records, 1) == ""
