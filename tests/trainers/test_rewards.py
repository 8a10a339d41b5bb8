"""Rewards of whole trajectories, and which of them count where."""

import functools

import pytest
import torch
from accelerate import Accelerator

from agent_r1_trl.features.echo_trap.feature import signal_record
from agent_r1_trl.features.sampling.rules import passes, raw_returns
from agent_r1_trl.rewards import required
from agent_r1_trl.rollout.failures import failure_of
from agent_r1_trl.trainers import MultiTurnGRPOConfig
from agent_r1_trl.trainers.credit import CreditEstimator
from agent_r1_trl.trainers.rewards import (
    Rewards,
    add_turn_rewards,
    class_reward,
    environment_reward,
)
from agent_r1_trl.trainers.rollout_batch import ScoredBatch
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import empty, two_turns

NAN = float("nan")
ROWS = [{"id": "a"}, {"id": "b"}]


def rewards_of(truncated_trajectories):
    args = MultiTurnGRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    args.truncated_trajectories = truncated_trajectories
    return Rewards(args, [])


def test_the_environments_reward_is_the_return_and_nothing_for_an_infrastructure_failure():
    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
    assert environment_reward([two_turns(), failed]) == [pytest.approx(-0.1 + 1.1), None]


def test_only_a_truncated_trajectory_is_penalised():
    done, cut = two_turns(), two_turns(stop_reason=StopReason.TIMEOUT)
    rewards_of("penalise").place_on_turns([done, cut], ROWS)
    assert (done.outcome_reward, cut.outcome_reward) == (1.1, pytest.approx(0.6))
    assert "truncation_penalty" not in done.reward_parts
    assert cut.reward_parts["truncation_penalty"] == -0.5
    assert (done.truncation_penalty, cut.truncation_penalty) == (0.0, -0.5)


def test_a_reward_function_called_like_the_penalty_is_a_reward():
    """Filters look past the penalty for truncation, and at all that functions give, whatever they are called."""
    done, cut = two_turns(), two_turns(stop_reason=StopReason.TIMEOUT)
    rewards = rewards_of("penalise")
    rewards.place_on_turns([done, cut], ROWS)
    table = {"functions": [len], "names": ["truncation_penalty"], "weights": [1.0]}
    rewards.place_on_outcomes([done, cut], torch.tensor([[-2.0], [-3.0]]), **table)
    assert [item.reward_parts["truncation_penalty"] for item in (done, cut)] == [-2.0, -3.5]
    assert [item.total_reward for item in (done, cut)] == pytest.approx([1.0 - 2.0, 1.0 - 3.0 - 0.5])
    assert raw_returns([done, cut]).tolist() == pytest.approx([1.0 - 2.0, 1.0 - 3.0])
    assert passes([done, cut], pass_reward=-1.5).tolist() == [1.0, 0.0]
    assert signal_record(cut)["return"] == pytest.approx(1.0 - 3.0)
    credit = CreditEstimator(MultiTurnGRPOConfig(output_dir="unused", use_cpu=True, bf16=False), Accelerator(cpu=True))
    compared = credit.compared_returns([done, cut], 0.0, with_penalty=False)
    assert [row[0] for row in compared] == pytest.approx([1.0 - 2.0, 1.0 - 3.0])
    assert credit.trained_returns([done, cut], 0.0) == pytest.approx([1.0 - 2.0, 1.0 - 3.0])


def test_weighted_rewards_are_added_but_for_the_environments_own_and_for_rows_without_one():
    trajectories = [two_turns(), two_turns()]
    rewards = torch.tensor([[1.0, 4.0], [1.0, NAN]])  # columns: the environment's, the user's
    functions = [environment_reward, len]
    rewards_of("keep").place_on_outcomes(
        trajectories, rewards, functions=functions, names=["environment_reward", "length"], weights=[1.0, 0.25]
    )
    assert [item.outcome_reward for item in trajectories] == [pytest.approx(2.1), 1.1]
    assert trajectories[0].reward_parts == {"answer": 1.0, "format": 0.1, "length": 1.0}
    assert "length" not in trajectories[1].reward_parts


