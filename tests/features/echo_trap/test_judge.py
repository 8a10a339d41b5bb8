"""The judgement on runs whose fate is known: simulated ones, and a few written by hand."""

import json

import numpy as np
import pytest

from agent_r1_trl.features.echo_trap import EchoTrapJudge, Thresholds, judge
from tests.features.echo_trap.families import BEGIN, COLLAPSES, HEALTHY, LINE, SLOW, history_of, ramp

NAMED_KEYS = ("reward", "reward_std", "zero_std_share", "entropy", "grad_norm", "repetition", "inaction")
SEEDS = range(3)


def states(history, thresholds=None):
    judge = EchoTrapJudge(thresholds)
    return [judge.update(step).state for step in history]


def first(states, *wanted):
    """Number of steps before the first state of these; None if there is none."""
    return next((step for step, state in enumerate(states) if state in wanted), None)


def has_collapsed(states):
    return {"collapsing", "collapsed"} & {*states}


def hidden_from(history, *keys):
    return [{key: value for key, value in step.items() if key not in keys} for step in history]


# -------------------------------------------------------------------- runs whose fate is known


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["converges", "saturated from the start"])
def test_a_run_that_has_solved_its_task_has_converged(name, seed):
    for hidden in ((), ("success",), ("success", "reward_max", "reward_min")):
        assert states(hidden_from(history_of(seed, 8, **HEALTHY[name]), *hidden))[-1] == "converged"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collapse_after_convergence_is_noticed(seed):
    skill = np.minimum(14 * LINE, 7) - 15 * ramp(100, 30)
    found = states(history_of(seed, 8, skill=skill, entropy=np.exp(-np.clip(skill, 0, 7) / 2.5), hidden=("success",)))
    assert found[95] == "converged"
    assert not has_collapsed(found[:100])
    assert first(found[100:], "collapsing", "collapsed") <= 30
    assert found[-1] in ("collapsing", "collapsed")


@pytest.mark.parametrize("seed", SEEDS)
def test_doing_nothing_because_acting_is_penalised_is_noticed_though_the_reward_rises(seed):
    """Each call costs more than its success earns, so that the reward rises while success is given up."""
    returns = ("reward_max", "reward_min", "return_with_call", "return_without_call")
    history = hidden_from(history_of(seed, 8, **COLLAPSES["slow inaction"]), *returns)
    for step in history:
        step["reward"] -= 1.5 * (1 - step["inaction"])
    assert history[-1]["reward"] > history[0]["reward"]
    verdict = judge(history)
    assert "success" in verdict.signals
    assert "without a tool call has risen" in verdict.signals["inaction"].reason
    assert states(history)[-1] == "collapsed"
    assert not has_collapsed(states(hidden_from(history, "success"))), "without success nothing says that it is lost"


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_that_say_the_same_while_nothing_was_learnt_are_a_collapse(seed):
    """The reward stays where it was: the early form, which a plateau hides."""
    found = states(history_of(seed, 16, echo=SLOW, entropy=1 - 0.97 * SLOW))
    assert first(found, "warning") > BEGIN
    assert found[-1] in ("collapsing", "collapsed")


# -------------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sparse_reward_that_is_often_missed_is_no_collapse(seed):
    history = history_of(seed, 4, easy=-4.0, size=4, hidden=("success",))
    assert np.mean([step["reward"] == 0 for step in history]) > 0.4
    assert {*states(history)} <= {"healthy", "warning"}


@pytest.mark.parametrize("factor", [6.0, 50.0, float("inf")])
def test_one_spike_of_the_gradient_or_one_every_few_steps_is_nothing_whatever_its_size(factor):
    history = history_of(0, 8, skill=LINE)[:80]
    for step in (40, 60, 63, 66):
        history[step]["grad_norm"] = 0.3 * factor
    assert {*states(history)} == {"healthy"}


