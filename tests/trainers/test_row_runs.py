"""Trajectories of several rows in a run that is stopped or rolled back: it ends like one that never was."""

import pytest
import torch

from agent_r1_trl.features.echo_trap import guard
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.effort import nightly
from tests.features.echo_trap.echo_helpers import guard_of, guarded, is_equal, weights_of
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.test_rows import three_turns

WINDOW = {"context.policy": "window", "context.turns": 1, "max_turns": 4}
BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 500}
HALF = {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5}
PPO = {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1}


def train(folder, checkpoint=None, **options):
    """A finished run; `trainer.scored` holds the rows of each rollout, `num_sampled` counts turns from the sampler."""
    defaults = {"script": three_turns, "env": AddEnv, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    defaults |= {"per_device_train_batch_size": 4, "num_generations": 2}
    trainer = make_trainer(folder, **{**defaults, **WINDOW, **options})
    trainer.scored, score = [], trainer._generate_and_score_completions

    def keep(inputs):
        output = score(inputs)
        assert max(len(item.rows) for item in trainer.last_trajectories) > 1
        trainer.scored.append(dict(output))
        return output

    trainer._generate_and_score_completions = keep
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
    trainer.num_sampled = len(trainer.rollouts._generator.requests)
    return trainer


def assert_same_rows(scored, expected):
    assert len(scored) == len(expected) > 0
    for rows, others in zip(scored, expected, strict=True):
        assert rows.keys() == others.keys() and len(rows["completion_ids"]) > 0
        for name, value in rows.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, others[name]), name


def assert_same_end(resumed, whole):
    assert is_equal(weights_of(resumed.model), weights_of(whole.model))
    steps = [
        {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in run.state.log_history if "loss" in entry}
        for run in (resumed, whole)
    ]
    assert steps[0] == steps[1]


UNDER_WAY = {
    "grpo": {"loss_type": "grpo", **HALF, **BY_TOKENS},
    "ppo": {**PPO, "update_layout": "packed", "num_iterations": 2, "steps_per_generation": 2},
}


@pytest.mark.parametrize("kind", UNDER_WAY)
def test_a_run_goes_on_in_the_middle_of_a_rollout(tmp_path, kind):
    """Four optimizer steps train on a rollout; the checkpoint stands between them, the next rollout behind it."""
    options = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 5, "journal": False}
    options |= UNDER_WAY[kind]
    whole = train(tmp_path, **options)
    assert len(whole.scored) == 2
    resumed = train(tmp_path, "checkpoint-2", **options)
    assert_same_rows(resumed.scored, whole.scored[1:])
    assert_same_end(resumed, whole)


REPLACED = {"sampling.resample_rounds": 3, "per_device_train_batch_size": 8, "journal.keep": 99}
AHEAD = {"rollouts_ahead": 2}
JOURNALED = {
    "resampled": {**REPLACED, "sampling.curriculum": True},
    "ahead": {**AHEAD, **PPO, **BY_TOKENS},
    "both": {**REPLACED, **AHEAD, "sampling.curriculum": True},
}


@pytest.mark.parametrize("kind", ["both", *nightly("resampled", "ahead")])
def test_a_resumed_run_has_the_same_rows_and_samples_nothing_again(tmp_path, kind, caplog):
    options = {"train_dataset": questions(40), **JOURNALED[kind]}
    whole = train(tmp_path, **options)
    rounds = [path for path in (tmp_path / "journal" / "rank0").iterdir() if path.name.count(".") == 2]
    assert bool(rounds) == ("sampling.resample_rounds" in options), "some groups were replaced"
    resumed = train(tmp_path, "checkpoint-2", **options)
    assert resumed.num_sampled == 0 and "anew" not in caplog.text
    assert_same_rows(resumed.scored, whole.scored[2:])
    assert_same_end(resumed, whole)
    if "sampling.curriculum" in options:
        rates = [run.features["resampling"].curriculum.pass_rates for run in (resumed, whole)]
        assert torch.equal(*rates) and rates[0].unique().numel() > 2


def test_a_run_that_dies_while_it_rolls_back_goes_on_as_if_it_did_not(tmp_path, monkeypatch):
    """Back to a checkpoint whose rollout was used by half."""
    options = {"script": three_turns, "save_steps": 3, "steps_per_generation": 2, "max_steps": 8, **PPO, **WINDOW}
    options |= {"per_device_train_batch_size": 2}
    verdicts = {7: "collapsed"}
    straight = guarded(tmp_path / "straight", verdicts, "rollback", **options)
    straight.train()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(guard, "forget_after", die)
        guarded(tmp_path / "killed", verdicts, "rollback", **options).train()
    resumed = guarded(tmp_path / "killed", {}, "rollback", **options)
    resumed.train(resume_from_checkpoint=True)
    for run in (straight, resumed):
        assert guard_of(run).state.num_rollbacks == 1 and guard_of(run).state.num_steps == 12
    assert max(len(item.rows) for item in resumed.last_trajectories) > 1
    assert is_equal(weights_of(straight.model), weights_of(resumed.model))
