"""What each estimator promises beyond its formula.

Groups without spread, trajectories outside the baseline, credit that crosses turns, anchors, no hidden bonus per turn,
long rows.
"""

import functools
import math

import pytest
import torch

from agent_r1_trl.advantages import (
    compute_bilevel_gae,
    compute_gae,
    compute_gigpo_advantages,
    compute_group_advantages,
    compute_reinforce_pp_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_returns_to_go,
    compute_rloo_advantages,
    compute_turn_group_advantages,
    gigpo_parts,
    masked_mean,
    masked_whiten,
    turn_group_parts,
)
from agent_r1_trl.advantages.gae import extend_turn_ids

NAN = float("nan")

# ---------------------------------------------------------------- groups


def test_grpo_by_hand():
    # group of [1 0 0 0]: mean .25, std .5; group of [2 4]: mean 3, std sqrt(2)
    returns, groups = torch.tensor([1.0, 2, 0, 0, 4, 0]), torch.tensor([0, 9, 0, 0, 9, 0])
    found = compute_group_advantages(returns, groups)
    low, high = -0.25 / 0.5001, 1 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(found, torch.tensor([-3 * low, -high, low, low, high, low]))
    found = compute_rloo_advantages(returns, groups)  # the others' means: 0 4 1/3 1/3 2 1/3
    torch.testing.assert_close(found, torch.tensor([1, -2, -1 / 3, -1 / 3, 2, -1 / 3]))


ESTIMATORS = {
    **{scale: functools.partial(compute_group_advantages, scale=scale) for scale in ("group", "batch", "none")},
    "rloo": compute_rloo_advantages,
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


@every_estimator
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_a_group_without_spread_gets_exactly_zero_beside_one_with_spread(name, value):
    noise = 1e-7 * abs(value) * torch.tensor([1.0, -1.0, 1.0])  # what summing rewards in another order leaves behind
    returns = torch.cat([torch.full((3,), value) + noise, torch.tensor([0.0, 1.0])])
    found = ESTIMATORS[name](returns, torch.tensor([0, 0, 0, 1, 1]))
    assert found[:3].tolist() == [0, 0, 0]
    assert found[4] > 0 > found[3]


@every_estimator
def test_a_group_with_one_member_in_the_baseline_gets_exactly_zero(name):
    found = ESTIMATORS[name](torch.tensor([5.0, NAN, NAN, 7.0]), torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == [0, 0, 0, 0]


@every_estimator
def test_a_trajectory_outside_the_baseline_gets_zero_and_does_not_count_in_its_group(name):
    found = ESTIMATORS[name](torch.tensor([1.0, NAN, 0.0, 0.5]), torch.zeros(4))
    expected = ESTIMATORS[name](torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3))
    assert found[1] == 0
    torch.testing.assert_close(found[[0, 2, 3]], expected)


@every_estimator
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(name):
    generator = torch.Generator().manual_seed(0)
    returns, groups = torch.randn(12, generator=generator), torch.arange(12) // 4
    expected = ESTIMATORS[name](returns, groups)
    order = torch.randperm(12, generator=generator)
    found = ESTIMATORS[name](returns[order], torch.tensor([100, -5, 7])[groups[order]])
    torch.testing.assert_close(found, expected[order])


def test_an_unknown_scale_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"scale='std'.*'group', 'batch', 'none'"):
        compute_group_advantages(torch.zeros(2), torch.zeros(2), scale="std")


def test_integer_returns_give_float32():
    assert compute_group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32


# ---------------------------------------------------------------- GAE

MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
REWARDS = torch.tensor([[0, 0.5, 0, 0, 0, 0, 1, 0]])
VALUES = torch.tensor([[0.1, 0.2, 0.9, 0.9, 0.3, 0.4, 0.5, 0.9]])
TURNS = torch.tensor([[0, 0, -1, -1, 1, 1, 1, -1]])
bilevel = functools.partial(compute_bilevel_gae, gamma_turn=0.95, lam_turn=0.9, gamma=0.99, lam=0.8)


def test_gae_is_gae_on_the_row_without_its_observations():
    where = MASK[0].bool()
    short = [x[:, where] for x in (REWARDS, VALUES, MASK)]
    for long, compact in zip(
        compute_gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8), compute_gae(*short, gamma=0.9, lam=0.8), strict=True
    ):
        assert torch.equal(long[:, where], compact)