def test_several_gradient_norms_that_are_not_finite_are_critical():
    steps = [{"reward": 0.5, "grad_norm": 1.0}] * 20 + [{"reward": 0.5, "grad_norm": float("inf")}] * 3
    assert states(steps)[-3:] == ["healthy", "healthy", "collapsing"]
    verdict = judge(steps)
    assert verdict.signals["grad_norm"].level == "critical"
    assert verdict.signals["grad_norm"].value == float("inf")


@pytest.mark.parametrize("late", [0.05, 3.0])
def test_entropy_alone_is_a_warning_and_critical_together_with_another_signal(late):
    """As in a bandit after a cold start, whose entropy doubled while the reward rose slowly."""
    steps = [{"reward": 0.5, "entropy": 1.0, "repetition": 0.1}] * 20
    alone = steps + [{"reward": 0.5, "entropy": late, "repetition": 0.1}] * 40
    assert {*states(alone)} == {"healthy", "warning"}
    assert judge(alone).signals["entropy"].level == "critical"
    assert judge(steps + [{"reward": 0.5, "entropy": late, "repetition": 0.7}] * 40).state == "collapsing"
    assert judge(alone).is_exploding == (late > 1)
    assert judge(steps + alone[20:22]).is_exploding == (late > 1), "a high one is known without patience"


# -------------------------------------------------------------------- numbers by hand


def test_the_baseline_is_the_mean_of_the_first_ten_steps_and_the_average_forgets_a_fifth_per_step():
    limits = Thresholds(noise=0, warning_steps=1)
    steps = [{"reward": 0.5, "reward_std": std} for std in (0.3, 0.5) * 5] + [{"reward": 0.5, "reward_std": 0.0}] * 4
    assert states(steps, limits)[-4:] == ["healthy", "healthy", "healthy", "warning"]
    verdict = judge(steps, limits)  # 0.8^3 = 0.512, 0.8^4 = 0.4096
    assert verdict.step == 14
    assert verdict.signals["reward_std"].value == pytest.approx(0.4096)
    assert verdict.signals["reward_std"].threshold == 0.5
    assert verdict.reason == (
        "The standard deviation of the rewards inside groups is 41% of its baseline (warning below 50%)."
    )


def test_a_drop_of_the_reward_is_measured_against_its_best_or_the_way_from_its_floor():
    limits = Thresholds(noise=0, reward_noise=0, warning_steps=1)
    for start, best, drop in ((0.0, 1.0, 0.2), (-1.0, 1.0, 0.1)):  # scales of 1 and of 2
        steps = [{"reward": start}] * 10 + [{"reward": best}] * 200 + [{"reward": best - 1.0}]
        verdict = judge(steps, limits)  # an outlier so far; confirmed, the average falls by a fifth of 1
        assert verdict.severity == (2 if drop > 0.2 else 0)
        found = judge([*steps, {"reward": best - 1.0}], limits).signals
        assert ("reward" in found) == (start == 0.0)
    assert found == {} and judge([*steps, *steps[-1:] * 3], limits).signals["reward"].value == pytest.approx(0.244)


def test_a_warning_takes_three_steps_and_recovery_five():
    steps = [{"repetition": 0.0}] * 10 + [{"repetition": 1.0}] * 5
    limits = Thresholds(noise=0, ema_decay=0.0)
    assert states(steps, limits)[10:] == ["healthy", "healthy", "warning", "warning", "warning"]
    found = states(steps + [{"repetition": 0.0}] * 6, limits)[15:]
    assert found == ["warning"] * 4 + ["healthy"] * 2


def test_a_signal_ends_with_the_value_that_is_back_inside_its_threshold():
    """So what was excused while a task was solved is no second kind of signal once the task gets harder."""
    limits = Thresholds(noise=0, ema_decay=0.0)
    steps = [{"repetition": 0.0}] * 10 + [{"repetition": 0.6}] * 3
    assert [*judge(steps, limits).signals] == ["repetition"]
    assert [*judge([*steps, {"repetition": 0.49}], limits).signals] == []


# -------------------------------------------------------------------- what is unknown


