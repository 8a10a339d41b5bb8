"""What a reward function returns that is no reward is named with the function and the trajectory."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_r1_trl import InfrastructureError, StopReason
from agent_r1_trl.environments import RewardError, ToolEnv
from agent_r1_trl.environments.reward_values import finite_number
from agent_r1_trl.testing import say
from agent_r1_trl.trainers.rewards import RewardCalls, add_turn_rewards, wait_for
from tests.recording.examples import two_turns
from tests.trainers.helpers import make_trainer

NAN, INF = float("nan"), float("inf")


def trajectories_of(number, **fields):
    return [two_turns(example_id=f"q{index}", **fields) for index in range(number)]


def score(function, trajectories, num_missing=0, **columns):
    """The values that TRL gets of one function, after all ranks have said what they found."""
    trainer = SimpleNamespace(reward_funcs=[function], reward_func_names=[function.__name__])
    num_rows = len(trajectories) + num_missing
    calls = RewardCalls(trajectories, num_rows)
    columns = {name: [*column, *column[:num_missing]] for name, column in columns.items()}
    rows = {"completions": [[]] * num_rows, "trajectory": trajectories + trajectories[:num_missing], **columns}
    with calls.checked(trainer):
        values = wait_for(trainer.reward_funcs[0](**rows))
    assert trainer.reward_funcs == [function], "the functions are the user's again"
    calls.resolve(torch.zeros(len(trajectories), 1), [function], [function.__name__])
    return values


def test_a_run_logs_nothing_of_an_earlier_one_that_a_reward_function_has_ended(tmp_path):
    worth = iter([100.0])

    def paid(completions, log_metric, log_extra, **columns):
        log_metric("told", value := next(worth))
        log_extra("value", [value] * len(completions))
        return [value] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=[paid], max_steps=2, logging_steps=2)
    with pytest.raises(RewardError, match="StopIteration"):
        trainer.train()
    worth = iter([1.0, 3.0])
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "told" in entry)
    assert entry["told"] == entry["rewards/paid/mean"] == 2.0


def score_turns(function, trajectories, **columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return add_turn_rewards(trajectories, rows or [{}] * len(trajectories), [function], [1.0])


SETTINGS = {"reward_funcs": score, "turn_reward_funcs": score_turns}


def one_of_them(value):
    """A reward function that returns `value` for the third trajectory."""

    def scorer(completions, **columns):
        return [value if row == 2 else float(row) for row in range(len(completions))]

    return scorer


def test_what_is_no_reward_ends_a_run_before_it_trains(tmp_path):
    before = (trainer := make_trainer(tmp_path, reward_funcs=[one_of_them(INF)])).model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(
        ValueError, match=r"reward_funcs: scorer returned inf for Trajectory\(example_id='q\d', gen.*=2"
    ):
        trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("value", [INF, NAN, "1.5", 1e39])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_no_reward_is_named_with_the_function_and_the_trajectory(value, is_async):
    async def scorer(completions, **columns):
        return one_of_them(value)(completions)

    with pytest.raises(RewardError, match=r"reward_funcs: scorer returned .* for Trajectory\(example_id='q2'"):
        score(scorer if is_async else one_of_them(value), trajectories_of(4))


@pytest.mark.parametrize(
    ("returned", "said"),
    [(None, "None"), (1.0, "1.0"), ([1.0] * 7, "7 values"), ([1.0] * 9, "9 values"), ({"a": 1}, "{'a': 1}")],
    ids=repr,
)
def test_a_wrong_number_of_rewards_is_named(returned, said):
    def scorer(completions, **columns):
        return returned

    with pytest.raises(RewardError, match=f"reward_funcs: scorer returned {said} for 8 trajectories"):
        score(scorer, trajectories_of(8))


def test_rows_that_fill_up_a_call_are_not_seen_and_failures_earn_nothing():
    def length(completions, trajectory, **columns):
        return [NAN if item.stop_reason == "environment_error" else float(len(trajectory)) for item in trajectory]

    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
    assert score(length, [two_turns(), failed], num_missing=1) == [2.0, None, 0.0]
    assert score(one_of_them(1.0), [two_turns()]) == [0.0], "called without `trajectory`, which it does not take"


def plain(trajectory, **columns):
    return [float(json.loads(column)) for column in columns["row"]]


async def in_turn(trajectory, **columns):
    await asyncio.sleep(0)
    return plain(trajectory, **columns)


def drawn(trajectory, **columns):
    yield from plain(trajectory, **columns)


@pytest.mark.parametrize("function", [plain, in_turn, drawn])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_function_that_raises_is_named_with_its_line_and_the_example(setting, function):
    line = plain.__code__.co_firstlineno + 1
    said = (
        rf"{setting}: {function.__name__} raised JSONDecodeError: Expecting value: line 1 column 1 \(char 0\) "
        rf"\(.*test_reward_calls\.py, line {line}\)\. Correct the function\. It was in example 'q1', generation 3\.$"
    )
    with pytest.raises(RewardError, match=said) as caught:
        SETTINGS[setting](function, trajectories_of(4), row=["2", "none", "2", "2"])
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_function_that_asks_for_a_column_that_is_not_there_reads_which_there_are(setting):
    def mine(trajectory, gold, **columns): ...

    said = rf"{setting}: mine cannot be called: .*mine\(\) missing 1 .*'gold'\. It gets .*id, trajectory"
    with pytest.raises(RewardError, match=said):
        SETTINGS[setting](mine, trajectories_of(2), id=["a", "b"])


def test_a_function_that_raises_for_no_trajectory_alone_says_so():
    def mine(completions, **columns):
        return [1 / (1 - len(completions) // 8)] * len(completions)

    with pytest.raises(RewardError, match="It was called for 8 trajectories, and raises for none of them alone"):
        score(mine, trajectories_of(8))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_judge_that_is_down_is_the_infrastructures_failure(setting):
    async def judge(trajectory, **columns):
        raise ConnectionError("no route")

    said = rf"{setting}: judge raised ConnectionError: no route \(.*test_reward_calls\.py, line \d+\)\.$"
    with pytest.raises(InfrastructureError, match=said):
        SETTINGS[setting](judge, trajectories_of(2))


class OutcomeEnv(ToolEnv):
    """Earns what its class says."""

    value: object = 1.0

    def outcome_reward(self, trajectory):
        return self.value


class BareEnv:
    """The protocol without our base class."""

    outcome: object = 1.0
    reward: object = 0.0

    def reset(self, example):
        return example["prompt"]

    def step(self, message):
        return [], self.reward, True, {"reward_parts": {}}

    def outcome_reward(self, trajectory):
        return self.outcome


@pytest.mark.parametrize(
    ("base", "values", "method"),
    [
        (OutcomeEnv, {"value": INF}, "outcome_reward"),
        (OutcomeEnv, {"value": (1.0, {"answer": NAN})}, "outcome_reward, part 'answer',"),
        (BareEnv, {"outcome": INF}, "outcome_reward"),
        (BareEnv, {"outcome": "1.0"}, "outcome_reward"),
        (BareEnv, {"outcome": (1.0, {"answer": NAN})}, "outcome_reward"),
        (BareEnv, {"reward": 1e39}, "step"),
    ],
    ids=repr,
)
def test_what_an_environment_earns_is_named_with_its_method_and_the_example(tmp_path, base, values, method):
    env = type("Mine", (base,), values)
    with pytest.raises(ValueError, match=rf"Mine\.{method}.* returned .* example 'q\d', generation \d"):
        make_trainer(tmp_path, env=env, script=lambda rng, turn: say()).train()


def test_a_reward_model_that_returns_no_number_is_named(tmp_path):
    class Judge(torch.nn.Module):
        def forward(self, **inputs):
            logits = torch.ones(len(inputs["input_ids"]), 1)
            logits[3] = INF
            return type("Output", (), {"logits": logits})

    trainer = make_trainer(tmp_path, reward_funcs=[one_of_them(1.0)])
    trainer.reward_funcs[0] = Judge()
    trainer.reward_processing_classes[0] = trainer.processing_class
    with pytest.raises(ValueError, match=r"reward_funcs: scorer returned inf for Trajectory\(.*generation=3"):
        trainer.train()


def test_numbers_of_any_library_that_float32_holds_are_rewards_and_nothing_else_is():
    for value in (True, 1, 1.0, np.float32(1), np.bool_(True), np.array(1), torch.tensor(1.0), torch.ones(1)):
        assert finite_number(value) == 1.0
    assert finite_number(3.4e38) == 3.4e38
    no_rewards = (INF, -INF, NAN, 1e39, 10**400, None, "1.5", b"1", [1.0], 1j, {}, object())
    for value in (*no_rewards, np.float32("nan"), torch.tensor(INF), torch.ones(2), np.ones(2)):
        assert finite_number(value) is None
