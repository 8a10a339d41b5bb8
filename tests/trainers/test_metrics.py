"""Logged numbers, computed by hand on three trajectories."""

import math

import pytest

from agent_r1_trl.trainers.metrics import rollout_metrics, trajectory_record
from agent_r1_trl.trajectory import Author, StopReason, ToolCall, ToolErrorKind, ToolResult, Trajectory, Turn

P, T, E = Author.POLICY, Author.TEMPLATE, Author.ENVIRONMENT


def result(name="search", error=None, latency_s=0.5):
    return ToolResult(call=ToolCall(name=name, arguments={}), content="x", error=error, latency_s=latency_s)


def trajectory(outcome, turn_rewards, results, stop=StopReason.DONE, **info):
    authors = [P, P, T, E, P] if len(turn_rewards) == 2 else [P, P]
    spans = [(0, 2), (4, 5)][: len(turn_rewards)]
    turns = [
        Turn(start=start, end=end, message={"role": "assistant", "content": ""}, reward=reward,
             reward_parts={"tool_call": reward}, tool_results=found, generate_s=1.0, env_s=0.25)
        for (start, end), reward, found in zip(spans, turn_rewards, results, strict=True)
    ]  # fmt: skip
    turn_ids = [-1] * len(authors)
    for index, (start, end) in enumerate(spans):
        turn_ids[start:end] = [index] * (end - start)
    return Trajectory(
        prompt_messages=[], prompt_ids=[1], completion_ids=[7] * len(authors), turn_ids=turn_ids, turns=turns,
        action_mask=[int(author is P) for author in authors], logprobs=[0.0] * len(authors), authors=authors,
        stop_reason=stop, outcome_reward=outcome, reward_parts={"answer": outcome}, info=info, duration_s=2.0,
    )  # fmt: skip


GROUP = [
    trajectory(1.0, [0.5, 0.0], [[result(latency_s=0.1), result("nope", ToolErrorKind.UNKNOWN_TOOL)], []], em=1.0),
    trajectory(-1.0, [0.5, 0.0], [[result(latency_s=0.3)], []], em=0, gold=["x"]),
    trajectory(0.0, [-0.1], [[result("", ToolErrorKind.MALFORMED)]], stop=StopReason.MAX_TURNS),
    trajectory(9.0, [0.0], [[]], stop=StopReason.ENVIRONMENT_ERROR),
]


@pytest.fixture
def metrics():
    return rollout_metrics([trajectory_record(item) for item in GROUP], num_generations=4)


def test_rewards_are_means_without_infrastructure_failures(metrics):
    assert metrics["reward/process"] == pytest.approx((0.5 + 0.5 - 0.1) / 3)
    assert metrics["reward/outcome"] == pytest.approx(0.0)
    assert metrics["reward_parts/answer"] == pytest.approx(0.0)
    assert metrics["reward_parts/tool_call"] == pytest.approx(0.9 / 3)


def test_group_spread_leaves_infrastructure_failures_out(metrics):
    rewards = [1.5, -0.5, -0.1]
    mean = sum(rewards) / 3
    assert metrics["group/reward_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / 2))
    assert metrics["group/zero_variance_share"] == 0.0


def test_tools_are_counted_per_trajectory_and_by_name(metrics):
    assert metrics["rollout/tool_calls"] == 4 / 4
    assert metrics["tools/search/calls"] == 2 / 4
    assert metrics["tools/search/latency_s"] == pytest.approx(0.2)
    assert metrics["tools/search/latency_max_s"] == 0.3
    assert metrics["tools/call_error_share"] == 2 / 4
    assert metrics["tools/call_errors/unknown_tool"] == 1 / 4
    assert metrics["tools/call_errors/malformed"] == 1 / 4
    assert not any("nope" in name for name in metrics), "a name the model made up is no metric"


def test_turns_tokens_and_stops(metrics):
    assert metrics["rollout/turns"] == (2 + 2 + 1 + 1) / 4
    assert metrics["tokens/policy"] == (3 + 3 + 2 + 2) / 4
    assert metrics["tokens/template"] == 2 / 4
    assert metrics["tokens/environment"] == 2 / 4
    assert metrics["stop/done"] == 0.5
    assert metrics["stop/max_turns"] == metrics["rollout/truncated_share"] == 0.25
    assert metrics["rollout/lost_share"] == 0.25
    assert sum(metrics[f"stop/{reason.value}"] for reason in StopReason) == 1.0
    assert metrics["time/generate_s"] == 1.5
    assert metrics["time/longest_trajectory_s"] == 2.0


def test_numbers_in_info_become_metrics_and_the_rest_does_not(metrics):
    assert metrics["env/em"] == 0.5
    assert "env/gold" not in metrics


def test_a_number_that_no_float_can_hold_and_a_name_that_is_no_text_end_no_run():
    item = trajectory(0.0, [0.0], [[]], **{"prediction": 10**400, "em": True})
    item.info[2] = 0.5
    metrics = rollout_metrics([trajectory_record(item)], num_generations=1)
    assert {name for name in metrics if name.startswith("env/")} == {"env/em", "env/2"}


def test_a_group_of_equal_rewards_has_no_variance():
    group = [trajectory(0.1 + 0.2, [0.0], [[]]), trajectory(0.3, [0.0], [[]])]
    metrics = rollout_metrics([trajectory_record(item) for item in group], num_generations=2)
    assert metrics["group/zero_variance_share"] == 1.0


def test_nothing_rolled_out_logs_nothing():
    assert rollout_metrics([], num_generations=4) == {}
