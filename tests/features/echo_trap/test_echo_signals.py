"""The monitor in our trainers: what it gathers, judges, logs and goes on from."""

import json
import logging
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from agent_r1_trl.features.echo_trap.feature import EchoSignals, entropy_factor, signal_record
from agent_r1_trl.features.echo_trap.settings import EchoSettings
from agent_r1_trl.features.sampling.settings import SamplingSettings
from agent_r1_trl.testing import call, say
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOTrainer
from agent_r1_trl.trajectory import Trajectory, Turn
from tests.trainers.helpers import make_trainer, questions, two_turns


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer):
    return [parameter.clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("update_layout", ["packed", pytest.param("padded", marks=pytest.mark.matrix)])
def test_every_signal_is_logged_and_the_training_is_the_same_bit_for_bit(tmp_path, update_layout):
    options = {"max_steps": 2, "update_layout": update_layout}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    watched = make_trainer(tmp_path / "watched", echo=True, **options)
    watched.train()
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(watched), strict=True))
    names = "reward reward_std zero_std_share repetition inaction entropy grad_norm"
    for name in names.split():
        assert len(logged(watched, f"echo/{name}")) == 2, name
    assert logged(watched, "echo/reward") == pytest.approx(logged(watched, "reward"))
    assert logged(watched, "echo/reward_std") == pytest.approx(logged(watched, "group/reward_std"))
    assert logged(watched, "echo/entropy") == pytest.approx(logged(watched, "entropy"))
    assert logged(watched, "echo/grad_norm") == pytest.approx(logged(watched, "grad_norm"))
    assert logged(watched, "echo/state") == [0.0, 0.0]
    assert not [name for entry in plain.state.log_history for name in entry if name.startswith("echo/")]


def test_ppo_is_judged_by_the_norm_of_its_policy(tmp_path):
    trainer = make_trainer(tmp_path, trainer=MultiTurnPPOTrainer, echo=True)
    trainer.train()
    assert logged(trainer, "echo/grad_norm") == pytest.approx(logged(trainer, "grad_norm"))
    assert trainer.features["echo_signals"].judge.verdict.step == 1


def test_a_step_on_an_old_rollout_knows_no_new_rollout_signals(tmp_path):
    trainer = make_trainer(tmp_path, echo=True, max_steps=4, num_iterations=2)
    trainer.train()
    assert len(logged(trainer, "echo/reward")) == 2
    assert len(logged(trainer, "echo/entropy")) == 4
    assert trainer.features["echo_signals"].judge.verdict.step == 4


def test_without_a_tool_call_in_the_whole_run_there_is_no_inaction(tmp_path):
    trainer = make_trainer(tmp_path, script=lambda rng, turn: say("x" * rng.randrange(1, 9)), echo=True)
    trainer.train()
    assert logged(trainer, "echo/reward") and not logged(trainer, "echo/inaction")


