"""Why an advantage is what it is: the words against the estimators themselves."""

from pathlib import Path

import pytest
import torch

from agent_r1_trl.advantages import compute_group_advantages, compute_rloo_advantages
from agent_r1_trl.recording import Record, TrajectoryStore, read_records
from agent_r1_trl.recording.reasons import explain_advantage, groups_of
from agent_r1_trl.trajectory import StopReason, Turn
from tests.recording.examples import two_turns

RETURNS = [1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 2.0, 2.0]


def played(advantages, returns=RETURNS, estimator="grpo", scale="group"):
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
    return explain_advantage(records[index], groups_of(records)[index], [item.trajectory for item in records])


def estimated(estimator, scale):
    returns, groups = torch.tensor(RETURNS), torch.arange(8) // 4
    if estimator == "rloo":
        return compute_rloo_advantages(returns, groups).tolist()
    return compute_group_advantages(returns, groups, scale=scale or "none").tolist()


@pytest.mark.parametrize(
    ("estimator", "scale", "first"),
    [
        ("grpo", "group", "advantage +1.500 = (return +1.000 - mean +0.250) / (std 0.500 + 1e-4)"),
        ("grpo", "batch", "advantage +0.666 = (return +1.000 - mean +0.250) / (batch std 1.126 + 1e-4)"),
        ("grpo", "none", "advantage +0.750 = return +1.000 - mean +0.250"),
        ("dr_grpo", None, "advantage +0.750 = return +1.000 - mean +0.250"),
        ("rloo", None, "advantage +1.000 = return +1.000 - mean of the others +0.000"),
    ],
)
def test_the_formula_is_that_of_the_estimator(estimator, scale, first):
    records = played(estimated(estimator, scale), estimator=estimator, scale=scale)
    lines = explain(records, 0).splitlines()
    assert lines[0] == first
    how = f"{estimator}, scale_rewards {scale}" if scale else estimator
    assert lines[1] == f"group of 4: +1.000 (this), +0.000, +0.000, +0.000; {how}"
    assert all(" = " in explain(records, index) for index in range(8))


def test_a_formula_that_does_not_give_the_recorded_number_is_not_shown():
    records = played([0.9] * 8)  # weights of rewards, or another batch
    assert explain(records, 0).splitlines()[0] == "advantage +0.900"
    for name in ("gae", "turn_grpo", None):
        records = played(estimated("grpo", "group"), estimator=name, scale=None)
        lines = explain(records, 0).splitlines()
        assert lines[0] == "advantage +1.500"
        assert lines[1].endswith(f"+0.000; {name or 'estimator not recorded'}")
    assert explain(played([0.3], [1.0], "gae", None), 0) == "advantage +0.300\nreturn +1.000; gae"
    records[0].trajectory.advantages[0] = 1.0
    assert explain(records, 0).startswith("advantages +1.000 to +1.500\n")


ZEROS = {
    "equal returns": ({}, "the returns of its group are equal"),
    "a failure": ({"stop_reason": StopReason.TOOL_FAILURE}, "tool_failure, so it does not count"),
    "unscored": ({"is_scored": False}, "nothing scored it, so"),
    "left alone": ({"is_group_too_small": True}, "too few of its group are left"),
    "replaced": ({"is_replaced": True}, "not trained on; its group taught nothing"),
}


@pytest.mark.parametrize(("changes", "reason"), ZEROS.values(), ids=ZEROS)
def test_a_zero_has_its_reason(changes, reason):
    records = played([0.0] * 4, [1.0] * 4)
    for name, value in changes.items():
        setattr(records[0].trajectory, name, value)
    assert explain(records, 0).startswith(f"advantage 0: {reason}")


def test_a_truncated_trajectory_that_is_not_trained_on_says_so_and_failed_mates_have_no_return():
    numbers = compute_group_advantages(torch.tensor([1.0, 0.0, float("nan"), 0.0]), torch.zeros(4).long()).tolist()
    records = played([0.0, *numbers[1:]], [1.0, 0.0, 0.0, 0.0])
    records[0].trajectory.stop_reason = StopReason.MAX_TURNS
    records[2].trajectory.stop_reason = StopReason.TOOL_FAILURE
    assert explain(records, 0).splitlines() == [
        "advantage 0: cut by max_turns, and such trajectories are not trained on",
        "group of 4: +1.000 (this), +0.000, none (tool_failure), +0.000; grpo, scale_rewards group",
    ]
    assert " = " in explain(records, 1)


def test_an_example_that_was_drawn_twice_has_two_groups():
    records = played([0.0] * 8, [1.0] * 4 + [2.0] * 4)
    for record in records:
        record.trajectory.example_id = "same"
    assert [[item.total_reward for item in group] for group in groups_of(records)] == [[1.0] * 4] * 4 + [[2.0] * 4] * 4


def test_evaluations_and_untrained_trajectories_are_not_explained():
    records = played([0.0] * 4, [1.0] * 4)
    records[0].split, records[1].trajectory.advantages = "eval", None
    assert explain(records, 0) == explain(records, 1) == ""
    bare = records[2].trajectory
    bare.turns, bare.action_mask = [Turn(start=0, end=0, message={})], [0] * 8
    assert explain(records, 2).startswith("advantage 0: nothing was sampled")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_estimator_is_recorded_with_what_was_trained_on(tmp_path, format):
    store = TrajectoryStore(tmp_path, format, credit={"estimator": "grpo", "scale": "batch"})
    store.write(1, [two_turns()])
    store.write(1, [two_turns()], split="eval")
    assert [(item.estimator, item.scale) for item in read_records(tmp_path)] == [("grpo", "batch"), (None, None)]
