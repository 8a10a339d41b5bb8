"""Simulated runs, judged and guarded: how often a healthy one is acted upon, and how late a collapse is.

    python -m tests.features.echo_trap.traces [FIRST_SEED [NUM_SEEDS]]

prints a table: per size of a rollout the healthy runs with any action and with a rollback or stop, by family, then
for each collapse after how many steps it was called collapsing, and how much of the success was gone by then. The
judge and the escalation are the real ones, dry. The rules were made with seeds below 50010, and without
`HELD_OUT`.
"""

import sys
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np

from agent_r1_trl.features.echo_trap import EchoTrapJudge
from agent_r1_trl.features.echo_trap.escalation import GuardState, due_actions
from agent_r1_trl.features.echo_trap.settings import ACTIONS
from tests.features.echo_trap.families import BEGIN, COLLAPSES, HEALTHY, HELD_OUT, RARE, SUDDEN, history_of

SIZES = (2, 8, 64)
HEAVY = {"rollback", "stop"}


def guarded(history):
    """The actions of a dry guard that may take all, and the first step that is called collapsing (None: none is)."""
    judge = EchoTrapJudge()
    state = GuardState()
    taken = []
    named = None
    for number, step in enumerate(history):
        verdict = judge.update(step)
        state.num_steps += 1
        is_exploding = verdict.is_exploding
        state.note(number, is_healthy=verdict.state in ("healthy", "converged"))
        for name in state.past_actions(10, is_exploding=is_exploding):
            del state.num_taken[name]
        rules = {"patience": 10, "max_rollbacks": 2, "is_exploding": is_exploding}
        for name in due_actions([*ACTIONS], state, verdict.answered, **rules):
            state.take(name)
            taken.append(name)
        named = number if named is None and verdict.severity > 2 else named
    return taken, named


@cache
def success_of(name):
    """(T,) what the policy of a collapse succeeds in, without the noise of one rollout."""
    return np.asarray(
        [step["success"] for step in history_of(0, 2000, **{**COLLAPSES, **RARE}[name] | {"hidden": ()})]
    )


def share_lost(name, named):
    """The share of the success before a collapse that is gone when it is named; None: it never is."""
    begin, success = SUDDEN.get(name, BEGIN), success_of(name)
    return 1.0 if named is None else float(1 - success[named] / success[max(0, begin - 5) : begin].mean())


def seeds_of(name, seed):
    """What draws a run: no two families share their luck."""
    return [seed, zlib.crc32(name.encode())]


def _trace(job):
    groups, name, seed, options = job
    return guarded(history_of(seeds_of(name, seed), groups, **options))


def main(first=0, num=10):
    """Print the table."""
    seeds = range(first, first + num)
    tables = {"healthy": HEALTHY, "held out": HELD_OUT, "collapse": {**COLLAPSES, **RARE}}
    keys = []
    for groups in SIZES:
        for kind, families in tables.items():
            keys += [(groups, kind, name) for name in families]
    jobs = [(groups, name, seed, tables[kind][name]) for groups, kind, name in keys for seed in seeds]
    with ProcessPoolExecutor(2) as pool:
        traces = list(pool.map(_trace, jobs, chunksize=16))
    runs = {key: traces[place * num : (place + 1) * num] for place, key in enumerate(keys)}
    for groups in SIZES:
        for kind in ("healthy", "held out"):
            print(f"{groups} groups, {len(tables[kind]) * num} runs, {kind}: ", end="")
            _print_actions({name: runs[groups, kind, name] for name in tables[kind]})
        for name in tables["collapse"]:
            _print_delays(name, [step for _, step in runs[groups, "collapse", name]])


def _print_actions(runs):
    """How often runs that should be left alone were acted upon. `runs`: family -> (actions, step) of each run."""
    num_acted, num_heavy = Counter(), 0
    for name, traces in runs.items():
        for actions, _ in traces:
            num_acted[name] += bool(actions)
            num_heavy += bool(HEAVY & set(actions))
    print(f"any action {num_acted.total()}, heavy {num_heavy}")
    print("  ", {name: count for name, count in num_acted.items() if count})


def _print_delays(name, steps):
    """How long after it began a collapse was named; None: never."""
    began = SUDDEN.get(name, BEGIN)
    delays = sorted(np.inf if step is None else step - began + 1 for step in steps)
    lost = max(share_lost(name, step) for step in steps)
    gone = "" if name in SUDDEN else f", with at most {lost:.0%} of the success gone"
    print(f"   {name}: named after {delays[0]:g} to {delays[-1]:g} steps{gone}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
