"""The worked example of docs/advantages.md, by hand: seven tokens, two turns, an observation between them, padding.

tokens = A0 A0 E E A1 A1 A1 pad      (A: sampled in that turn, E: observation)
"""

import pytest
import torch

from agent_r1_trl.advantages import (
    compute_bilevel_gae,
    compute_gae,
    compute_reinforce_pp_advantages,
    compute_returns_to_go,
    compute_step_gae,
    masked_mean,
    masked_whiten,
)
from agent_r1_trl.advantages.gae import whiten_turns

MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
REWARDS = torch.tensor([[0, 0.5, 0, 0, 0, 0, 1, 0]])
VALUES = torch.tensor([[0.1, 0.2, 0.9, 0.9, 0.3, 0.4, 0.5, 0.9]])
TURNS = torch.tensor([[0, 0, -1, -1, 1, 1, 1, -1]])

mask_kinds = pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.float()], ids=["int", "bool", "float"])


def assert_numbers(found, expected):
    """The expected numbers have six digits."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float32), rtol=0, atol=1e-6)


@mask_kinds
def test_gae_passes_over_observations_without_discount(mask):
    advantages, returns = compute_gae(REWARDS, VALUES, mask, gamma=0.9, lam=0.8)
    assert_numbers(advantages, [0.674536, 0.825744, 0, 0, 0.3552, 0.41, 0.5, 0])
    assert_numbers(returns, [0.774536, 1.025744, 0, 0, 0.6552, 0.81, 1, 0])


def test_gae_without_discount_is_what_is_still_to_come_minus_the_value():
    advantages, returns = compute_gae(REWARDS, VALUES, MASK, gamma=1, lam=1)
    assert_numbers(advantages, [1.4, 1.3, 0, 0, 0.7, 0.6, 0.5, 0])
    assert_numbers(returns, [1.5, 1.5, 0, 0, 1, 1, 1, 0])


@mask_kinds
def test_bilevel_gae_estimates_turns_and_then_the_tokens_of_each(mask):
    advantages, returns = compute_bilevel_gae(
        REWARDS, VALUES, mask, TURNS, gamma_turn=0.95, lam_turn=0.9, gamma=0.99, lam=0.8
    )
    assert_numbers(advantages, [1.05038, 1.2025, 0, 0, 0.484872, 0.491, 0.5, 0])
    assert_numbers(returns, [1.15038, 1.4025, 0, 0, 0.784872, 0.891, 1, 0])


@pytest.mark.parametrize(
    ("last_reward", "expected"),
    [(1.0, [1.45, 1.45, 0, 0, 1, 1, 1, 0]), (0.0, [0.5, 0.5, 0, 0, 0, 0, 0, 0])],
)
def test_bilevel_gae_discounts_once_per_turn_and_a_turn_without_reward_stays_a_turn(last_reward, expected):
    rewards = REWARDS.clone()
    rewards[0, 6] = last_reward
    for returns in compute_bilevel_gae(
        rewards, torch.zeros_like(VALUES), MASK, TURNS, gamma_turn=0.95, lam_turn=1, gamma=1, lam=1
    ):  # with values of zero, advantages and returns are the same
        assert_numbers(returns, expected)


@mask_kinds
def test_step_gae_takes_a_turn_for_one_action(mask):
    # V .1 and .3: the last turn has delta 1 - .3, the first .5 + .95 * .3 - .1 = .685, and A = .685 + .95 * .9 * .7
    advantages, returns = compute_step_gae(REWARDS, VALUES, mask, TURNS, gamma_turn=0.95, lam_turn=0.9)
    assert_numbers(advantages, [1.2835, 1.2835, 0, 0, 0.7, 0.7, 0.7, 0])
    assert_numbers(returns, [1.3835, 1.3835, 0, 0, 1, 1, 1, 0])


def test_whitening_over_turns_counts_each_turn_once_whatever_its_tokens():
    x = torch.tensor([[1.0, 1, 99, 99, 3, 3, 3, 99]])
    assert_numbers(whiten_turns(x, TURNS, MASK), [-(0.5**0.5)] * 2 + [0, 0] + [0.5**0.5] * 3 + [0])


@mask_kinds
def test_returns_to_go_discount_per_action_token(mask):
    assert_numbers(compute_returns_to_go(REWARDS, mask, gamma=0.9), [1.1061, 1.229, 0, 0, 0.81, 0.9, 1, 0])


def test_reinforce_pp_is_returns_to_go_whitened_over_five_action_tokens():
    # mean 1.00902, std .165372
    found = compute_reinforce_pp_advantages(REWARDS, MASK, gamma=0.9)
    assert_numbers(found, [0.587041, 1.330214, 0, 0, -1.203469, -0.659241, -0.054544, 0])


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_whitening_counts_masked_entries_of_all_rows_with_bessels_correction(kind):
    x = torch.tensor([[1.0, 2, 99, 4], [3, 99, 5, 99]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0]]).to(kind)
    expected = torch.tensor([[-1.264911, -0.632456, 0, 0.632456], [0, 0, 1.264911, 0]])
    torch.testing.assert_close(masked_whiten(x, mask), expected, rtol=0, atol=1e-6)
    assert masked_mean(x, mask) == 3


def test_whitening_takes_its_statistics_from_what_is_counted():
    x, mask = torch.tensor([[1.0, 99.0, 3.0], [7.0, 5.0, 99.0]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    found = masked_whiten(x, mask, torch.tensor([[1, 1, 1], [0, 0, 1]]))  # mean 2, variance 2
    expected = torch.tensor([[-(0.5**0.5), 0, 0.5**0.5], [5 * 0.5**0.5, 3 * 0.5**0.5, 0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not masked_whiten(x, mask, torch.tensor([[1, 1, 0], [0, 0, 1]])).any(), "one entry has no spread"