def test_observations_as_steps_change_gae_only_below_a_discount_of_1():
    """Why masks are to be tested at gamma * lam < 1."""
    steps = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    where = MASK.bool()
    masked, unmasked = (compute_gae(REWARDS, VALUES, mask, gamma=1, lam=1)[0] for mask in (MASK, steps))
    torch.testing.assert_close(masked[where], unmasked[where])
    masked, unmasked = (compute_gae(REWARDS, VALUES, mask, gamma=0.9, lam=0.8)[0] for mask in (MASK, steps))
    assert (masked[where] - unmasked[where]).abs()[:2].min() > 0.01


def test_a_bootstrap_value_is_what_follows_the_last_action_token():
    bootstrap = torch.tensor([2.0])
    advantages, _ = compute_gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8, bootstrap_values=bootstrap)
    torch.testing.assert_close(advantages[0, 6].item(), 1 + 0.9 * 2 - 0.5)
    advantages, _ = bilevel(REWARDS, VALUES, MASK, TURNS, bootstrap_values=bootstrap)
    torch.testing.assert_close(advantages[0, 6].item(), 1 + 0.95 * 2 - 0.5)


def test_with_one_token_per_turn_bilevel_gae_is_gae_with_the_discounts_of_turns():
    mask, turns = torch.tensor([[1, 0, 1, 0, 1]]), torch.tensor([[0, -1, 1, -1, 2]])
    rewards, values = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        bilevel(rewards, values, mask, turns), compute_gae(rewards, values, mask, gamma=0.95, lam=0.9)
    )


def test_bilevel_gae_takes_all_rewards_of_a_turn_wherever_they_sit():
    spread = REWARDS + torch.tensor([[0.25, -0.25, 0, 0, -0.4, 0.1, 0.3, 0]])
    torch.testing.assert_close(bilevel(spread, VALUES, MASK, TURNS), bilevel(REWARDS, VALUES, MASK, TURNS))


def test_in_the_ablation_observation_tokens_extend_the_turn_before_them():
    steps = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    as_own = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]])
    found, expected = (bilevel(REWARDS, VALUES, steps, turns) for turns in (TURNS, as_own))
    assert torch.equal(found[0], expected[0])
    assert (found[0][0, 2:4] != 0).all()


def test_in_the_ablation_observation_tokens_before_the_first_turn_join_it():
    found = extend_turn_ids(torch.tensor([[-1, -1, 2, -1, 3, -1]]), torch.tensor([[1, 1, 1, 1, 1, 0]]))
    assert found.tolist() == [[2, 2, 2, 2, 3, -1]]


def test_masked_tokens_without_any_turn_are_one_turn():
    none = torch.full_like(TURNS, -1)
    found, expected = (bilevel(REWARDS, VALUES, MASK, turns) for turns in (none, none.masked_fill(MASK.bool(), 0)))
    assert torch.equal(found[0], expected[0])


# ---------------------------------------------------------------- REINFORCE++


def test_the_outcome_reaches_the_first_turn_in_returns_to_go():
    found = compute_returns_to_go(REWARDS, MASK, gamma=1.0)
    assert found.tolist() == [[1.5, 1.5, 0, 0, 1, 1, 1, 0]]


def test_reinforce_pp_has_mean_0_and_std_1_over_action_tokens():
    mask = torch.arange(30).view(3, 10) % 3 > 0
    rewards = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    found = compute_reinforce_pp_advantages(rewards, mask, gamma=0.9)[mask]
    assert found.mean().abs() < 1e-6
    assert found.std().item() == pytest.approx(1, abs=1e-6)


def test_a_trajectory_outside_the_baseline_counts_neither_in_its_group_nor_in_the_whitening():
    mask = torch.ones(4, 3, dtype=torch.long)
    returns, groups = torch.tensor([1.0, 0.0, NAN, 0.5]), torch.zeros(4, dtype=torch.long)
    found = compute_reinforce_pp_baseline_advantages(returns, groups, mask)
    keep = [0, 1, 3]
    torch.testing.assert_close(
        found[keep], compute_reinforce_pp_baseline_advantages(returns[keep], groups[keep], mask[keep])
    )
    assert found[2].tolist() == [0, 0, 0]


# ---------------------------------------------------------------- turn-level GRPO


def test_turn_level_grpo_by_hand():
    # process returns at .5: [1 + .5, 1], [0, 0]; P_1 = 1.5 and 0: mean .75, std 1.06066. Outcomes 1 and 0.
    turn_rewards, outcome = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0])
    turns = torch.tensor([[0, -1, 1], [0, 0, -1]])
    found = compute_turn_group_advantages(
        turn_rewards, outcome, turns, torch.tensor([4, 4]), gamma_turn=0.5, process_weight=2.0
    )
    by_outcome, std = 0.5 / (math.sqrt(0.5) + 1e-4), math.sqrt(1.125) + 1e-4
    first, second, other = (by_outcome * sign + 2 * part / std for sign, part in ((1, 0.75), (1, 0.25), (-1, -0.75)))
    torch.testing.assert_close(found, torch.tensor([[first, 0, second], [other, other, 0]]))


