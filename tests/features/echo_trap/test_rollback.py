"""The guard's rollback: everything is as at the last healthy checkpoint, but the draws."""

import json

import pytest
import torch
from transformers import TrainerCallback

from agent_r1_trl.features.echo_trap import Verdict, guard
from agent_r1_trl.features.echo_trap.guard import GUARD, ROLLED_BACK, CollapsedError, RestartError, healthy_checkpoints
from agent_r1_trl.features.journal import ReplayError
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.recording import read_records
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.callbacks import RolloutCallback
from tests.features.echo_trap.echo_helpers import Watch, guard_of, guarded, is_equal, judged_by, weights_of
from tests.trainers.helpers import make_trainer, moving_reference, questions
from tests.trainers.versions import SAMPLED, Weights, gaps_to_named_weights

TRAINERS = {"grpo": MultiTurnGRPOTrainer, "ppo": MultiTurnPPOTrainer}


def look(trainer):
    optimizer = trainer.optimizer.state_dict()
    return {
        "weights": weights_of(trainer.model),
        "momentum": {str(key): entry["exp_avg"].clone() for key, entry in optimizer["state"].items()},
        "rates": [group["lr"] for group in optimizer["param_groups"]],
        "schedule": trainer.lr_scheduler.state_dict()["last_epoch"],
        "micro_step": trainer._step,
        "epoch": trainer.state.epoch,
        "judged": trainer.features["echo_signals"].judge.state_dict(),
        "random": torch.get_rng_state().tolist(),
    }


class Copying(Generator):
    """Says what the script says; has weights of its own, like an engine, and notes when they are not the policy's."""

    def __init__(self, trainer):
        self._scripted, self._policy = trainer.rollouts._generator, trainer.model
        self._own, self.seeds, self.num_stale = {}, [], 0
        trainer.rollouts._generator = self

    def sync(self, model):
        self._own = weights_of(model)
        return True

    async def generate(self, request):
        self.num_stale += not is_equal(self._own, weights_of(self._policy))
        self.seeds.append(request.seed)
        return await self._scripted.generate(request)


def test_a_run_that_recovers_is_neither_rolled_back_nor_ended(tmp_path):
    better = Verdict(state="collapsed", step=0, is_recovering=True)
    trainer = guarded(tmp_path, {3: better, 4: better}, "learning_rate", "rollback", "stop", echo={"patience": 1})
    trainer.train()
    assert guard_of(trainer).state.num_taken == {"learning_rate": 1}  # as in a run with a warning


@pytest.mark.parametrize(("kind", "noticed", "options"), [
    ("grpo", 5, {"save_steps": 2, "max_steps": 6}),  # to step 2: checkpoint-4 is one rollout behind
    ("ppo", 7, {"save_steps": 3, "steps_per_generation": 2, "max_steps": 8}),  # to 3, its rollout used by half
], ids=str)  # fmt: skip
def test_a_run_goes_back_to_weights_optimizer_and_place_of_the_checkpoint_with_other_draws(
    tmp_path, kind, noticed, options
):
    trainer = guarded(tmp_path, {noticed: "collapsed"}, "rollback", trainer=TRAINERS[kind],
                      record_trajectories="jsonl", **options)  # fmt: skip
    copying, watch = Copying(trainer), Watch(trainer, look)
    saved = {"grpo": 2, "ppo": 3}[kind]
    trainer.train()
    steps = [step for step, _ in watch.seen]
    assert steps == [*range(noticed), *range(saved, noticed + 1)], "entered again behind the checkpoint"
    (before, after) = (values for step, values in watch.seen if step == saved)
    assert is_equal(before.pop("weights"), after.pop("weights"))
    assert len(before["momentum"]) > 5 and is_equal(before.pop("momentum"), after.pop("momentum"))
    assert before == after
    first_rollout_again = {"grpo": 5, "ppo": 5}[kind]  # of step 5 in both cases
    records = list(read_records(tmp_path, step=first_rollout_again))
    assert len(records) == {"grpo": 4, "ppo": 8}[kind], "those that were rolled back lie in another folder"
    assert len(list((tmp_path / "trajectories" / "superseded").glob(f"step_{first_rollout_again:06d}.?.jsonl"))) == 1
    assert len(set(copying.seeds)) == len(copying.seeds), "no draw was made twice"
    assert copying.num_stale == 0, "what was sampled, was sampled from the policy's weights"


class Around(RolloutCallback):
    """A user's, around the Trainer's loop."""

    num_runs = 0

    def around_run(self, train):
        self.num_runs += 1
        return train()


def test_a_run_goes_back_inside_a_callback_around_it(tmp_path):
    trainer = guarded(tmp_path, {5: "collapsed"}, "rollback")
    trainer.add_callback(around := Around())
    trainer.train()
    assert (trainer.state.global_step, guard_of(trainer).state.num_rollbacks, around.num_runs) == (6, 1, 2)