def test_a_run_that_falls_silent_is_warned_of_by_name(tmp_path, caplog):
    """After five steps nobody calls any more, and all say the same wrong answer."""
    trainer = None

    def script(rng, turn):
        is_late = trainer.state.global_step >= 5
        if turn == 0 and not is_late:
            return call(a=rng.randrange(9), b=rng.randrange(9))
        return say("x") if is_late else say("x" * rng.choice([2, 2, 2, 3]))

    options = {"echo": True, "echo.thresholds": {"window": 4}, "max_steps": 14, "learning_rate": 1e-6}
    trainer = make_trainer(tmp_path, script=script, **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.features["echo_signals"].judge.verdict.state in ("collapsing", "collapsed")
    assert {"zero_std_share", "repetition", "inaction"} <= {*trainer.features["echo_signals"].judge.verdict.signals}
    said = [record.getMessage() for record in caplog.records if "echo_trap" in record.getMessage()]
    assert "after healthy." in said[0] and any("The inaction was 0 when" in text for text in said)
    assert logged(trainer, "echo/state")[-1] == trainer.features["echo_signals"].judge.verdict.severity


def test_a_resumed_run_judges_as_the_run_that_was_not_interrupted(tmp_path):
    options = {"echo": True, "script": two_turns, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", max_steps=4, **options)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", max_steps=4, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.features["echo_signals"].judge.state_dict() == whole.features["echo_signals"].judge.state_dict()
    saved = json.loads((tmp_path / "whole" / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["echo_trap"]["judge"]["step"] == 2


def test_a_run_that_goes_on_with_other_rows_measures_its_baselines_anew(tmp_path, caplog):
    """Rewards of harder rows are lower; against the baseline of the first ones that is a collapse."""
    options = {"echo": True, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path / "first", max_steps=2, **options).train()
    others = questions(9)
    resumed = make_trainer(tmp_path / "others", max_steps=4, train_dataset=others, resume_without=["data"], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert resumed.features["echo_signals"].judge.verdict.step == 2, "of this data"
    assert "are those of other rows" in caplog.text
    caplog.clear()
    again = make_trainer(tmp_path / "again", max_steps=6, train_dataset=others, resume_without=["data"], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "others" / "checkpoint-4"))
    assert again.features["echo_signals"].judge.verdict.step == 4 and "other rows" not in caplog.text


# -------------------------------------------------------------------- what the update trains on is changed


def monitor():
    """The monitor of a trainer that is only pretended, and that trainer."""
    args = SimpleNamespace(echo=EchoSettings(), use_adaptive_entropy=False)
    features = {
        "numbers": SimpleNamespace(num_skipped=0),
        "group_filter": SimpleNamespace(settings=SamplingSettings()),
        "resampling": SimpleNamespace(rounds=0),
    }
    trainer = SimpleNamespace(
        train_dataset=None,
        args=args, state=TrainerState(), last_norms=(1.0,), epsilon_low=0.2, epsilon_high=0.2, beta=0.1,
        entropy_coef=0.0, features=features, _metrics={"train": defaultdict(list)}, _rollout_s=0.0,
    )  # fmt: skip
    trainer.add_metrics = lambda values: [trainer._metrics["train"][name].append(values[name]) for name in values]
    trainer.compared_returns = lambda trajectories: [[item.total_reward] for item in trajectories]
    signals = EchoSignals(args)
    signals.attach(trainer)
    return signals, trainer


def end_rollout(signals, trajectories, group_size, replaced=(), is_kept=None):
    """Tell the monitor of a rollout."""
    position = SimpleNamespace(group_size=group_size)
    parts = {"replaced": replaced, "is_kept": is_kept, "draw_weights": {}, "position": position}
    signals.rollout_end(SimpleNamespace(trajectories=trajectories, **parts), {})


def step(signals, trainer, norm, rollout=((), 4)):
    """One optimizer step on a rollout, and the state after it."""
    if rollout is not None:
        end_rollout(signals, *rollout)
    trainer.last_norms = (norm,)
    trainer.state.global_step += 1
    signals.on_step_end(trainer.args, trainer.state, None)
    return signals.judge.verdict.state


def switch_on_the_filter(trainer):
    trainer.features["group_filter"].settings = SamplingSettings(filter_groups="top_p")


CHANGES = {
    "filter": switch_on_the_filter,
    "rounds": lambda trainer: setattr(trainer.features["resampling"], "rounds", 2),
    "clip": lambda trainer: setattr(trainer, "epsilon_high", 0.28),
    "kl": lambda trainer: setattr(trainer, "beta", 0.0),
    "entropy": lambda trainer: setattr(trainer, "entropy_coef", 0.001),
    "nothing": lambda trainer: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_norms_are_measured_anew_when_an_action_changes_what_they_depend_on(change):
    signals, trainer = monitor()
    states = [step(signals, trainer, 1.0) for _ in range(12)]
    CHANGES[change](trainer)
    states += [step(signals, trainer, 8.0) for _ in range(12)]
    assert set(states[:12]) == {"healthy"}
    assert ("warning" in states) == (change == "nothing")
    if change != "nothing":
        states = [step(signals, trainer, 90.0) for _ in range(3)]
        assert states == ["healthy", "healthy", "collapsing"], "spikes over the new norms are spikes"


def test_the_steps_of_a_rollout_from_before_the_filter_are_still_compared():
    signals, trainer = monitor()
    for _ in range(12):
        step(signals, trainer, 1.0)
    switch_on_the_filter(trainer)
    for _ in range(3):
        step(signals, trainer, 20.0, rollout=None)
    assert "grad_norm" in signals.judge.verdict.signals, "its rows were there before"
    step(signals, trainer, 20.0)
    assert "grad_norm" not in signals.judge.verdict.signals


def test_a_run_that_goes_back_behind_the_action_measures_its_norms_anew_as_well():
    signals, trainer = monitor()
    for _ in range(12):
        step(signals, trainer, 1.0)
    saved = json.dumps(trainer.state.stateful_callbacks)  # of a healthy checkpoint
    switch_on_the_filter(trainer)
    for _ in range(2):  # the run collapses later, and goes back to the checkpoint
        trainer.state.stateful_callbacks = json.loads(saved)
        signals.on_train_begin(trainer.args, trainer.state, None)
        assert {step(signals, trainer, 8.0) for _ in range(12)} == {"healthy"}


def spoken(log_prob, reward=0.0):
    turn = Turn(start=0, end=2, message={"role": "assistant", "content": "x"})
    trajectory = Trajectory(
        prompt_messages=[], prompt_ids=[1], completion_ids=[6, 7], action_mask=[1, 1], logprobs=[log_prob] * 2,
        turn_ids=[0, 0], authors=["policy"] * 2, turns=[turn], stop_reason="done",
    )  # fmt: skip
    trajectory.outcome_reward, trajectory.is_scored = reward, True
    return trajectory


def test_the_entropy_that_is_judged_is_that_of_everything_sampled():
    """Log-probs of -1 on the kept rows, -3 on the filtered ones and -5 on the replaced ones: -3 on average."""
    signals, trainer = monitor()
    rollout, replaced = [spoken(-1.0), spoken(-1.0), spoken(-3.0), spoken(-3.0)], [spoken(-5.0), spoken(-5.0)]
    for entropy, rows in (
        (2.0, (rollout, 2)),
        (6.0, (rollout, 2, replaced, torch.tensor([True, True, False, False]))),
        (2.0, (rollout, 2, (), torch.tensor([False] * 4))),
    ):
        trainer._metrics["train"] = defaultdict(list, entropy=[2.0])
        step(signals, trainer, 1.0, rows)
        assert trainer._metrics["train"]["echo/entropy"] == [pytest.approx(entropy)]
    assert entropy_factor([signal_record(spoken(0.0))] * 2, [True, False]) == 1.0, "no log-probs, no factor"


def test_an_optimizer_step_of_two_rollouts_has_the_signals_of_both():
    signals, trainer = monitor()
    end_rollout(signals, [spoken(-1.0, reward=1.0), spoken(-1.0, reward=0.0)], 2)
    step(signals, trainer, 1.0, ([spoken(-1.0, reward=0.0), spoken(-1.0, reward=0.0)], 2))
    assert trainer._metrics["train"]["echo/reward"] == [0.25]
    assert trainer._metrics["train"]["echo/zero_std_share"] == [0.5], "they are two groups"


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "thresholds",
    [{"windows": 20}, {"reward_std": [0.1, 0.5]}, {"repetition": [0.9, 0.5]}, {"window": 1}, "window: 20"],
    ids=str,
)
def test_thresholds_that_make_no_sense_are_refused_by_name(tmp_path, thresholds):
    with pytest.raises(ValueError, match=r"echo\.thresholds"):
        MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, echo={"thresholds": thresholds})


def test_the_users_thresholds_are_those_that_are_judged_by(tmp_path):
    trainer = make_trainer(tmp_path, echo={"thresholds": {"window": 3, "repetition": [0.6, 0.95]}})
    assert trainer.features["echo_signals"].judge.thresholds.window == 3
    assert trainer.features["echo_signals"].judge.thresholds.repetition[1] == 0.95
    assert math.isclose(trainer.features["echo_signals"].judge.thresholds.solved_success, 0.9)