def test_the_parts_of_turn_level_grpo_add_up():
    generator = torch.Generator().manual_seed(3)
    turn_rewards, outcome = torch.randn(4, 2, generator=generator), torch.randn(4, generator=generator)
    turns, groups = torch.tensor([[0, -1, 1]] * 4), torch.tensor([0, 0, 1, 1])
    by_outcome, process = turn_group_parts(turn_rewards, outcome, turns, groups, gamma_turn=0.9)
    assert (by_outcome[:, 0] == by_outcome[:, 2]).all()
    assert (process[:, 0] != process[:, 2]).all()
    found = compute_turn_group_advantages(turn_rewards, outcome, turns, groups, gamma_turn=0.9, process_weight=0.3)
    torch.testing.assert_close(found, (by_outcome + 0.3 * process).float())


def test_without_process_rewards_turn_level_grpo_is_grpo():
    outcome, turns = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([[0, 1], [0, -1], [-1, -1]])
    found = compute_turn_group_advantages(
        torch.zeros(3, 2), outcome, turns, torch.zeros(3), gamma_turn=0.9, process_weight=1.0
    )
    expected = compute_group_advantages(outcome, torch.zeros(3)).unsqueeze(1) * (turns >= 0)
    torch.testing.assert_close(found, expected)


GROUPS, MEMBERS, MAX_TURNS, GO_ON = 4000, 4, 6, 0.5


def play_with_null_turns():
    """Trajectories whose first turn earns 0 or 1 by luck, and whose further turns do and earn nothing.

    Returns:
        turn rewards (N, K), turn ids (N, K) of one token per turn, and the score (N, K) of each choice to go on or
        stop: the derivative of its log-probability by the logit of going on.
    """
    generator = torch.Generator().manual_seed(4)
    count = GROUPS * MEMBERS
    goes_on = torch.rand(count, MAX_TURNS - 1, generator=generator) < GO_ON
    reached = torch.cat([torch.ones(count, 1), goes_on.long().cumprod(dim=1)], dim=1).bool()  # (N, K)
    rewards = torch.zeros(count, MAX_TURNS)
    rewards[:, 0] = (torch.rand(count, generator=generator) < 0.5).float()
    score = torch.cat([goes_on.double() - GO_ON, torch.zeros(count, 1)], dim=1) * reached  # the last turn has to stop
    return rewards, torch.where(reached, torch.arange(MAX_TURNS), -1), score


def z_of_going_on(advantages, score):
    """How many standard errors the policy gradient on "go on" is away from 0, over groups."""
    gradient = (advantages.double() * score).sum(dim=1).view(GROUPS, MEMBERS).sum(dim=1)
    return (gradient.mean() / (gradient.std() / math.sqrt(GROUPS))).item()


def test_turns_that_do_nothing_are_neither_rewarded_nor_punished():
    rewards, turns, score = play_with_null_turns()
    groups = torch.arange(GROUPS * MEMBERS) // MEMBERS
    found = compute_turn_group_advantages(
        rewards, torch.zeros(len(groups)), turns, groups, gamma_turn=1.0, process_weight=1.0
    )
    assert found.abs().max() > 0.5
    assert abs(z_of_going_on(found, score)) < 2


def test_a_mean_over_turns_would_reward_turns_that_do_nothing():
    """The formula that the package avoids, on the same trajectories: the simulation above can tell."""
    rewards, turns, score = play_with_null_turns()
    reached = (turns >= 0).view(GROUPS, -1)
    process = torch.where(reached, rewards.view(GROUPS, -1).double(), 0.0)  # P_k = r_k here: only turn 1 earns
    count = reached.sum(dim=1, keepdim=True)
    centred = torch.where(reached, process - process.sum(dim=1, keepdim=True) / count, 0.0)
    std = ((centred**2).sum(dim=1, keepdim=True) / (count - 1)).sqrt()
    assert z_of_going_on((centred / (std + 1e-4)).view_as(score), score) > 10


# ---------------------------------------------------------------- GiGPO


def step_part(turn_rewards, anchors, groups, gamma_turn=0.5):
    """(B, K): one token per turn."""
    turns = torch.arange(turn_rewards.shape[1]).expand(turn_rewards.shape)
    return gigpo_parts(turn_rewards, anchors, turns, groups, gamma_turn=gamma_turn)[1]