def test_a_reference_that_follows_the_policy_goes_back_with_it(tmp_path):
    trainer = guarded(tmp_path, {5: "collapsed"}, "rollback", **moving_reference(tmp_path / "policy"))
    watch = Watch(trainer, lambda trainer: weights_of(trainer.ref_model))
    trainer.train()
    assert [step for step, _ in watch.seen] == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    (before, after), behind = (values for step, values in watch.seen if step == 2), watch.seen[4][1]
    assert is_equal(before, after) and not is_equal(before, behind)


class BrokenStep(TrainerCallback):
    """Lets the first step of a number count as one that was not finite."""

    def __init__(self, step, trainer):
        self.step, self.trainer = step, trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.features["numbers"]._in_a_row, self.step = 1, None


def test_what_is_logged_and_recorded_says_that_the_run_went_back(tmp_path, caplog):
    trainer = guarded(tmp_path, {4: "warning", 5: "collapsed"}, "rollback", record_trajectories="jsonl")
    trainer.add_callback(BrokenStep(5, trainer))
    watch = Watch(trainer, lambda trainer: trainer.features["numbers"]._in_a_row)
    trainer.train()
    assert watch.seen[5:7] == [(2, 0), (3, 0)], "steps that are not finite are counted anew"
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert "goes back to checkpoint-2" in caplog.text and "entropy fell to 0.05" in caplog.text
    assert "Deleted checkpoint-4" in caplog.text, "it was saved at a warning"
    logged = trainer.state.log_history[-2]
    assert (logged["echo/steps"], logged["echo/rollbacks"]) == (9, 1), "5 steps, and 4 behind the checkpoint"
    lines = (tmp_path / "trajectories" / "events.jsonl").read_text().splitlines()
    (event,) = map(json.loads, lines)
    assert {event["step"], event["action"], event["outcome"]} == {5, "rollback", "taken"}
    assert event["signals"] == {"entropy": "entropy fell to 0.05"}


