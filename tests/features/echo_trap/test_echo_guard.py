"""The guard's milder actions, its dry run, its end, and what is written about each of them."""

import copy
from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl

from agent_r1_trl.cli import main as command
from agent_r1_trl.cli.errors import run_command
from agent_r1_trl.features.echo_trap import Verdict
from agent_r1_trl.features.echo_trap.guard import CollapsedError, EchoGuard
from agent_r1_trl.features.echo_trap.settings import ACTIONS
from agent_r1_trl.recording.events import read_events
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig, MultiTurnPPOTrainer
from agent_r1_trl.trainers.checkpoints import CheckpointError
from tests.features.echo_trap.echo_helpers import Watch, guard_of, guarded, is_equal, weights_of
from tests.trainers.helpers import make_trainer, questions, unfold

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}
SAVES = {"save_strategy": "steps", "save_steps": 2}
WITH_KL = {"beta": 0.1, "peft_config": LoraConfig(r=2, task_type="CAUSAL_LM")}  # the reference is the base model
RATIOS = {"num_iterations": 2}  # with one update per rollout every ratio is 1, and no clip acts


def step(trainer, verdict):
    """One optimizer step is over, and the verdict on it is this; the Trainer's control afterwards."""
    control = TrainerControl()
    trainer.state.global_step += 1
    guard_of(trainer)._judge.script = dict.fromkeys(range(99), verdict)
    guard_of(trainer).on_step_end(trainer.args, trainer.state, control)
    return control


def settings_of(trainer):
    return {name: getattr(trainer, name) for name in ("epsilon_low", "epsilon_high", "beta")}


# -------------------------------------------------------------------- what each action changes


def test_the_clip_is_widened_upwards_and_the_kl_term_switched_off(tmp_path):
    trainer = guarded(tmp_path, {}, "clip", loss_type="dapo", **WITH_KL, **RATIOS)
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.beta) == (0.2, 0.2, 0.1)
    step(trainer, "warning")
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.beta) == (0.2, 0.28, 0.0)
    (event,) = guard_of(trainer).state.events
    assert (
        event["text"]
        == "the clip goes from (0.2, 0.2) to (0.2, 0.28); the KL term is switched off (beta from 0.1 to 0)"
    )