def test_gigpo_by_hand():
    # Two trajectories of one prompt; both start at observation 0, and the first returns to it in its second turn.
    # Step returns at .5: [0 + .5, 1], [0]; the group at observation 0 is {.5, 1, 0}: mean .5, std .5.
    turn_rewards, anchors = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0, 0], [0, -1]])
    turns = torch.tensor([[0, 1, 1], [0, -1, -1]])
    found = compute_gigpo_advantages(
        turn_rewards, anchors, turns, torch.tensor([3, 3]), gamma_turn=0.5, step_weight=2.0
    )
    episode, step = 0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / 0.5001
    expected = [[episode, episode + 2 * step, episode + 2 * step], [-episode - 2 * step, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_same_observation_in_another_prompt_group_is_another_state():
    turn_rewards, anchors = torch.tensor([[1.0], [0.0], [5.0], [3.0]]), torch.zeros(4, 1, dtype=torch.long)
    together = step_part(turn_rewards, anchors, torch.tensor([0, 0, 0, 0]))
    apart = step_part(turn_rewards, anchors, torch.tensor([0, 0, 1, 1]))
    assert together[0, 0] < 0 < apart[0, 0]
    assert apart[1, 0] == -apart[0, 0]


def test_a_state_that_was_visited_once_gets_no_step_advantage():
    turn_rewards = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    found = step_part(turn_rewards, torch.tensor([[0, 1], [0, 2]]), torch.tensor([0, 0]))
    assert found[:, 1].tolist() == [0, 0]
    found = step_part(turn_rewards, torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]))
    assert (found[:, 1] != 0).all()


def test_a_turn_without_an_anchor_is_compared_with_none():
    turn_rewards = torch.tensor([[1.0], [0.0]])
    assert (step_part(turn_rewards, torch.tensor([[-1], [-1]]), torch.tensor([0, 0])) == 0).all()


def test_a_trajectory_outside_the_baseline_is_in_no_step_group():
    turn_rewards, anchors = torch.tensor([[1.0, 0], [0, 0], [NAN, 7]]), torch.zeros(3, 2, dtype=torch.long)
    found = step_part(turn_rewards, anchors, torch.zeros(3))
    assert found[2].tolist() == [0, 0]
    torch.testing.assert_close(found[:2], step_part(turn_rewards[:2], anchors[:2], torch.zeros(2)))


# ---------------------------------------------------------------- long rows

LENGTH = 8192


def relative_error(found, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9999, 0.999)])
def test_gae_at_8192_tokens_is_as_good_as_float64(gamma, lam):
    rewards, values = torch.randn(2, 1, LENGTH, generator=torch.Generator().manual_seed(5))
    values += 100  # where float32 sums would lose their last digits
    mask = (torch.arange(LENGTH) % 5 > 0).unsqueeze(0)
    expected, following, advantage = [0.0] * LENGTH, 0.0, 0.0
    for t in reversed(range(LENGTH)):
        if mask[0, t]:
            value = values[0, t].item()
            advantage = rewards[0, t].item() + gamma * following - value + gamma * lam * advantage
            expected[t], following = advantage, value
    advantages, _ = compute_gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert relative_error(advantages[0], expected) < 1e-7


def test_float64_inputs_are_not_rounded_to_float32():
    mask, rewards = torch.ones(1, 3), torch.tensor([[0.0, 0.0, 1 + 1e-12]], dtype=torch.float64)
    found = compute_returns_to_go(rewards, mask, gamma=1.0)
    assert found.dtype == torch.float64
    assert torch.equal(found, rewards[0, 2].expand(1, 3))


def test_discounts_at_8192_tokens_are_exact_powers():
    rewards = torch.zeros(1, LENGTH)
    rewards[0, -1] = 1.0
    found = compute_returns_to_go(rewards, torch.ones(1, LENGTH), gamma=0.999)
    expected = torch.tensor([0.999 ** (LENGTH - 1 - t) for t in range(LENGTH)], dtype=torch.float64)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-7, atol=0)


def test_whitening_survives_a_mean_far_from_zero():
    generator = torch.Generator().manual_seed(6)
    x, mask = 4096 + torch.randn(16, LENGTH, generator=generator), torch.ones(16, LENGTH)
    exact = x.double()
    expected = (exact - exact.mean()) / exact.std()
    torch.testing.assert_close(masked_whiten(x, mask).double(), expected, rtol=1e-6, atol=1e-6)
    assert masked_mean(x, mask).item() == pytest.approx(exact.mean().item(), rel=1e-7)
