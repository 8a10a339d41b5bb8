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
    compute_group_advantages,
    compute_returns_to_go,
    compute_rloo_advantages,
    compute_turn_group_advantages,
    masked_mean,
    masked_whiten,
)
from agent_r1_trl.advantages.gae import extend_turn_ids

NAN = float("nan")

# ---------------------------------------------------------------- groups


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


def test_turn_rewards_that_cancel_out_leave_no_spread_but_rounding():
    ways = torch.tensor([[0.1, 0.2, -0.3], [0.3, -0.1, -0.2], [0.0, 0.0, 0.0]])  # there and back: float32 leaves 1e-8
    turn_ids, groups = torch.arange(3).expand(3, 3), torch.zeros(3)
    assert ways.double().sum(dim=1).unique().numel() > 1
    assert not compute_turn_group_advantages(ways, torch.ones(3), turn_ids, groups, gamma_turn=1.0).any()


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


# ---------------------------------------------------------------- turn-level GRPO


GROUPS, MEMBERS, MAX_TURNS, GO_ON = 4000, 4, 6, 0.5


def roll_out_null_turns():
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
    rewards, turns, score = roll_out_null_turns()
    groups = torch.arange(GROUPS * MEMBERS) // MEMBERS
    found = compute_turn_group_advantages(rewards, torch.zeros(len(groups)), turns, groups, gamma_turn=1.0)
    assert found.abs().max() > 0.5
    assert abs(z_of_going_on(found, score)) < 2


def test_a_mean_over_turns_would_reward_turns_that_do_nothing():
    """The formula that the package avoids, on the same trajectories: the simulation above can tell."""
    rewards, turns, score = roll_out_null_turns()
    reached = (turns >= 0).view(GROUPS, -1)
    process = torch.where(reached, rewards.view(GROUPS, -1).double(), 0.0)  # P_k = r_k here: only turn 1 earns
    count = reached.sum(dim=1, keepdim=True)
    centred = torch.where(reached, process - process.sum(dim=1, keepdim=True) / count, 0.0)
    std = ((centred**2).sum(dim=1, keepdim=True) / (count - 1)).sqrt()
    assert z_of_going_on((centred / (std + 1e-4)).view_as(score), score) > 10


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