def test_a_row_is_in_the_baseline_unless_the_machine_failed_or_nobody_scored_it():
    trajectories = [two_turns(), two_turns(), two_turns(), empty(StopReason.GENERATION_ERROR)]
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN], [1.0, 2.0]])
    rewards_of("keep").place_on_outcomes(
        trajectories, rewards, functions=[len, len], names=["length", "other"], weights=[1.0, 1.0]
    )
    trajectories[1].is_group_too_small = True
    assert [item.in_baseline for item in trajectories] == [True, False, False, False]
    assert [item.is_scored for item in trajectories] == [True, True, False, True]
    assert [item.outcome_reward for item in trajectories[:3]] == [pytest.approx(4.1), pytest.approx(3.1), 1.1]


def test_a_trajectory_that_nobody_scored_is_warned_of_once_and_a_failure_never(caplog):
    rewards, table = rewards_of("keep"), {"functions": [len], "names": ["length"], "weights": [1.0]}
    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
    rewards.place_on_outcomes([failed, two_turns()], torch.tensor([[NAN], [1.0]]), **table)
    assert not caplog.messages
    for _ in range(2):
        rewards.place_on_outcomes([two_turns(), two_turns()], torch.tensor([[NAN], [NAN]]), **table)
    (said,) = caplog.messages
    assert said.startswith("All reward functions returned None for a trajectory")


def test_none_is_0_beside_another_reward_unless_the_function_is_required():
    def asked(completions, **columns): ...

    @required
    def wanted(completions, **columns): ...

    class Judge:
        def asked(self, completions, **columns): ...

    partials = [functools.partial(wanted, a=1), required(functools.partial(asked, a=1)), required(Judge().asked)]
    for function, counts in ((asked, True), (wanted, False), *((item, False) for item in partials)):
        judged, unjudged, failed = two_turns(), two_turns(), two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
        rewards_of("keep").place_on_outcomes(
            [judged, unjudged, failed], torch.tensor([[1.0, 0.5], [1.0, NAN], [NAN, NAN]]),
            functions=[environment_reward, function], names=["environment_reward", "asked"], weights=[1.0, 1.0],
        )  # fmt: skip
        assert [judged.in_baseline, unjudged.in_baseline] == [True, counts]
        assert [judged.outcome_reward, unjudged.outcome_reward] == [pytest.approx(1.6), 1.1]
        assert failure_of(judged) is None and failure_of(failed).stop_reason == "environment_error"
        said = str(failure_of(unjudged))
        assert said.startswith("None" if counts else "1 x not_scored: reward_funcs: asked, which is required, ret")


def test_a_required_function_for_turns_takes_out_what_it_does_not_score_and_may_say_why():
    @required
    def asked(trajectory, **columns):
        trajectory[1].error = "the judge was silent"
        return [[0.0, 1.0], None, None]

    trajectories = [two_turns() for _ in range(3)]
    assert add_turn_rewards(trajectories, [{}] * 3, [asked], [1.0]) == [True, False, False]
    values = torch.tensor([[1.0], [1.0], [1.0]])
    table = {"functions": [environment_reward], "names": ["environment_reward"], "weights": [1.0]}
    rewards_of("keep").place_on_outcomes(trajectories, values, **table)
    assert [item.in_baseline for item in trajectories] == [True, False, False]
    assert [item.error for item in trajectories] == [
        None, "the judge was silent", "turn_reward_funcs: asked, which is required, returned None",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "kept", "masked"),
    [
        (StopReason.DONE, True, True),
        (StopReason.MAX_TURNS, True, False),
        (StopReason.INVALID_CALLS, True, True),
        (StopReason.ENVIRONMENT_ERROR, False, False),
    ],
)
def test_the_loss_takes_what_the_policy_did_and_no_limit_cut_where_that_is_asked_for(reason, kept, masked):
    trajectory = two_turns(stop_reason=reason)
    assert rewards_of("keep").in_loss(trajectory) is kept
    assert rewards_of("penalise").in_loss(trajectory) is kept
    assert rewards_of("mask").in_loss(trajectory) is masked