class AfterRollback(Weights):
    """Keeps weights and batches since the run went back."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            super().on_train_begin(args, state, control, **kwargs)
        self.before, self.batches = self.batches, []
        self.of_step = {step: self.weights() for step in range(state.global_step + 1)}


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_that_ran_ahead_is_trained_on_after_a_rollback(tmp_path, cut):
    """It goes back N rollouts further, since so old are the weights of what it was noticed in."""
    kept = AfterRollback()
    options = {"rollouts_ahead": 2, "cut_turns": cut, "max_steps": 8, "save_steps": 1, "callbacks": [kept]}
    kept.trainer = guarded(tmp_path, {6: "collapsed"}, "rollback", **{**SAMPLED, **options, "journal.keep": 9})
    kept.trainer.train()
    (event,) = guard_of(kept.trainer).state.events
    assert (event["step"], "checkpoint-2," in event["text"]) == (6, True)
    assert (len(kept.before), len(kept.batches)) == (6, 6)
    stamps = [{v for item in batch for turn in item.turns for v, _ in turn.versions} for batch in kept.batches]
    assert stamps[0] == {2}, "the weights of the checkpoint alone"
    assert all(min(versions) >= 2 and max(versions) <= 2 + place for place, versions in enumerate(stamps))
    assert max(gap for _, gap, _ in gaps_to_named_weights(kept)) < 1e-5
    before, after = ({item.seed for batch in batches for item in batch} for batches in (kept.before, kept.batches))
    assert not before & after and len(after) == 6 * 4
    ages = [entry["sampling/staleness_max"] for entry in kept.trainer.state.log_history[2:8]]
    assert ages[0] == 0 and max(ages) <= 2
    for step, batch in enumerate(kept.batches, start=2):
        recorded = read_rollout(tmp_path / "journal" / "rank0" / f"rollout_{step:09d}.journal")
        assert [item.request["seed"] for item in recorded.trajectories] == [item.seed for item in batch]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_that_is_killed_while_it_rolls_back_goes_on_as_if_it_were_not(tmp_path, monkeypatch, ahead):
    options = {"rollouts_ahead": ahead, "max_steps": 6 + ahead}
    straight = guarded(tmp_path / "straight", {5 + ahead: "collapsed"}, "rollback", **options)
    straight.train()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(guard, "forget_after", die)
        guarded(tmp_path / "killed", {5 + ahead: "collapsed"}, "rollback", **options).train()
    resumed = guarded(tmp_path / "killed", {}, "rollback", **options)
    resumed.train(resume_from_checkpoint=True)
    assert guard_of(resumed).state.num_rollbacks == 1 and guard_of(resumed).state.num_steps == 9 + 2 * ahead
    assert is_equal(weights_of(straight.model), weights_of(resumed.model))
    plain = make_trainer(tmp_path / "plain", per_device_train_batch_size=4, **options)
    plain.train()
    assert not is_equal(weights_of(plain.model), weights_of(resumed.model)), "the draws are others"


def test_the_last_healthy_checkpoint_outlives_save_total_limit(tmp_path):
    verdicts = {3: "warning", 4: "warning", 5: "collapsing", 6: "collapsing"}
    trainer = guarded(tmp_path, verdicts, "stop", save_steps=1, save_total_limit=2)
    trainer.train()
    kept = ["checkpoint-1", "checkpoint-2", "checkpoint-6"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == kept
    healthy = healthy_checkpoints(tmp_path, guard_of(trainer).state.run)
    assert [path.name for path in healthy] == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.parametrize("updates", (1, 2))
def test_rotation_leaves_a_checkpoint_two_rollouts_behind_in_every_step(tmp_path, updates):
    trainer = guarded(
        tmp_path, {}, "rollback", save_steps=1, save_total_limit=1, max_steps=9, steps_per_generation=updates
    )
    watch = Watch(trainer, lambda trainer: guard_of(trainer)._last_healthy())
    trainer.train()
    for step, folder in watch.seen:
        latest = step + 1 - 2 * updates  # of a collapse that is noticed in the step that begins
        assert (folder is None) == (latest < 1)
        assert folder is None or latest - 2 * updates < int(folder.name[11:]) <= latest
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 3, "the newest and two candidates"


BEST = {"metric_for_best_model": "reward", "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": questions(2)}


@pytest.mark.parametrize(
    ("verdicts", "options", "checkpoint"),
    [
        # Noticed by a warning at step 5: the rollouts of 4 and 5 were bad, checkpoint-4 was saved between them.
        ({5: "warning", 6: "warning", 7: "collapsing"}, {}, 3),
        ({2: "warning", 7: "collapsing"}, {}, 5),  # that warning has passed
        ({5: "collapsed"}, {"save_total_limit": 1, **BEST}, 3),  # kept besides the best one
    ],
    ids=["warned of before", "warned of long before", "the best is kept"],
)
def test_a_run_goes_back_to_what_was_saved_before_the_collapse_was_noticed(tmp_path, verdicts, options, checkpoint):
    trainer = guarded(tmp_path, verdicts, "rollback", save_steps=1, max_steps=8, **options)
    trainer.train()
    (event,) = guard_of(trainer).state.events
    text = f"the run goes back to checkpoint-{checkpoint}, with other draws from there on"
    assert (event["step"], event["text"]) == (max(verdicts), text)
    assert guard_of(trainer).state.noticed_at is None


def test_checkpoints_of_another_run_and_damaged_ones_are_no_place_to_go_back_to(tmp_path):
    guarded(tmp_path, {}, "rollback", max_steps=2).train()
    trainer = guarded(tmp_path, {5: "collapsed"}, "rollback", "stop", save_steps=1, max_steps=5)

    class Damage(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            (tmp_path / f"checkpoint-{state.global_step}" / "optimizer.pt").write_bytes(b"")

    other = json.loads((tmp_path / "checkpoint-2" / GUARD).read_text())["guard"]["run"]
    trainer.add_callback(Damage())
    with pytest.raises(CollapsedError, match="no healthy checkpoint"):
        trainer.train()
    assert guard_of(trainer).state.run != other
    assert [event["outcome"] for event in guard_of(trainer).state.events] == ["not possible", "taken"]


def test_the_replay_of_a_run_that_went_back_says_how_it_is_made(tmp_path):
    guarded(tmp_path / "a", {5: "collapsed"}, "rollback", journal={"keep": 9}).train()
    options = {"per_device_train_batch_size": 4, "max_steps": 6, "journal": {"replay": str(tmp_path / "a")}}
    with pytest.raises(ReplayError, match=r"differs first in seed.*set resume_from_checkpoint to that one"):
        make_trainer(tmp_path / "b", **options).train()
    replayed = make_trainer(tmp_path / "b", **options, **{"echo.actions": ["filter"]})
    replayed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert replayed.state.global_step == 6


def test_a_rollback_under_deepspeed_ends_the_process_and_a_new_one_goes_on(tmp_path):
    trainer = guarded(tmp_path, {4: "collapsed"}, "rollback")
    guard_of(trainer)._needs_new_process = True
    with pytest.raises(RestartError, match="resume_from_checkpoint: true"):
        trainer.train()
    assert trainer.state.global_step == 4 and (tmp_path / "checkpoint-2" / ROLLED_BACK).exists()
    resumed = judged_by(guarded(tmp_path, {}, "rollback"), {})
    resumed.train(resume_from_checkpoint=True)
    assert guard_of(resumed).state.num_rollbacks == 1 and resumed.state.global_step == 6
