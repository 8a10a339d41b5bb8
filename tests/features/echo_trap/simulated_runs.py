"""Runs of a simulated policy: prompts of different difficulty, groups that are sampled, rewards that are drawn.

Nothing here is noise around a curve: what a step says of rewards, calls and repetition is counted from trajectories.
"""

from types import SimpleNamespace

import numpy as np

from agent_r1_trl.features.sampling.curriculum import Curriculum
from agent_r1_trl.features.sampling.settings import SamplingSettings


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def simulate(rng, skill, *, kind="binary", easy=-0.5, spread=1.0, prompts=200, groups=8, size=8, calls=0.9,
         call_gain=0.0, repeats=0.05, echo=0.0, curriculum=False):  # fmt: skip
    """The history of T steps, one dictionary each, with `success` and everything else that rollouts know.

    Args:
        rng: draws everything.
        skill: (T,) what training has added to the log-odds of success.
        kind: "binary" returns of 0 or 1, "signed" -1 or 1, "continuous" in 0 to 1, "process" with 0.2 for a call.
        easy: mean of the prompts' log-odds at skill 0; several numbers are as many tasks, equally frequent.
        spread: their standard deviation.
        prompts: number of prompts in the data set.
        groups: number of prompts of a step.
        size: trajectories of each.
        calls: (T,) or one number: share of trajectories with a call.
        call_gain: log-odds of success that a trajectory without a call lacks.
        repeats: (T,) or one number: share of turns that say what others say.
        echo: (T,) or one number: share of trajectories that are copies of the first one of their group.
        curriculum: whether the prompts are drawn by the trainer's, and weighted as it says.
    """
    skill = np.asarray(skill, dtype=float)
    shape = (len(skill), groups, size)
    calls, repeats, echo = (np.broadcast_to(value, len(skill))[:, None, None] for value in (calls, repeats, echo))
    data = np.resize(easy, prompts) + spread * rng.standard_normal(prompts)
    log_odds = rng.choice(data, size=shape[:2])  # (T, groups)
    weights = np.ones(shape[:2])
    if curriculum:
        chosen, weights = drawn_by_curriculum(rng, sigmoid(data + skill[:, None]), groups, size)
        log_odds = data[chosen]
    weights = weights / weights.mean(1, keepdims=True)
    each = weights[..., None]
    is_copy = rng.random(shape) < echo if np.any(echo > 0) else np.zeros(shape, dtype=bool)
    has_call = rng.random(shape) < calls
    has_call = np.where(is_copy, has_call[..., :1], has_call)
    chance = sigmoid(log_odds[..., None] + skill[:, None, None] + call_gain * (has_call - 1.0))
    success = rng.random(shape) < chance
    success = np.where(is_copy, success[..., :1], success)
    returns = {
        "binary": success * 1.0,
        "signed": np.where(success, 1.0, -1.0),
        "continuous": np.clip(chance + 0.3 * np.sqrt(chance * (1 - chance)) * rng.standard_normal(shape), 0, 1),
        "process": success + 0.2 * has_call,
    }[kind]
    returns = np.where(is_copy, returns[..., :1], returns)
    std = returns.std(axis=2, ddof=1)  # (T, groups)
    num_with, num_without = (each * has_call).sum((1, 2)), (each * ~has_call).sum((1, 2))
    columns = {
        "reward": (each * returns).mean((1, 2)),
        "reward_std": (weights * std).mean(1),
        "zero_std_share": (weights * (std <= 1e-6 * np.abs(returns).max(2))).mean(1),
        "reward_max": returns.max((1, 2)),
        "reward_min": returns.min((1, 2)),
        "inaction": 1 - (each * has_call).mean((1, 2)),
        "return_with_call": (each * returns * has_call).sum((1, 2)) / np.where(num_with, num_with, np.nan),
        "return_without_call": (each * returns * ~has_call).sum((1, 2)) / np.where(num_without, num_without, np.nan),
        "repetition": ((rng.random(shape) < repeats) | is_copy).mean((1, 2)),
        "grad_norm": 0.3 * np.sqrt((std > 0).mean(1)) * rng.lognormal(0, 0.35, len(skill)),
        "success": (each * success).mean((1, 2)),
    }
    return [dict(zip(columns, row, strict=True)) for row in np.stack([*columns.values()], axis=1).tolist()]


def drawn_by_curriculum(rng, chances, groups, size):
    """The prompts that the trainer's curriculum draws, and what each counts for: (T, groups) both.

    Args:
        rng: draws who passes, which is all that the curriculum sees.
        chances: (T, prompts) of success.
        groups: prompts of a step.
        size: trajectories of each.
    """
    args = SimpleNamespace(sampling=SamplingSettings(curriculum_rate=0.3))
    trainer = SimpleNamespace(args=args, train_dataset=range(chances.shape[1]), add_callback=lambda callback: None)
    curriculum = Curriculum(trainer)
    chosen = []
    weights = []
    for chance in chances:
        drawn = curriculum.order(int(rng.integers(2**31)))[:groups]
        weight = curriculum.draw_weights(drawn, curriculum.pass_rates)
        curriculum.observe(drawn, (rng.random((groups, size)) < chance[drawn, None]).astype(float).tolist())
        chosen.append(drawn)
        weights.append([weight[prompt] for prompt in drawn])
    return np.array(chosen), np.array(weights)


def wandering_entropy(rng, level, noise):
    """(T,) entropy around `level`, (T,), with noise that lasts for some steps, as a policy's does."""
    wander, state = [], 0.0
    for draw in rng.standard_normal(len(level)):
        state = 0.9 * state + 0.44 * noise * draw
        wander.append(state)
    return (np.asarray(level) * np.exp(wander)).tolist()