def test_the_column_of_a_class_holds_the_outcome_of_its_own_environments():
    class Mine: ...

    class Heir(Mine): ...

    scored, unscored, failed = two_turns(), two_turns(), two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
    scored.reward_parts = {"Mine": 0.9, "truncation_penalty": 0.2}  # a penalty is none of the class's
    unscored.is_scored = False
    column = class_reward(Mine)
    environments = [Mine(), Heir(), Mine(), Mine(), None]
    assert column.__name__ == "Mine"
    assert column(environments, [scored, two_turns(), unscored, failed, failed]) == [0.9, None, None, None, None]


def test_turn_rewards_say_which_trajectories_they_score():
    trajectories = [two_turns(), two_turns()]
    before = trajectories[0].turns[0].reward

    async def first_only(trajectory, id):
        return [[1.0, None] if name == "a" else None for name in id]

    assert add_turn_rewards(trajectories, ROWS, [first_only], [0.5]) == [True, False]
    assert trajectories[0].turns[0].reward == before + 0.5
    assert trajectories[0].turns[0].reward_parts["first_only"] == 0.5
    assert "first_only" not in trajectories[0].turns[1].reward_parts
    assert add_turn_rewards(trajectories, ROWS, [], []) == [False, False]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "mine returned None for 2 trajectories"),
        ([[0.0, 0.0]], "mine returned 1 values for 2"),
        ({(0.0, 0.0), (1.0, 1.0)}, "mine returned \\{.*\\} for 2 trajectories"),
        ([1.0, 2.0], "mine returned 1.0 for the turns of Trajectory"),
        ([[1.0], [1.0]], "mine returned 1 values for the turns of Trajectory"),
        ([["much", 0.0], None], "mine returned 'much' for Trajectory"),
        ([["1.5", 0.0], None], "mine returned '1.5' for Trajectory"),
        ([[1e39, 0.0], None], "mine returned 1e\\+39 for Trajectory"),
        ([[float("nan"), 0.0], None], "mine returned nan for Trajectory"),
    ],
)
def test_what_is_no_reward_for_turns_is_named(returned, said):
    def mine(trajectory, **columns):
        return returned

    with pytest.raises(ValueError, match=f"turn_reward_funcs: {said}"):
        add_turn_rewards([two_turns(), two_turns()], ROWS, [mine], [1.0])


def test_a_batch_that_is_settled_again_leaves_the_same_groups_out():
    """Dynamic sampling and the curriculum settle a batch after every round, and the trainer once more."""
    rewards = rewards_of("keep")
    rewards.min_group_size = 3
    trajectories, values = [two_turns() for _ in range(4)], torch.tensor([[1.0], [2.0], [NAN], [NAN]])
    rewards.place_on_outcomes(trajectories, values, functions=[len], names=["length"], weights=[1.0])
    in_baseline, in_loss = rewards.members(trajectories, values.device)
    assert in_baseline.tolist() == in_loss.tolist() == [True, True, False, False]
    parts = {"reward_values": values, "completions": [], "extra_columns": {}}
    batch = ScoredBatch([{}] * 4, trajectories, None, **parts, in_baseline=in_baseline, in_loss=in_loss)
    for _ in range(4):
        rewards.resolve_members(batch, 4)
        assert [item.is_group_too_small for item in batch.trajectories] == [True, True, False, False]
        assert batch.in_baseline.tolist() == [item.in_baseline for item in batch.trajectories] == [False] * 4
