"""Why an advantage is what it is, in words."""

from pathlib import Path

import pytest

from agent_r1_trl.recording import Record
from agent_r1_trl.recording.reasons import explain_advantage, groups_of
from agent_r1_trl.trajectory import StopReason, Turn
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
    lines = "group of 4: +1.000 (this), +0.000, +0.000, +0.000; grpo, scale_rewards group"
    assert explain(records, 0) == f"advantage +1.500\n{lines}"
    assert (
        explain(rolled_out([0.3], [1.0], None, None), 0) == "advantage +0.300\nreturn +1.000; estimator not recorded"
    )
    records[0].trajectory.advantages[0] = 1.0
    assert explain(records, 0).startswith("advantages +1.000 to +1.500\n")
    records[1].trajectory.stop_reason = StopReason.TOOL_FAILURE
    assert "(this), none (tool_failure), +0.000" in explain(records, 0)


ZEROS = {
    "equal returns": ({}, "the returns of its group are equal"),
    "a failure": ({"stop_reason": StopReason.TOOL_FAILURE}, "tool_failure, so it does not count"),
    "unscored": ({"is_scored": False}, "nothing scored it, so"),
    "left alone": ({"is_group_too_small": True}, "too few of its group are left"),
    "replaced": ({"is_replaced": True}, "not trained on; its group taught nothing"),
}


@pytest.mark.parametrize(("changes", "reason"), ZEROS.values(), ids=ZEROS)
def test_a_zero_has_its_reason(changes, reason):
    records = rolled_out([0.0] * 4, [1.0] * 4)
    for name, value in changes.items():
        setattr(records[0].trajectory, name, value)
    assert explain(records, 0).startswith(f"advantage 0: {reason}")


def test_an_example_that_was_drawn_twice_has_two_groups():
    records = rolled_out([0.0] * 8, [1.0] * 4 + [2.0] * 4)
    for record in records:
        record.trajectory.example_id = "same"
    assert [[item.total_reward for item in group] for group in groups_of(records)] == [[1.0] * 4] * 4 + [[2.0] * 4] * 4


def test_evaluations_and_untrained_trajectories_are_not_explained():
    records = rolled_out([0.0] * 4, [1.0] * 4)
    records[0].split, records[1].trajectory.advantages = "eval", None
    assert explain(records, 0) == explain(records, 1) == ""
    bare = records[2].trajectory
    bare.turns, bare.action_mask = [Turn(start=0, end=0, message={})], [0] * 8
    assert explain(records, 2).startswith("advantage 0: nothing was sampled")