def test_a_missing_key_none_and_nan_are_all_unknown_and_never_zero():
    full = [{key: 0.5 for key in NAMED_KEYS}] * 20
    for nothing in ({}, dict.fromkeys(NAMED_KEYS), dict.fromkeys(NAMED_KEYS, float("nan"))):
        verdict = judge([*full, *[nothing] * 60])
        assert (verdict.state, dict(verdict.signals), verdict.step) == ("healthy", {}, 80)


@pytest.mark.parametrize(
    "family", [COLLAPSES["slow echo after learning"], HEALTHY["converges"]], ids=["slow", "converges"]
)
def test_gaps_change_no_verdict(family):
    """A step without a new rollout knows its entropy and its norm alone."""
    history = history_of(0, 8, **family)
    gaps = [item for step in history for item in (step, {"grad_norm": step["grad_norm"]})]
    assert states(gaps)[-1] == states(history)[-1]
    assert states(gaps)[::2][:30] == states(history)[:30]


def test_without_reward_and_success_lost_variety_is_at_most_a_warning():
    steps = [{"reward_std": 0.4, "entropy": 1.0}] * 20 + [{"reward_std": 0.0, "entropy": 0.0}] * 60
    assert {*states(steps)} == {"healthy", "warning"}


def test_a_signal_that_is_unknown_for_long_is_forgotten():
    steps = [{"reward": 0.5, "repetition": 0.0}] * 10 + [{"reward": 0.5, "repetition": 1.0}] * 40
    assert judge(steps).state == "collapsing"
    assert judge(steps + [{"reward": 0.5}] * 60).state == "healthy"


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(ValueError, match="rewards_std"):
        judge([{"rewards_std": 0.1}])


# -------------------------------------------------------------------- purity


def test_the_same_history_gives_the_same_verdict_step_by_step_and_after_a_resumption():
    history = history_of(3, 8, **COLLAPSES["slow echo after learning"])
    whole, resumed = EchoTrapJudge(), EchoTrapJudge()
    for number, step in enumerate(history):
        verdict = whole.update(step)
        if number % 30 == 0:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = EchoTrapJudge()
            resumed.load_state_dict(state)
        assert resumed.update(step) == verdict
        if number % 60 == 0:
            assert judge(history[: number + 1]) == verdict


# -------------------------------------------------------------------- what provoked collapses taught


def test_norms_of_ordinary_size_are_no_spikes_in_a_run_whose_norms_have_gone_to_nothing():
    steps = [{"reward": 0.9, "grad_norm": 1.0}] * 10 + [{"reward": 0.9, "grad_norm": 0.001}] * 60
    assert judge([*steps, *[{"reward": 0.9, "grad_norm": 0.4}] * 5]).state == "healthy"  # 400 times the median
    assert judge([*steps, *[{"reward": 0.9, "grad_norm": 1.1}] * 5]).state == "collapsing"  # 11 times a tenth of 1


def test_two_rollouts_that_are_critical_by_themselves_are_a_collapse_without_waiting_for_the_average():
    steps = [{"success": 0.8 + 0.02 * (k % 3), "zero_std_share": 0.1 * (k % 3)} for k in range(30)]
    gone = {"success": 0.0, "zero_std_share": 1.0}
    assert states([*steps, gone, gone])[-2:] == ["healthy", "collapsed"]
    verdict = judge([*steps, gone, gone])
    assert {*verdict.signals} == {"success", "zero_std_share"}
    assert {*states([*steps, gone, *steps])} == {"healthy"}


@pytest.mark.parametrize("key", ["reward", "entropy", "reward_std", "success"])
@pytest.mark.parametrize("value", [30.0, -30.0, 0.0])
@pytest.mark.parametrize("place", [4, 8, 30])
def test_one_outlier_of_a_signal_is_nothing_even_while_its_baseline_is_measured(key, value, place):
    steps = [{"reward": 0.6, "reward_std": 0.4, "entropy": 1.0, "success": 0.6} for _ in range(60)]
    for number, step in enumerate(steps):
        step.update({name: step[name] + 0.02 * (number % 3) for name in step})
    steps[place][key] = value
    assert {*states(steps)} == {"healthy"}


