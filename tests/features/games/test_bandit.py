"""BanditEnv: what each arm pays, and what success means."""

import asyncio
import math
import random

import pytest
import torch

from agent_r1_trl.advantages import compute_group_advantages
from agent_r1_trl.features.games import BanditEnv
from tests.environments.helpers import finished, message

LEVEL = "Dragon (risky), Phoenix (sure)"


def started(*, dynamics_seed=0, level=LEVEL, **settings):
    env = BanditEnv(**settings)
    env.seed(reset_seed=0, dynamics_seed=dynamics_seed)
    env.reset({"level": level})
    return env


def pull(env, *arms, form="text"):
    """(reward, whether the game is over) of a turn for each arm."""
    turns = [
        message(("play", {"actions": [arm]})) if form == "tool" else message(content=f"<answer>{arm}</answer>")
        for arm in arms
    ]
    return [(step.reward, step.done) for step in (asyncio.run(env.step(turn)) for turn in turns)]


def test_the_sure_arm_pays_a_tenth_and_the_risky_one_1_or_nothing():
    seeds = range(40)
    assert all(pull(started(dynamics_seed=seed), "Phoenix") == [(0.1, True)] for seed in seeds)
    paid = [pull(started(dynamics_seed=seed), "dragon")[0][0] for seed in seeds]
    assert paid == [float(random.Random(seed).random() < 0.25) for seed in seeds]
    assert 0 < sum(paid) < 20


def test_success_is_the_share_of_pulls_of_the_arm_with_the_larger_mean():
    env, end = started(max_actions=4), finished()
    rewards = pull(env, "Dragon", "Phoenix", "Unicorn", "Dragon", "Dragon")
    assert [over for _, over in rewards] == [False, False, False, False, True]
    assert rewards[1][0] == 0.1 and rewards[2][0] == -0.1
    assert env.outcome_reward(end) == (0.0, {})
    assert end.info["success"] == 0.75

    env = started(risky_probability=0.05)  # 0.05 on average, less than 0.1
    pull(env, "Phoenix")
    env.outcome_reward(end)
    assert end.info["success"] == 1.0


def test_a_pull_meets_the_same_chance_whatever_was_pulled_before():
    def last_pay(first, seed):
        return pull(started(dynamics_seed=seed, max_actions=2), first, "Dragon")[1]

    assert all(last_pay("Dragon", seed) == last_pay("Phoenix", seed) for seed in range(20))
    assert len({last_pay("Dragon", seed) for seed in range(20)}) == 2


def test_levels_hold_every_pair_in_both_orders():
    env = BanditEnv(arms=[["Nurse", "Founder"], ["Phoenix", "Dragon"]])
    assert {env.new_level(seed) for seed in range(50)} == {
        "Nurse (sure), Founder (risky)", "Founder (risky), Nurse (sure)",
        "Phoenix (sure), Dragon (risky)", "Dragon (risky), Phoenix (sure)",
    }  # fmt: skip
    shown = env.reset({"level": "Founder (risky), Nurse (sure)"})
    assert "Founder, Nurse" in shown[-1]["content"]
    assert not any("risky" in item["content"] or "sure" in item["content"] for item in shown)


def test_dividing_by_the_spread_of_a_group_teaches_the_sure_arm():
    """Exactly, over all groups of 16 of a policy that takes the risky arm one time in five.

    The push towards the risky arm is the mean of A * (is risky - 0.2). Without a division it is
    15/16 * 0.2 * 0.8 * (0.25 - 0.1), as it should be.
    """
    size, share, paying = 16, 0.2, 0.25
    returns, is_risky, weights = [], [], []
    for risky in range(size + 1):
        for paid in range(risky + 1):
            returns += [1.0] * paid + [0.0] * (risky - paid) + [0.1] * (size - risky)
            is_risky += [1.0] * risky + [0.0] * (size - risky)
            of_pays = math.comb(risky, paid) * paying**paid * (1 - paying) ** (risky - paid)
            weights.append(math.comb(size, risky) * share**risky * (1 - share) ** (size - risky) * of_pays)
    assert sum(weights) == pytest.approx(1)

    def push(scale):
        groups = torch.arange(len(weights)).repeat_interleave(size)
        advantages = compute_group_advantages(torch.tensor(returns, dtype=torch.float64), groups, scale=scale)
        per_group = (advantages * (torch.tensor(is_risky) - share)).view(-1, size).mean(1)
        return float((per_group * torch.tensor(weights)).sum())

    assert push("none") == pytest.approx(0.0225, abs=1e-6)
    assert push("group") < -0.03
