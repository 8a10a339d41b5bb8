"""Value loss, KL estimators and explained variance: numbers by hand, gradients, and nothing from mask 0."""

import math

import pytest
import torch

from agent_r1_trl.update.losses import explained_variance, kl_in_reward, value_loss
from tests.effort import random_rounds

NAN = float("nan")


def test_the_value_loss_by_hand():
    # target 1, clip 0.2. Moved .1 towards it: (.6 - 1)^2. Moved .4: clipped at .7, (.7 - 1)^2 > (.9 - 1)^2.
    # Moved .4 away: the free error is the larger. The last one is no action token.
    values, old = (torch.tensor([row]).requires_grad_() for row in ([0.6, 0.9, 0.1, 9.0], [0.5, 0.5, 0.5, 9.0]))
    returns, mask = torch.ones(1, 4, requires_grad=True), torch.tensor([[1, 1, 1, 0]])
    loss, num_clipped = value_loss(values, old, returns, mask, cliprange_value=0.2)
    assert loss.item() == pytest.approx(0.5 * (0.16 + 0.09 + 0.81), abs=1e-6)
    assert num_clipped.item() == 1
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[-0.4, 0.0, -0.9, 0.0]]))
    assert old.grad is None and returns.grad is None


def naive_value_loss(values, old, returns, mask, c):
    total, clipped_count = 0.0, 0
    for row in range(len(mask)):
        for t in range(len(mask[row])):
            if mask[row][t]:
                v, target = values[row][t], returns[row][t]
                clipped = min(max(v, old[row][t] - c), old[row][t] + c)
                total += 0.5 * max((v - target) ** 2, (clipped - target) ** 2)
                clipped_count += (clipped - target) ** 2 > (v - target) ** 2
    return total, clipped_count


@pytest.mark.fuzz
def test_the_value_loss_agrees_with_a_loop_over_tokens():
    for rng in random_rounds(100):
        rows, length, c = rng.randint(1, 5), rng.randint(1, 12), rng.choice([0.1, 0.5, 2.0, math.inf])
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        values, old, returns = torch.randn(3, rows, length, generator=generator)
        mask = torch.rand(rows, length, generator=generator) < rng.choice([0.0, 0.3, 0.9])
        loss, num_clipped = value_loss(values, old, returns, mask, cliprange_value=c)
        expected, count = naive_value_loss(*(x.tolist() for x in (values, old, returns, mask)), c)
        assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert num_clipped.item() == count
        assert loss.dtype == torch.float32


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, 1e38])
def test_nothing_at_mask_0_reaches_the_value_loss_or_its_gradient(poison):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    clean = list(torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1)))

    def run(inputs):
        values = inputs[0].clone().requires_grad_()
        loss, num_clipped = value_loss(values, *inputs[1:], mask, cliprange_value=0.1)
        loss.backward()
        return [x.view(torch.int32).tolist() for x in (loss.detach(), values.grad)], num_clipped.item()

    expected = run(clean)
    for index in range(3):
        inputs = [x.masked_fill(mask == 0, poison) if i == index else x for i, x in enumerate(clean)]
        assert run(inputs) == expected


def test_the_value_loss_of_bfloat16_values_is_summed_in_high_precision():
    values = torch.ones(64, 512, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = value_loss(values, values.detach(), torch.zeros(64, 512), torch.ones(64, 512), cliprange_value=0.2)
    assert loss.dtype == torch.float32
    assert loss.item() == 64 * 512 / 2
    loss.backward()
    assert values.grad.dtype == torch.bfloat16


def test_kl_in_reward_takes_beta_k1_off_action_tokens_only():
    rewards = torch.tensor([[0.0, 0.5, NAN, 1.0]])
    logps, ref_logps = torch.tensor([[-1.0, -2.0, NAN, -1.0]]), torch.tensor([[-1.5, -1.0, math.inf, -1.0]])
    found = kl_in_reward(rewards, logps, ref_logps, torch.tensor([[1, 1, 0, 1]]), beta=0.1)
    torch.testing.assert_close(found, torch.tensor([[-0.05, 0.6, 0.0, 1.0]]))
    assert found.dtype == torch.float32
    assert not found.requires_grad


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, 1e38])
def test_nothing_at_mask_0_changes_a_bit_of_rewards_or_explained_variance(poison):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    clean = list(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3)))
    rewards = kl_in_reward(*clean, mask, beta=0.3)
    explained = explained_variance(*clean[:2], mask)
    for index in range(3):
        dirty = [x.masked_fill(mask == 0, poison) if i == index else x for i, x in enumerate(clean)]
        assert torch.equal(kl_in_reward(*dirty, mask, beta=0.3), rewards)
        assert torch.equal(explained_variance(*dirty[:2], mask), explained)


def test_explained_variance_of_a_perfect_a_constant_and_a_worse_critic():
    returns = torch.tensor([[1.0, 2.0, 3.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0]])
    for values, expected in ([1, 2, 3], 1.0), ([5, 5, 5], 0.0), ([3, 2, 1], -3.0), ([0.5, 1, 1.5], 0.75):
        found = explained_variance(torch.tensor([[*values, NAN]]), returns, mask)
        assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("returns", [[0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
def test_explained_variance_of_returns_that_do_not_vary_is_zero(returns):
    assert explained_variance(torch.tensor([1.0, 5.0, 2.0]), torch.tensor(returns), torch.ones(3)) == 0
    noisy = torch.tensor(returns) * torch.tensor([1.0, 1 + 1.2e-7, 1.0])  # the last float32 digit
    assert explained_variance(torch.tensor([1.0, 5.0, 2.0]), noisy, torch.ones(3)) == 0
    assert explained_variance(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([1.0, 2, 3]), torch.tensor([0, 1, 0])) == 0


def test_shapes_that_do_not_fit_are_refused():
    wide, narrow = torch.zeros(2, 3), torch.zeros(2, 1)
    for call in (
        lambda: value_loss(wide, wide, narrow, wide, cliprange_value=0.2),
        lambda: kl_in_reward(wide, wide, wide, narrow, beta=0.1),
        lambda: explained_variance(wide, wide, narrow),
    ):
        with pytest.raises(ValueError, match="must have one shape"):
            call()
