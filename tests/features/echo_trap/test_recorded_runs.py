"""The judgement on recorded histories of our own healthy runs (`recorded_runs.py` says how they are made)."""

import pytest

from agent_r1_trl.features.echo_trap import EchoTrapJudge
from tests.features.echo_trap.recorded_runs import FOLDER, read

RUNS = sorted(FOLDER.glob("*.json"))
ALARMS = {"collapsing", "collapsed"}


def states(history):
    judge = EchoTrapJudge()
    return [judge.update(step).state for step in history]


def collapse_of(history):
    """What comes if the policy says one wrong thing from now on, in the units of this run."""
    last = {key: value for step in history for key, value in step.items() if value is not None}
    worst = min(value for step in history for key in ("reward", "reward_min") if (value := step.get(key)) is not None)
    echo = {"reward": worst, "success": 0.0, "reward_std": 0.0, "zero_std_share": 1.0, "entropy": 0.0}
    echo |= {"grad_norm": 0.0, "repetition": 1.0}
    return [{key: echo.get(key, value) for key, value in last.items()}] * 40


def test_there_are_runs_of_several_recipes_with_both_algorithms():
    assert len(RUNS) >= 8
    assert len({path.stem.split("-")[0] for path in RUNS}) >= 3
    assert {"grpo", "ppo"} <= {path.stem.split("-")[1] for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_healthy_run_is_at_no_step_called_collapsing(path):
    found = states(read(path))
    assert len(found) >= 20
    assert not ALARMS & {*found}, [step for step, state in enumerate(found) if state in ALARMS]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_same_run_is_called_collapsed_once_it_has_collapsed(path):
    history = read(path)
    assert states(history + collapse_of(history))[-1] in ALARMS
