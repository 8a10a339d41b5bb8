"""Rewards of whole trajectories, and which of them count where."""

import pytest
import torch

from agent_r1_trl.trainers import MultiTurnGRPOConfig
from agent_r1_trl.trainers.rewards import Rewards, environment_reward, in_baseline, penalise_truncated
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import empty, two_turns

NAN = float("nan")


def rewards_of(truncated_trajectories):
    args = MultiTurnGRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    args.truncated_trajectories = truncated_trajectories
    return Rewards(args, [])


def test_the_environments_reward_is_the_return_and_nothing_for_an_infrastructure_failure():
    failed = two_turns(stop_reason=StopReason.ENVIRONMENT_ERROR)
    assert environment_reward([two_turns(), failed]) == [pytest.approx(-0.1 + 1.1), None]


def test_only_a_truncated_trajectory_is_penalised():
    done, cut = two_turns(), two_turns(stop_reason=StopReason.TIMEOUT)
    penalise_truncated([done, cut], -0.5)
    assert (done.outcome_reward, cut.outcome_reward) == (1.1, pytest.approx(0.6))
    assert "truncation_penalty" not in done.reward_parts
    assert cut.reward_parts["truncation_penalty"] == -0.5


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
    assert in_baseline(trajectories, rewards).tolist() == [True, True, False, False]


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