@pytest.mark.parametrize("options", [
    {}, {"loss_type": "cispo", "epsilon_high": 5.0, **RATIOS}, {"loss_type": "sapo", **RATIOS},
    {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, **RATIOS},
    {"epsilon": 0.2, "epsilon_high": 0.3, **RATIOS},
], ids=str)  # fmt: skip
def test_a_clip_that_does_not_act_is_left_alone_and_that_is_said_or_refused(tmp_path, options):
    trainer = guarded(tmp_path, {}, "clip", **WITH_KL, **options)
    before = settings_of(trainer)
    step(trainer, "warning")
    assert settings_of(trainer) == before | {"beta": 0.0}
    assert "the clip stays" in guard_of(trainer).state.events[0]["text"]
    with pytest.raises(ValueError, match=r"echo.actions=\['clip'\].*change nothing"):
        MultiTurnGRPOConfig(**CPU, echo={"actions": ["clip"]}, beta=0.0, **options)
    fix = {"loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, **RATIOS}
    MultiTurnGRPOConfig(**CPU, echo={"actions": ["clip"]}, beta=0.0, **options | fix)


def test_a_switched_off_kl_term_is_taken_back_after_patience_and_where_the_entropy_explodes(tmp_path):
    high = Verdict(state="collapsing", step=1, is_entropy_high=True)
    trainer = guarded(tmp_path, {}, "clip", **WITH_KL)
    before = settings_of(trainer)
    for ends in (["healthy", "healthy"], [high]):
        for _ in range(2):
            step(trainer, "warning")
        assert trainer.beta == 0.0
        for verdict in ends:
            assert settings_of(trainer) != before
            step(trainer, verdict)
        assert settings_of(trainer) == before
    for _ in range(5):
        step(trainer, high)
    assert settings_of(trainer) == before, "it does not fit"
    events = [event["outcome"] for event in guard_of(trainer).state.events]
    assert events == ["taken", "undone"] * 2


def test_a_kl_term_comes_back_where_a_new_rollout_begins_because_this_one_has_no_reference(tmp_path):
    options = {**WITH_KL, "num_iterations": 2, "loss_type": "dapo", "max_steps": 6}
    trainer = guarded(tmp_path, {1: "warning"}, "clip", **options)
    watch = Watch(trainer, lambda trainer: trainer.beta)
    trainer.train()
    assert watch.seen == [(0, 0.1), (1, 0.0), (2, 0.0), (3, 0.0), (4, 0.1), (5, 0.1)]


class Records(TrainerCallback):
    """The weights after each step."""

    def __init__(self, trainer):
        self.trainer, self.weights = trainer, [weights_of(trainer.model)]
        trainer.add_callback(self)

    def on_step_end(self, *args, **kwargs):
        self.weights.append(weights_of(self.trainer.model))


def test_the_learning_rates_of_policy_and_critic_are_halved_for_some_steps_and_the_schedule_goes_on(tmp_path):
    options = {
        "trainer": MultiTurnPPOTrainer, "max_steps": 3, "lr_scheduler_type": "linear", "save_strategy": "no",
        "critic_learning_rate": 1e-2, "weight_decay": 0.0, "optim": "sgd", "per_device_train_batch_size": 4,
    }  # fmt: skip
    plain = make_trainer(tmp_path / "plain", **options)
    runs = [Records(plain)]
    plain.train()
    halved = guarded(tmp_path / "halved", {1: "warning"}, "learning_rate", echo={"rate_steps": 1}, **options)
    halved.model.load_state_dict(runs[0].weights[0])  # the critics begin alike
    runs.append(Records(halved))
    halved.train()
    (before, plain_after), (same, halved_after) = ((run.weights[1], run.weights[2]) for run in runs)
    assert is_equal(before, same), "the first step is the same"
    for part in ("critic_backbone.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        whole, half = plain_after[part] - before[part], halved_after[part] - before[part]
        assert whole.abs().max() > 0
        torch.testing.assert_close(half, whole / 2, rtol=1e-2, atol=1e-7)
    rates = [[entry["learning_rate"] for entry in run.trainer.state.log_history if "loss" in entry] for run in runs]
    assert rates[1] == pytest.approx([rates[0][0], rates[0][1] / 2, rates[0][2]])
    assert [group["lr"] for group in halved.optimizer.param_groups] == [
        group["lr"] for group in plain.optimizer.param_groups
    ]


def test_a_resumed_run_goes_on_with_the_guards_state_and_its_lower_rate(tmp_path):
    verdicts, options = {3: "warning", 5: "warning"}, {"echo.rate_steps": 3, **WITH_KL}
    straight = guarded(tmp_path, verdicts, "learning_rate", "clip", **options)
    straight.train()
    resumed = guarded(tmp_path, verdicts, "learning_rate", "clip", **options)
    guard_of(resumed)._judge.num_all = 4
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert is_equal(weights_of(straight.model), weights_of(resumed.model))
    assert resumed.beta == 0.0
    states = [asdict(guard_of(trainer).state) for trainer in (straight, resumed)]
    for state in states:
        for event in state["events"]:
            del event["time"]
    assert states[0] == states[1]
    again = guarded(tmp_path, {}, "learning_rate", "clip", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.beta == 0.0 and guard_of(again).learning_rate_factor == 1.0
    guard_of(again).around_run(lambda: None)
    assert again.beta == 0.1, "a new run begins without what the last one has changed"


@pytest.mark.slow
def test_a_rollout_that_was_scored_without_the_reference_is_not_trained_on_with_a_kl_term(tmp_path):
    """The second rollout, of the steps 3 and 4, is half used at the checkpoint."""
    options = {**WITH_KL, "num_iterations": 2, "loss_type": "dapo", "save_steps": 3, "max_steps": 4}
    trainer = guarded(tmp_path, {1: "warning"}, "clip", **options | {"max_steps": 3})
    trainer.train()
    assert trainer.beta == 0.0 and "ref_per_token_logps" not in trainer._buffered_inputs[0]
    plain = {"per_device_train_batch_size": 4, "save_strategy": "steps", **options}
    saved = str(tmp_path / "checkpoint-3")
    with pytest.raises(CheckpointError, match=r"beta=0\.1.*echo.actions.*resume_without: \[rollout\]"):
        make_trainer(tmp_path, **plain).train(resume_from_checkpoint=saved)
    with pytest.raises(CheckpointError, match=r"beta=0\.1"):
        guarded(tmp_path, {}, "clip", echo={"dry_run": True}, **options).train(resume_from_checkpoint=saved)
    for cured in (
        guarded(tmp_path, {}, "clip", **options),
        make_trainer(tmp_path, resume_without=["rollout"], **plain),
    ):
        cured.train(resume_from_checkpoint=saved)
        assert cured.state.global_step == 4
    trainer.train()  # a new run, with the KL term, in the middle of that rollout
    assert trainer.state.global_step == 3 and trainer.beta == 0.1


def test_every_further_rollback_lowers_the_learning_rate_once_more(tmp_path):
    guard = guard_of(guarded(tmp_path, {}, "learning_rate", "rollback", echo={"rate_factor": 0.5}))
    guard.state.rate_until = 20
    factors = []
    for guard.state.num_rollbacks in (0, 1, 2):
        factors.append(guard.learning_rate_factor)
    assert factors == [0.5, 0.5, 0.25]
    guard.state.num_steps = 20
    assert guard.learning_rate_factor == 1.0


# -------------------------------------------------------------------- watching first


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(tmp_path, caplog):
    verdicts = dict.fromkeys(range(3, 9), "collapsed")
    options = {**WITH_KL, "per_device_train_batch_size": 4, "max_steps": 6, **SAVES}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    watched = guarded(
        tmp_path / "watched", verdicts, "clip", "learning_rate", "rollback", "stop",
        echo={"dry_run": True, "max_rollbacks": 1}, **{**options, "save_steps": 1},
    )  # fmt: skip
    watched.train()
    assert is_equal(weights_of(plain.model), weights_of(watched.model))
    assert is_equal(plain.optimizer.state_dict()["state"][0], watched.optimizer.state_dict()["state"][0])
    events = [(event["step"], event["action"], event["outcome"]) for event in guard_of(watched).state.events]
    assert events == [
        (3, "clip", "dry run"), (3, "learning_rate", "dry run"), (3, "rollback", "dry run"), (5, "stop", "dry run"),
    ]  # fmt: skip
    assert "collapsed: rollback (dry run): the run goes back to checkpoint-1, with other draws" in caplog.text
    logged = [entry for entry in watched.state.log_history if "loss" in entry]
    assert logged[2]["echo/action"] == ACTIONS["rollback"]
    # What was only said is still to be done once the user has seen it.
    real = guarded(tmp_path / "watched", {7: "warning"}, "learning_rate", **{**options, "max_steps": 8})
    guard_of(real)._judge.num_all = 6
    real.train(resume_from_checkpoint=True)
    assert guard_of(real).state.events[-1]["outcome"] == "taken" and len(guard_of(real).state.events) == 5


# -------------------------------------------------------------------- the end


def test_stop_ends_the_run_with_a_report_that_names_the_last_healthy_checkpoint(tmp_path, capsys):
    verdicts = {4: "warning", 5: "collapsed", 6: "collapsed"}
    trainer = guarded(tmp_path, verdicts, "learning_rate", "stop", record_trajectories="jsonl")
    with pytest.raises(CollapsedError) as caught:
        trainer.train()
    message = str(caught.value)
    assert "ended the run at step 5" in message and "entropy is gone" in message
    assert f"last healthy checkpoint is {tmp_path / 'checkpoint-2'}" in message and "learning_rate (step 4)" in message
    saved = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert saved == {"checkpoint-2", "checkpoint-4"}, "a collapsed model is not saved"
    assert trainer.state.log_history[-2]["echo/action"] == ACTIONS["stop"]

    assert [event["action"] for event in read_events(tmp_path)] == ["learning_rate", "stop"]
    assert command(["view", str(tmp_path), "--events"]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate" in shown and "stop" in shown and "entropy fell to 0.05" in shown

    assert "resume_without: [rollout] also more num_generations" in message
    others = {"num_generations": 2, "resume_without": ["rollout"], "max_steps": 3, "per_device_train_batch_size": 4}
    cured = make_trainer(tmp_path, **others)
    cured.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert cured.state.global_step == 3

    def run(argv):
        raise CollapsedError(message)

    assert run_command(run, []) == 4
    assert "last healthy checkpoint" in capsys.readouterr().err


def test_a_run_that_was_stopped_saves_nothing_at_the_end_of_its_epoch_either(tmp_path):
    trainer = guarded(tmp_path, {2: "collapsed"}, "stop", save_strategy="epoch")
    could_not = {"action": "rollback", "step": 1, "outcome": "not possible", "text": "", "signals": {}, "state": ""}
    trainer.add_callback(BeforeTheFirstStep(lambda: guard_of(trainer).state.events.append(could_not)))
    with pytest.raises(CollapsedError, match=r"Actions before: none\."):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


class BeforeTheFirstStep(TrainerCallback):
    """Does something then."""

    def __init__(self, act):
        self.on_train_begin = lambda *args, **kwargs: act()


# -------------------------------------------------------------------- what is refused


REFUSED = [
    ("echo.actions", {"echo.actions": ["undo"]}, {"echo.actions": ["stop"]}),
    ("echo.actions", {"echo.actions": ["all", "stop"]}, {"echo.actions": ["all"]}),
    ("echo.actions", {"echo.actions": ["stop", "learning_rate"]}, {"echo.actions": ["learning_rate", "stop"]}),
    ("rollback", {"echo.actions": ["rollback"], "save_strategy": "no"}, SAVES),
    ("rollback", {"echo.actions": ["rollback"], "save_only_model": True, **SAVES}, {"save_only_model": False}),
    ("rollback", {"echo.actions": ["rollback"], "journal.replay": "other", **SAVES}, {"journal.replay": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "fix"), REFUSED, ids=str)
def test_what_the_guard_cannot_do_is_refused_by_name_and_the_fix_works(name, options, fix):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        MultiTurnGRPOConfig(**unfold(CPU | options))
    MultiTurnGRPOConfig(**unfold(copy.deepcopy(CPU | options | fix)))


def test_the_learning_rate_is_refused_or_left_out_under_deepspeed(tmp_path, caplog):
    trainer = guarded(tmp_path, {}, "learning_rate")
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"echo.actions=.*'learning_rate'.*DeepSpeed"):
        EchoGuard().attach(trainer)
    trainer.args.echo.actions, guard = ["all"], EchoGuard()
    guard.attach(trainer)
    assert guard._actions[-1] == "stop" and "learning_rate" not in guard._actions
    assert "leaves 'learning_rate' out" in caplog.text


def test_all_takes_what_the_run_can_take_and_says_what_it_leaves_out(tmp_path, caplog):
    trainer = guarded(tmp_path, {}, "all", save_strategy="no", save_steps=500)
    assert "rollback" not in guard_of(trainer)._actions and guard_of(trainer)._actions[-1] == "stop"
    assert "leaves 'rollback' out, which needs whole checkpoints" in caplog.text
    assert "Set save_strategy: steps" in caplog.text


def test_a_filter_that_would_change_nothing_is_refused_or_left_out(tmp_path, caplog):
    stream = {"train_dataset": questions().to_iterable_dataset()}
    options = {"sampling.filter_groups": "top_p", "save_strategy": "no", **stream}
    for others in (options, {"sampling.filter_groups": "top_p", "sampling.resample_rounds": 1}):
        with pytest.raises(ValueError, match=r"echo.actions=\['filter'\].*would change nothing"):
            guarded(tmp_path, {}, "filter", **others)
    trainer = guarded(tmp_path, {}, "all", **options)
    assert "filter" not in guard_of(trainer)._actions and "leaves 'filter' out, which would change" in caplog.text
    del options["sampling.filter_groups"]
    step(trainer := guarded(tmp_path, {}, "filter", **options), "warning")
    assert (
        trainer.features["group_filter"].settings.filter_groups == "top_p"
        and trainer.features["resampling"].rounds == 0
    )


def test_filter_and_dynamic_sampling_are_switched_on_for_the_next_rollout(tmp_path):
    options = {"per_device_train_batch_size": 8, "max_steps": 3}
    trainer = guarded(tmp_path, {1: "warning", 2: "warning"}, "filter", **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["filter/kept_share" in entry for entry in logged] == [False, True, True]
    assert (
        trainer.features["group_filter"].settings.filter_groups == "top_p"
        and trainer.features["resampling"].rounds == 2
    )
    (event,) = guard_of(trainer).state.events
    assert event["text"].startswith("groups are filtered by top_p 0.9; groups without signal")
    with pytest.raises(ValueError, match="'filter' compares the trajectories of a group"):
        MultiTurnPPOConfig(**CPU, echo={"actions": ["filter"]})
    MultiTurnPPOConfig(**CPU, echo={"actions": ["filter"]}, num_generations=2)
