"""The signals of a rollout, in numbers by hand."""

import math

import pytest

from agent_r1_trl.features.echo_trap import KEYS
from agent_r1_trl.features.echo_trap.feature import group_keys, rollout_signals, signal_record
from agent_r1_trl.trajectory import Author, StopReason, ToolCall, ToolResult, Trajectory, Turn


def rolled_out(reward, *turns, calls=0, stop=StopReason.DONE, **fields):
    """A trajectory whose turns sample these ids, with a token of the template between two turns."""
    ids, mask, turn_ids, found = [], [], [], []
    for number, sampled in enumerate(turns):
        if number:
            ids, mask, turn_ids = [*ids, 0], [*mask, 0], [*turn_ids, -1]
        found.append(Turn(start=len(ids), end=len(ids) + len(sampled), message={"role": "assistant", "content": ""}))
        ids, mask = [*ids, *sampled], [*mask, *[1] * len(sampled)]
        turn_ids = [*turn_ids, *[number] * len(sampled)]
    for _ in range(calls):
        found[0].tool_results.append(ToolResult(call=ToolCall(name="add", arguments={}), content="5"))
    return Trajectory(
        prompt_messages=[], prompt_ids=[1], completion_ids=ids, action_mask=mask, logprobs=[0.0] * len(ids),
        turn_ids=turn_ids, authors=[Author.POLICY if one else Author.TEMPLATE for one in mask], turns=found,
        stop_reason=stop, outcome_reward=reward, **fields,
    )  # fmt: skip


def signals(*trajectories, size=2):
    records = [signal_record(item) for item in trajectories]
    return rollout_signals(records, [place // size for place in range(len(records))])


def test_a_success_that_no_float_can_hold_is_none():
    assert signal_record(rolled_out(0.0, [1], info={"success": 10**400}))["success"] is None


def test_every_signal_of_two_groups_of_two():
    found = signals(
        rolled_out(1.0, [5, 6], [7], calls=1),
        rolled_out(0.0, [5, 6], [8, 9]),
        rolled_out(0.5, [3]),
        rolled_out(0.5, [4]),
    )
    assert {*found} <= KEYS
    assert found == pytest.approx(
        {
            "reward": 0.5, "reward_min": 0.0, "reward_max": 1.0,
            "inaction": 0.75, "return_with_call": 1.0, "return_without_call": 1 / 3,
            "reward_std": math.sqrt(0.5) / 2,  # sqrt(.5) and 0
            "zero_std_share": 0.5,
            "repetition": 2 / 6,  # both trajectories of the first group say 5 6
        }
    )  # fmt: skip


def test_a_move_in_a_game_that_is_played_in_text_is_an_action_like_a_tool_call():
    moved, idle = rolled_out(1.0, [5], info={"num_actions": 2.0}), rolled_out(0.0, [6], info={"num_actions": 0.0})
    found = signals(moved, idle, rolled_out(0.5, [7], calls=1), rolled_out(0.0, [8]))
    assert (found["inaction"], found["return_with_call"], found["return_without_call"]) == (0.5, 0.75, 0.0)


def test_infrastructure_failures_count_nowhere():
    healthy = [rolled_out(1.0, [5]), rolled_out(0.0, [6]), rolled_out(1.0, [7]), rolled_out(0.0, [8])]
    failed = rolled_out(0.0, [5], stop=StopReason.TOOL_FAILURE)
    assert signals(*healthy[:2], failed, failed, *healthy[2:]) == signals(*healthy)
    assert signals(failed, failed) == {}


def test_a_group_of_one_has_no_spread_and_says_nothing_twice():
    failed = rolled_out(0.0, [5], stop=StopReason.ENVIRONMENT_ERROR)
    found = signals(rolled_out(1.0, [5]), failed)
    assert not {"reward_std", "zero_std_share", "repetition"} & {*found}
    assert found["reward"] == 1.0


def test_the_penalty_for_truncation_is_no_part_of_the_raw_return():
    cut = rolled_out(0.5, [6], stop=StopReason.MAX_TURNS, truncation_penalty=-0.5)
    found = signals(rolled_out(1.0, [5]), cut)
    assert (found["reward"], found["reward_std"], found["zero_std_share"]) == (1.0, 0.0, 1.0)


def test_float_noise_is_no_spread():
    assert signals(rolled_out(0.1 + 0.2, [5]), rolled_out(0.3, [6]))["zero_std_share"] == 1.0


def test_a_trajectory_that_repeats_itself_alone_is_no_echo():
    found = signals(rolled_out(1.0, [5], [5], [5]), rolled_out(0.0, [6]))
    assert found["repetition"] == 0.0
    found = signals(rolled_out(1.0, [5], [5], [5]), rolled_out(0.0, [5]))
    assert found["repetition"] == 1.0


def test_success_is_what_environments_report():
    found = signals(rolled_out(0.0, [5], info={"success": True}), rolled_out(0.0, [6], info={"success": 0.0}))
    assert found["success"] == 0.5
    assert "success" not in signals(rolled_out(0.0, [5], info={"success": "yes"}), rolled_out(0.0, [6]))


def test_the_groups_of_replaced_trajectories_are_found_by_example_and_number():
    members = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("a", 1)]
    keys = group_keys([{"example_id": name, "generation": number} for name, number in members])
    assert keys == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("a", 1), ("a", 1)]