@pytest.mark.parametrize("keys", [("zero_std_share",), ("entropy",), ("inaction",), ("entropy", "inaction")], ids=str)
@pytest.mark.parametrize("goal", ["success", "reward"])
def test_a_policy_that_is_dead_from_step_4_is_noticed_without_a_baseline_and_stays_dead(keys, goal):
    alive = {goal: 0.4, "zero_std_share": 0.1, "entropy": 0.5, "inaction": 0.1}
    dead = {goal: 0.003, "zero_std_share": 1.0, "entropy": 6.0, "inaction": 1.0}  # one of hundreds still succeeds
    names = (goal, *keys)
    steps = [{name: alive[name] for name in names}] * 3 + [{name: dead[name] for name in names}] * 40
    found = states(steps)
    assert first(found, "collapsed") == (7 if keys == ("zero_std_share",) else 5)  # of 0
    assert {*found[7:]} == {"collapsed"}
    assert judge(steps[:9]).is_exploding == ("entropy" in keys)
    one_sign = [{name: alive[name] if name != goal else step[goal] for name in names} for step in steps[:10]]
    assert {*states(one_sign)} == {"healthy"}


def test_an_earlier_crash_does_not_make_a_later_one_look_like_chance():
    steps = [{"success": 0.8 + 0.02 * (k % 3)} for k in range(30)]
    for place in (15, 18, 21):
        steps[place] = {"success": 0.0}
    assert states([*steps, {"success": 0.0}, {"success": 0.0}])[-2:] == ["healthy", "collapsing"]


def test_a_run_recovers_once_it_has_made_up_a_third_of_what_it_had_lost():
    limits = Thresholds(ema_decay=0.0)
    steps = [{"success": 0.9 + 0.01 * (k % 2)} for k in range(20)] + [{"success": 0.31}] * 10
    for later, expected in ((0.5, False), (0.52, True)):  # a third of 0.6 is 0.2
        assert not judge([*steps, {"success": later}], limits).is_recovering, "one outlier is none"
        assert judge([*steps, {"success": later}, {"success": later}], limits).is_recovering is expected
    assert not judge(steps[:20], limits).is_recovering  # nothing was lost


def test_one_kind_of_signal_alone_is_never_answered():
    steps = [{"reward": 0.5, "entropy": 1.0, "repetition": 0.1, "reward_std": 0.4}] * 20
    for last, state, answered in (
        ({"entropy": 3.0}, "warning", "healthy"),
        ({"repetition": 1.0}, "collapsing", "healthy"),
        ({"entropy": 0.05, "repetition": 0.7}, "collapsing", "collapsing"),
        ({"reward": 0.0, "repetition": 0.7}, "collapsed", "warning"),  # of what the policy does, nothing is critical
    ):
        verdict = judge(steps + [{**steps[0], **last}] * 40)
        assert (verdict.state, verdict.answered) == (state, answered)
    goal_alone = [{"success": 0.5}] * 20 + [{"success": 0.0}] * 20
    verdict = judge(goal_alone)
    assert (verdict.state, verdict.answered) == ("collapsing", "healthy")
    nobody_succeeds = [{"success": 0.4, "zero_std_share": 0.1}] * 4 + [{"success": 0.0, "zero_std_share": 1.0}] * 9
    verdict = judge(nobody_succeeds)
    assert (verdict.state, verdict.answered, verdict.num_kinds) == ("collapsed", "healthy", 1)


@pytest.mark.parametrize("late", [0.2, 1.8])
def test_a_fall_of_success_is_a_collapse_as_soon_as_the_policy_samples_otherwise_than_at_its_best(late):
    before = [{"success": 0.6 + 0.002 * k, "reward": 0.6 + 0.002 * k, "entropy": 1.0} for k in range(60)]
    fallen = {"success": 0.5, "reward": 0.5}
    assert judge(before + [{**fallen, "entropy": late}] * 12).state == "collapsing"
    assert judge(before + [{**fallen, "entropy": 1.0}] * 12).answered == "healthy"
