"""Families of simulated runs: each row is what `simulate` and `history_of` are given. No number here is a result.

`HEALTHY` and `COLLAPSES` were seen while the rules were made. `HELD_OUT` was not: its families were written down
before, and are judged only to report how well the rules hold elsewhere.
"""

import numpy as np

from tests.features.echo_trap.simulated_runs import simulate, wandering_entropy

STEPS, BEGIN = 150, 60
STEP = np.arange(STEPS)
LINE = np.linspace(0, 1, STEPS)


def ramp(begin, length):
    """(T,) 0 up to step `begin`, then a line to 1 over `length` steps, then 1."""
    return np.clip((STEP - begin) / length, 0, 1)


def saw(period):
    """(T,) from 0 to 1 and back at once, every `period` steps."""
    return STEP % period / period


AFTER = (STEP >= BEGIN) * 1.0
HARDER = 1.5 - 2.2 * ramp(60, 60)
HEALTHY = {
    "plateau": {},
    "plateau, success .82": {"easy": 2.0},
    "plateau, success .08": {"easy": -3.0},
    "noisy success of .05": {"easy": -3.2, "spread": 0.5},
    "noisy success of .5": {"easy": 0.0, "spread": 0.5},
    "noisy success of .95": {"easy": 3.2, "spread": 0.5},
    "saturated from the start": {"easy": 5.0},
    "line": {"skill": 2 * LINE},
    "steep": {"skill": 5 * LINE},
    "converges": {"skill": np.minimum(14 * LINE, 7)},
    "saturates near 1": {"skill": 3.5 * (1 - np.exp(-5 * LINE)), "repeats": 0.1 + 0.6 * (1 - np.exp(-3 * LINE))},
    "late": {"skill": 4 / (1 + np.exp(-20 * (LINE - 0.6)))},
    "stairs": {"skill": np.floor(4 * LINE)},
    "plateaus between rises": {"skill": 1.5 * (ramp(20, 10) + ramp(90, 10))},
    "sparse": {"easy": -4.5},
    "sparse takes off": {"skill": 6 * ramp(100, 20), "easy": -6.0},
    "warm-up": {"skill": 3 * ramp(30, 120)},
    "learning rate drops": {"skill": 2 * ramp(0, 75), "norms": 1 - 0.9 * (STEP >= 75)},
    "get harder": {"skill": HARDER},
    "get harder at once": {"skill": 1.5 - 2.0 * AFTER},
    "get harder and are learnt": {"skill": 1.5 - 2 * ramp(50, 20) + 2 * ramp(80, 60)},
    "difficulty oscillates": {"skill": 0.7 * np.sin(STEP / 8)},
    "sawtooth data": {"skill": 0.5 - 1.2 * saw(30)},
    "the environment's own curriculum": {"skill": 2.5 * LINE * 2 - 1.2 * np.floor(4 * LINE)},
    "curriculum": {"skill": 2 * LINE, "curriculum": True},
    "curriculum, wide prompts": {"skill": LINE, "curriculum": True, "spread": 2.5},
    "mixed tasks": {"easy": (-2.5, 2.0), "spread": 0.5, "skill": LINE},
    "mixed tasks, one is learnt": {"easy": (-5.0, 0.5), "skill": 2 * LINE},
    "signed": {"skill": 2 * LINE, "kind": "signed"},
    "continuous": {"skill": 2 * LINE, "kind": "continuous"},
    "process": {"skill": 2 * LINE, "kind": "process"},
    "reward times .01": {"skill": 2 * LINE, "scale": 0.01},
    "reward times 100": {"skill": 2 * LINE, "scale": 100.0},
    "negative rewards": {"skill": LINE, "shift": -1.0},
    "negative rewards times 100": {"skill": LINE, "kind": "continuous", "scale": 100.0, "shift": -200.0},
    "groups of 4": {"skill": LINE, "size": 4},
    "groups of 16": {"skill": LINE, "size": 16},
    "wide prompts": {"skill": 2 * LINE, "spread": 2.5},
    "16 prompts": {"skill": LINE, "prompts": 16},
    "entropy decays": {"skill": 3 * LINE, "entropy": np.exp(-1.2 * LINE)},
    "entropy decays, success rises little": {"skill": LINE, "entropy": np.exp(-0.7 * LINE)},
    "entropy grows after demonstrations": {"skill": 2 * LINE, "entropy": 0.1 + 0.4 * ramp(5, 60)},
    "entropy wanders": {"skill": LINE, "wander": 0.15},
    "one norm of 30": {"skill": 2 * LINE, "spike": [70]},
    "a norm of 30 every 15": {"skill": 2 * LINE, "spike": list(range(20, STEPS, 15))},
    "norms with heavy tails": {"skill": 2 * LINE, "tail": 0.8},
    "norms grow fourfold": {"skill": 2 * LINE, "norms": 1 + 3 * LINE},
    "no success": {"skill": 2 * LINE, "hidden": ("success",)},
    "no entropy": {"skill": 2 * LINE, "hidden": ("entropy",)},
    "few calls at first": {"skill": 2 * LINE, "calls": 0.3 + 0.6 * LINE, "call_gain": 1.0},
    "calls that earn nothing go": {"calls": 0.9 - 0.85 * ramp(40, 60)},
    "two updates per rollout": {"skill": 2 * LINE, "gaps": 2},
    "get harder in stairs": {"skill": 1.2 - 0.5 * np.floor(4 * LINE)},
    "sawtooth data, learnt": {"skill": 2 * LINE - saw(40)},
    "signed, difficulty oscillates": {"skill": 0.7 * np.sin(STEP / 15), "kind": "signed"},
    "curriculum, negative rewards": {"skill": LINE, "curriculum": True, "shift": -1.0},
    "sparse process rewards": {"easy": -4.0, "kind": "process", "calls": 0.7},
    "mixed tasks, one is learnt late": {"easy": (-3.0, 1.0), "skill": 3 * ramp(90, 30)},
    "entropy doubles, then falls": {"skill": 3 * LINE, "entropy": 1 + ramp(10, 30) - 1.5 * ramp(60, 80)},
    "norms of 30 in pairs": {"skill": LINE, "spike": [40, 41, 90, 91]},
    "is solved, then gets harder": {"skill": 5 * ramp(0, 60) - 4 * ramp(90, 30)},
    "noisy success of .2": {"easy": -1.6, "spread": 1.5, "wander": 0.1},
    "entropy decays, difficulty oscillates": {"skill": LINE + 0.5 * np.sin(STEP / 15), "entropy": np.exp(-0.7 * LINE)},
    "entropy wanders, difficulty oscillates": {"skill": 0.5 * np.sin(STEP / 10), "wander": 0.15},
    "two tasks take turns": {"skill": 0.8 * (STEP // 10 % 2)},
    "gets harder while entropy grows": {"skill": 1 - 1.5 * ramp(60, 60), "entropy": 1 + 0.25 * ramp(40, 80)},
    "repeats more as it learns": {"skill": 2 * LINE, "repeats": 0.1 + 0.45 * LINE},
    "curriculum, learns at once": {"skill": 3 * ramp(40, 15), "curriculum": True},
    "curriculum, nothing is learnt": {"curriculum": True, "spread": 2.0},
    "continuous, gets harder at once": {"skill": 1 - 1.6 * AFTER, "kind": "continuous"},
    "sparse, norms with heavy tails": {"easy": -3.8, "tail": 0.8},
    "process rewards, sawtooth data": {"skill": 1 - 0.8 * saw(25), "kind": "process", "call_gain": 1.0},
    "four updates per rollout, warm restarts": {"skill": 2 * LINE, "gaps": 4, "norms": 2 - saw(50)},
    "groups of 4, curriculum, signed": {"skill": LINE, "size": 4, "curriculum": True, "kind": "signed"},
}
HELD_OUT = {
    "wide prompts get harder": {"skill": 0.8 - 1.4 * ramp(30, 100), "spread": 2.0},
    "learns, rests, forgets a little": {"skill": 2.5 * ramp(10, 40) - 0.7 * ramp(80, 30)},
    "entropy jumps once": {"skill": LINE, "entropy": 1 + 0.3 * AFTER},
    "entropy falls fast at first": {"skill": 1.5 * (1 - np.exp(-5 * LINE)), "entropy": 0.3 + 0.7 * np.exp(-10 * LINE)},
    "calls rise, then some are dropped": {"calls": 0.4 + 0.5 * ramp(10, 40) - 0.2 * ramp(90, 30), "call_gain": 1.0},
    "every third rollout is harder": {"skill": 0.9 * (STEP % 3 < 2)},
    "more alike as it learns": {"skill": 2 * LINE, "repeats": 0.05 + 0.3 * LINE},
    "negative continuous, difficulty oscillates": {
        "skill": 0.6 * np.sin(STEP / 12),
        "kind": "continuous",
        "shift": -1.0,
    },
    "groups of 16 that repeat": {"size": 16, "repeats": 0.3},
    "process rewards without success": {"skill": 2 * LINE, "kind": "process", "hidden": ("success",)},
    "curriculum, gets harder": {"skill": 1 - 1.5 * ramp(50, 60), "curriculum": True},
}
SLOW = ramp(BEGIN, 60)
DEAD = (STEP >= 3) * 1.0
COLLAPSES = {
    "sudden echo": {"skill": 1 - 10 * AFTER, "echo": AFTER, "entropy": 1 - 0.95 * AFTER},
    "sudden echo, entropy and success unknown": {
        "skill": 1 - 10 * AFTER, "echo": AFTER, "hidden": ("entropy", "success"),
    },
    "explosion": {"skill": 1 - 10 * AFTER, "entropy": 1 + 20 * AFTER},
    "learning rate x100 at step 4": {"skill": 1 - 12.0 * DEAD, "entropy": 1 + 20 * DEAD, "calls": 0.9 - 0.9 * DEAD},
    "dead from step 4": {"skill": 1 - 12.0 * DEAD, "entropy": 1 + 20 * DEAD},
    "slow echo": {"skill": 1.5 - 5.5 * SLOW, "echo": SLOW, "entropy": 1 - 0.97 * SLOW},
    "slow inaction": {"skill": 0.5, "calls": 0.95 - 0.93 * SLOW, "call_gain": 3.0},
    "slow explosion": {"skill": 1.5 - 5.5 * SLOW, "entropy": 1 + 4 * SLOW},
    "slow echo after learning": {
        "skill": 2.5 * ramp(0, 60) - 6 * SLOW, "echo": SLOW, "entropy": 1 - 0.3 * ramp(0, 60) - 0.67 * SLOW,
    },
    "slow echo of signed rewards": {
        "skill": 1.5 - 5.5 * SLOW, "echo": SLOW, "entropy": 1 - 0.97 * SLOW, "kind": "signed",
    },
}  # fmt: skip
RARE = {
    "sudden echo, success .07": {**COLLAPSES["sudden echo"], "easy": -4.0},
    "explosion, success .07": {**COLLAPSES["explosion"], "easy": -4.0},
    "slow echo, success .1": {**COLLAPSES["slow echo"], "easy": -4.0},
}
"""Collapses with so little success that no limit is set for when they are named."""
SUDDEN = {name: 3 if "step 4" in name else BEGIN for name in {**COLLAPSES, **RARE} if not name.startswith("slow")}
"""Collapses that take no time, and the number of steps before them."""


def history_of(seed, groups, *, skill=0.0, entropy=1.0, wander=0.05, norms=1.0, tail=0.0, spike=(), hidden=(),
               scale=1.0, shift=0.0, gaps=1, **options):  # fmt: skip
    """The history of one run.

    Args:
        seed: draws everything; a number, or several.
        groups: prompts of a step.
        skill: (T,) or one number, log-odds of success besides the prompt's own.
        entropy: (T,) or one number, of which the run has 0.8 times as much.
        wander: relative standard deviation of the entropy around it.
        norms: (T,) or one number, factor of the gradient norms.
        tail: log standard deviation of the norms that is added.
        spike: steps whose norm is 30 times as large.
        hidden: keys that are unknown.
        scale: factor of the rewards.
        shift: what is added to the rewards before.
        gaps: optimizer steps of a rollout; all but the first know entropy and norm alone.
        **options: of `simulate`.
    """
    rng = np.random.default_rng(seed)
    skill, norms, level = (np.broadcast_to(x, STEPS) for x in (skill, norms, 0.8 * np.asarray(entropy)))
    history = simulate(rng, skill, groups=groups, **options)
    drawn = wandering_entropy(rng, level, wander)
    factors = norms * rng.lognormal(0, tail, STEPS) if tail else norms
    for number, step in enumerate(history):
        step["entropy"] = drawn[number]
        step["grad_norm"] *= factors[number] * (30 if number in spike else 1)
        step["reward_std"] *= scale
        for key in ("reward", "reward_min", "reward_max", "return_with_call", "return_without_call"):
            step[key] = scale * (step[key] + shift)
        for key in hidden:
            del step[key]
        if number % gaps:
            history[number] = {key: step[key] for key in ("entropy", "grad_norm")}
    return history
