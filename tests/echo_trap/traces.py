"""Simulated runs, judged and guarded: how often a healthy one is acted upon, and how late a collapse is.

    python -m tests.echo_trap.traces

prints a table: per size of a rollout the healthy runs with any action and with a roll back or stop, by family, then
for each collapse after how many steps it was called collapsing. The judge and the ladder are the real ones, dry.
"""

import sys

import numpy as np

from agent_r1_trl.echo_trap import EchoTrapJudge
from agent_r1_trl.trainers.echo_ladder import ACTIONS, UNFIT, GuardState, due_actions
from tests.echo_trap.simulated_runs import play, wandering_entropy

SIZES, STEPS, BEGIN = (2, 8, 64), 150, 60
LINE = np.linspace(0, 1, STEPS)
HARDER = 1.5 - 2.2 * np.clip((np.arange(STEPS) - 60) / 60, 0, 1)
HEALTHY = {
    "plateau": {"skill": 0 * LINE},
    "plateau, easy": {"skill": 0 * LINE, "easy": 2.0},
    "plateau, hard": {"skill": 0 * LINE, "easy": -3.0},
    "line": {"skill": 2 * LINE},
    "steep": {"skill": 5 * LINE},
    "converges": {"skill": np.minimum(14 * LINE, 7)},
    "late": {"skill": 4 / (1 + np.exp(-20 * (LINE - 0.6)))},
    "stairs": {"skill": np.floor(4 * LINE)},
    "sparse": {"skill": 0 * LINE, "easy": -4.5},
    "sparse takes off": {"skill": 6 * np.clip((np.arange(STEPS) - 100) / 20, 0, 1), "easy": -6.0},
    "harder": {"skill": HARDER},
    "oscillates": {"skill": 0.7 * np.sin(np.arange(STEPS) / 8)},
    "signed": {"skill": 2 * LINE, "kind": "signed"},
    "continuous": {"skill": 2 * LINE, "kind": "continuous"},
    "process": {"skill": 2 * LINE, "kind": "process"},
    "groups of 4": {"skill": LINE, "size": 4},
    "groups of 16": {"skill": LINE, "size": 16},
    "wide prompts": {"skill": 2 * LINE, "spread": 2.5},
    "entropy decays": {"skill": 3 * LINE, "entropy": np.exp(-1.2 * LINE)},
    "one norm of 30": {"skill": 2 * LINE, "spike": [70]},
    "a norm of 30 every 15": {"skill": 2 * LINE, "spike": list(range(20, STEPS, 15))},
    "no success": {"skill": 2 * LINE, "hidden": ("success",)},
    "no entropy": {"skill": 2 * LINE, "hidden": ("entropy",)},
    "few calls at first": {"skill": 2 * LINE, "calls": 0.3 + 0.6 * LINE, "call_gain": 1.0},
}
_AFTER = (np.arange(STEPS) >= BEGIN) * 1.0
_SLOW = np.clip((np.arange(STEPS) - BEGIN) / 60, 0, 1)
COLLAPSES = {
    "sudden echo": {"skill": 1 - 10 * _AFTER, "echo": _AFTER, "entropy": 1 - 0.95 * _AFTER},
    "explosion": {"skill": 1 - 10 * _AFTER, "entropy": 1 + 20 * _AFTER},
    "dead from step 4": {"skill": 1 - 12.0 * (np.arange(STEPS) >= 3), "entropy": 1 + 20 * (np.arange(STEPS) >= 3.0)},
    "slow echo": {"skill": 1.5 - 5.5 * _SLOW, "echo": _SLOW, "entropy": 1 - 0.97 * _SLOW},
    "slow inaction": {"skill": 0.5 + 0 * _SLOW, "calls": 0.95 - 0.93 * _SLOW, "call_gain": 3.0},
}


def history_of(seed, groups, *, entropy=1.0, spike=(), hidden=(), **options):
    """The history of one run."""
    rng = np.random.default_rng(seed)
    history = play(rng, options.pop("skill"), groups=groups, **options)
    level = np.broadcast_to(0.8 * np.asarray(entropy), STEPS)
    for number, (step, value) in enumerate(zip(history, wandering_entropy(rng, level, 0.05), strict=True)):
        step["entropy"] = value
        step["grad_norm"] *= 30 if number in spike else 1
        for key in hidden:
            del step[key]
    return history


def guarded(history):
    """The actions of a dry guard that may take all, and the first step that is called collapsing (None: none is)."""
    judge, state, taken, named = EchoTrapJudge(), GuardState(), [], None
    for number, step in enumerate(history):
        verdict = judge.update(step)
        state.num_steps += 1
        unfit, is_healthy = UNFIT[verdict.entropy_side], verdict.state in ("healthy", "converged")
        state.note(number, is_healthy=is_healthy)
        for name in state.past_actions(unfit, 10):
            del state.num_taken[name]
        seen = "warning" if verdict.is_recovering and verdict.severity > 2 else verdict.state
        for name in due_actions([*ACTIONS], state, seen, patience=10, max_roll_backs=2, unfit=unfit):
            state.take(name)
            taken.append(name)
        named = number if named is None and verdict.severity > 2 else named
    return taken, named


def main(seeds=10):
    """Print the table."""
    for groups in SIZES:
        acted, heavy = {}, {}
        for name, options in HEALTHY.items():
            runs = [guarded(history_of(seed, groups, **options))[0] for seed in range(seeds)]
            acted[name] = sum(bool(taken) for taken in runs)
            heavy[name] = sum(bool({"roll_back", "stop"} & {*taken}) for taken in runs)
        num = seeds * len(HEALTHY)
        print(f"{groups} groups, {num} healthy runs: any action {sum(acted.values())}, heavy {sum(heavy.values())}")
        print("  ", {name: (acted[name], heavy[name]) for name in acted if acted[name]})
        for name, options in COLLAPSES.items():
            begin = 3 if "step 4" in name else BEGIN
            found = [guarded(history_of(seed, groups, **options))[1] for seed in range(seeds)]
            delays = sorted(np.inf if step is None else step - begin + 1 for step in found)
            print(f"   {name}: named after {delays[0]:g} to {delays[-1]:g} steps")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
